"""The checks of a running stack, each through OpenAI's client, as a client would use it."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson
from openai import APIStatusError, AsyncOpenAI, OpenAIError
from websockets.exceptions import WebSocketException

from apis.errors import ConfigError, StackError
from stack.doctor.finding import Finding, Status
from stack.server_models import DEFAULT_KEY_VARIABLE, NO_KEY, ServedModel, choose_model, read_key, read_models

_TIMEOUT_S: Final = 180.0
"""Seconds for one check, in which a model may have to be loaded."""
_QUESTION: Final = "Name the capital of France in one word."
_ANSWER_TOKENS: Final = 1024
_MAX_LISTED: Final = 8
_COLLECTED_S: Final = 2.0
"""Seconds after which a stream should have begun, if it is not sent as a whole."""
_TOOL: Final = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
_SCHEMA: Final = {
    "type": "json_schema",
    "name": "capital",
    "schema": {
        "type": "object",
        "properties": {"capital": {"type": "string"}},
        "required": ["capital"],
        "additionalProperties": False,
    },
    "strict": True,
}


_ACCESS_CHECKS: Final = ("reachable", "key", "models")
"""The checks without which the others cannot run."""


class CheckFailed(Exception):
    """A check did not find what it expects. The text says what came instead."""


@dataclass
class _Checked:
    """The stack under check. `input_tokens` is the prompt of the question as the model's server counted it."""

    client: AsyncOpenAI
    model: ServedModel
    input_tokens: int | None = None

    async def create(self, **fields: Any) -> Any:
        """Return the response to a small request. Raises CheckFailed for a response that failed."""
        create: Any = self.client.responses.create
        defaults = {"model": self.model.slug, "store": False, "max_output_tokens": _ANSWER_TOKENS, "input": _QUESTION}
        response = await create(**{**defaults, **fields})
        if not fields.get("stream"):
            _refuse_failed(response)
        return response


async def _check_stream(checked: _Checked) -> str:
    started = time.monotonic()
    first_event_s = first_delta_s = None
    ended = None
    async for event in await checked.create(stream=True):
        now = time.monotonic() - started
        first_event_s = now if first_event_s is None else first_event_s
        if event.type.endswith(".delta") and first_delta_s is None:
            first_delta_s = now
        if event.type in {"response.completed", "response.incomplete", "response.failed"}:
            ended = event.response
    total_s = time.monotonic() - started
    if ended is None or first_event_s is None:
        raise CheckFailed("the stream ended without its last event")
    _refuse_failed(ended)
    if first_delta_s is None:
        raise CheckFailed("the model wrote nothing")
    if total_s > _COLLECTED_S and first_event_s > 0.8 * total_s:
        raise CheckFailed(f"all events came at once after {total_s:.1f} s: a proxy collects them")
    checked.input_tokens = ended.usage.input_tokens
    return f"first text after {first_delta_s:.2f} s, {ended.usage.output_tokens} tokens in {total_s:.1f} s"


async def _check_tool_call(checked: _Checked) -> str:
    choice = {"type": "function", "name": _TOOL["name"]}
    response = await checked.create(input="What is the weather in Paris?", tools=[_TOOL], tool_choice=choice)
    call = next((item for item in response.output if item.type == "function_call"), None)
    if call is None:
        raise CheckFailed("the model wrote no call, although the request demands one")
    arguments = _parse_object(call.arguments, "the arguments of the call")
    if not isinstance(arguments.get("city"), str):
        raise CheckFailed(f"the arguments of the call do not match their schema: {call.arguments[:200]}")
    return f"{call.name}({call.arguments})"


async def _check_structured_output(checked: _Checked) -> str:
    response = await checked.create(text={"format": _SCHEMA})
    if response.status != "completed":
        raise CheckFailed(f"the answer was cut off after {_ANSWER_TOKENS} tokens")
    answer = _parse_object(response.output_text, "the answer")
    if not isinstance(answer.get("capital"), str):
        raise CheckFailed(f"the answer does not match its schema: {response.output_text[:200]}")
    return response.output_text


async def _check_websocket(checked: _Checked) -> str:
    connection: Any
    connect: Any = checked.client.responses.connect
    async with connect(max_retries=0) as connection:
        create = connection.response.create
        await create(model=checked.model.slug, input=_QUESTION, store=False, max_output_tokens=_ANSWER_TOKENS)
        async for event in connection:
            if event.type == "error":
                raise CheckFailed(f"it answers with an error: {event}")
            if event.type in {"response.completed", "response.incomplete", "response.failed"}:
                _refuse_failed(event.response)
                return "a response came over it"
    raise CheckFailed("the connection ended before the response did")


async def _check_prefix_cache(checked: _Checked) -> str:
    text = f"Session {secrets.token_hex(8)}.\n" + "A line that both requests have in common.\n" * 120
    usages = [(await checked.create(input=text + end, max_output_tokens=16)).usage for end in ("One?", "Two?")]
    cached, total = usages[1].input_tokens_details.cached_tokens, usages[1].input_tokens
    if not cached:
        raise CheckFailed(f"the second request had {total} tokens, and none came from the cache")
    return f"{cached} of {total} tokens of the second request came from the cache"


async def _check_token_count(checked: _Checked) -> str:
    count = await checked.client.responses.input_tokens.count(model=checked.model.slug, input=_QUESTION)
    counted: Any = count.input_tokens
    if not isinstance(counted, int) or counted < 1:
        raise CheckFailed(f"the answer has no count: {counted!r}")
    if checked.input_tokens is not None and counted != checked.input_tokens:
        raise CheckFailed(f"{counted} tokens were counted, and {checked.input_tokens} were used for the same input")
    return f"{counted} tokens, as counted before the request"


@dataclass(frozen=True)
class _Check:
    """A check and its remedy. `failure` is the status of what did not work."""

    name: str
    run: Callable[[_Checked], Awaitable[str]]
    remedy: str
    failure: Status = "failed"


_CHECKS: Final = (
    _Check(
        "stream",
        _check_stream,
        "`stack check FILE` lets the models of a run config generate, and the log of the server has the cause. A proxy "
        "in between needs `proxy_buffering off` (distributions/docs/deploy.md)",
    ),
    _Check(
        "tool call",
        _check_tool_call,
        "Choose a model that was trained for tools. vLLM needs --enable-auto-tool-choice and --tool-call-parser NAME",
    ),
    _Check(
        "structured output",
        _check_structured_output,
        "Use an engine that enforces schemas: llama_cpp, gpt_oss or vLLM. A reasoning model may need more tokens",
    ),
    _Check(
        "websocket",
        _check_websocket,
        "A proxy in between has to pass the headers Upgrade and Connection (distributions/docs/deploy.md). Without it, "
        "set supports_websockets = false for Codex",
    ),
    _Check(
        "prefix cache",
        _check_prefix_cache,
        "Each turn then reads its whole prompt again. Start vLLM with --enable-prefix-caching and "
        "--enable-prompt-tokens-details; give several replicas as base_url of one provider",
        "warning",
    ),
    _Check(
        "token count",
        _check_token_count,
        "Clients then estimate. The engines llama_cpp, gpt_oss and vLLM count exactly",
        "warning",
    ),
)


async def check_server(url: str, key_variable: str | None, model: str | None) -> AsyncGenerator[Finding]:
    """Check that the stack answers and takes the key, its models, and with one of them a stream, a tool call,
    structured output, the WebSocket, the prefix cache and the count of tokens. Without a model the rest is skipped."""
    url = url.rstrip("/")
    access = _Access(url, key_variable)
    findings = await asyncio.to_thread(access.check, model)
    for finding in findings:
        yield finding
    if access.model is None:
        for name in (*_ACCESS_CHECKS[len(findings) :], *(check.name for check in _CHECKS)):
            yield Finding(name, "skipped", "an earlier check failed")
        return
    async with AsyncOpenAI(base_url=url, api_key=access.key, max_retries=0, timeout=_TIMEOUT_S) as client:
        checked = _Checked(client, access.model)
        for check in _CHECKS:
            yield await _run(check, checked)


class _Access:
    """The way to a model of the stack: `model` is None until all checks of it have passed."""

    def __init__(self, url: str, key_variable: str | None) -> None:
        self._url = url
        self._key_variable = key_variable
        self.key = NO_KEY
        self.model: ServedModel | None = None

    def check(self, model: str | None) -> list[Finding]:
        """Return a finding for each of `_ACCESS_CHECKS`, up to the first failure."""
        findings: list[Finding] = []
        try:
            started = time.monotonic()
            models = read_models(self._url, None)
            findings.append(_pass("reachable", f"{self._url} answered in {(time.monotonic() - started) * 1000:.0f} ms"))
            variable = self._key_variable or (DEFAULT_KEY_VARIABLE if models is None else None)
            if variable is not None:
                models = read_models(self._url, variable)
                self.key = read_key(variable)
            findings.append(_pass("key", f"the one in {variable} is accepted" if variable else "the stack needs none"))
            self.model = choose_model(self._url, models or (), model)
            findings.append(_pass("models", _list_models(models or (), self.model)))
        except (ConfigError, StackError) as exc:
            findings.append(Finding(_ACCESS_CHECKS[len(findings)], "failed", str(exc)))
        return findings


def _pass(name: str, message: str) -> Finding:
    return Finding(name, "ok", message)


def _list_models(models: Sequence[ServedModel], chosen: ServedModel) -> str:
    ordered = [chosen, *(model for model in models if model != chosen)]
    listed = [f"{model.slug} ({_describe_window(model)})" for model in ordered[:_MAX_LISTED]]
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return f"{', '.join(listed)}{more}; the checks use the first one"


def _describe_window(model: ServedModel) -> str:
    return f"{model.context_window} tokens" if model.context_window else "window unknown"


async def _run(check: _Check, checked: _Checked) -> Finding:
    """Return the finding of one check. Any answer of the server leads to one."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return _pass(check.name, await check.run(checked))
    except TimeoutError:
        fault = f"it did not end within {_TIMEOUT_S:.0f} seconds"
    except APIStatusError as exc:
        fault = f"status {exc.status_code}: {exc.message}"
    except (CheckFailed, OpenAIError, WebSocketException, OSError, ValueError) as exc:
        fault = str(exc) or type(exc).__name__
    except (AttributeError, KeyError, TypeError) as exc:
        fault = f"the answer does not have the form of the API: {exc}"
    return Finding(check.name, check.failure, f"{fault.rstrip('.')}. {check.remedy}.")


def _refuse_failed(response: Any) -> None:
    if response.status == "failed":
        raise CheckFailed(response.error.message if response.error else "the response failed")


def _parse_object(text: str, what: str) -> dict[str, Any]:
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise CheckFailed(f"{what} is not a JSON object: {text[:200]!r}")
    return cast("dict[str, Any]", value)
