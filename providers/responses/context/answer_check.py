"""Checks of what engines write that do not promise its form: JSON that a format demands, and arguments of functions."""

import asyncio
import importlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Protocol

import msgspec
import orjson

from apis.chat import (
    CalledFunction,
    ChatFunctionTool,
    ChatJsonSchemaFormat,
    ChatRequest,
    FunctionCall,
    Message,
    ResponseFormat,
)
from apis.deltas import (
    DelayedOutput,
    Delta,
    DeltaBatch,
    Finish,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    count_delayed,
)
from apis.errors import UpstreamError
from apis.inference import Inference
from apis.sink import ConvertedSink, Sink
from apis.wire.base import load_json
from providers.common.wrapped_inference import WrappedInference
from providers.responses.events.open_items import EMPTY_ARGUMENTS

_CITATION_MARK: Final = re.compile("【[^【】]{0,200}】")
_MAX_PROBLEM_CHARS: Final = 400
_JSON_BEGINNINGS: Final = frozenset('{["-0123456789tfn')
"""Characters with which a JSON value begins."""
_FENCE: Final = "```"
_SMALL_CHARS: Final = 16_384
_CORRECTION: Final = "That answer does not have the required form: {problem} Answer again, with nothing but {form}"
_CALL_CORRECTION: Final = "Not run, as a call of this answer is wrong: {problem} Answer again."


class _Validator(Protocol):
    """Validator of jsonschema_rs (https://docs.rs/jsonschema)."""

    def validate(self, instance: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class CheckRules:
    """The checks of the answers for one request, and the parts of them that leave before the checks."""

    promises_schemas: Callable[[], Awaitable[bool]]
    """Returns whether the engine promises to hold schemas: it is then believed, as validators differ in details. That
    something is no JSON at all is never believed."""
    _: KW_ONLY
    demands_json: bool = False
    """The format is checked."""
    is_client_function: Callable[[str], bool] = lambda name: False
    """Returns true for a call of the client: its arguments must be JSON, and those of a strict function valid against
    its schema."""
    streams_text: bool = False
    """Text leaves as it is generated, once it begins as JSON does."""
    streams_calls: bool = False
    """Calls leave as they are generated."""


class CheckedInference(WrappedInference):
    """Wraps an Inference whose engine may ignore the format of a chat and the schemas of its functions.

    An answer is checked when it is complete. What is to be checked waits until then, unless `rules` say that it leaves
    as it is generated. A wrong answer of which nothing has left is written once more. Raises UpstreamError for an
    answer that is wrong in the end.
    """

    def __init__(self, inference: Inference, rules: CheckRules) -> None:
        super().__init__(inference)
        self._rules = rules

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        answer = self._begin_answer(request)
        await self._inference.stream(request, ConvertedSink(sink, answer.take))
        if answer.finish is None:
            return
        problem = await answer.find_problem()
        if problem is None:
            await sink.put((*answer.delayed, answer.finish))
            return
        if answer.has_left or request.max_completion_tokens == answer.finish.usage.output_tokens:
            raise problem.to_error()
        second = self._begin_answer(request)
        second.begins_message = answer.has_left_text
        await self._inference.stream(answer.build_retry(request, problem), ConvertedSink(sink, second.take))
        if second.finish is None:
            return
        if (problem := await second.find_problem()) is not None:
            raise problem.to_error()
        usage = answer.finish.usage.plus(second.finish.usage)
        await sink.put((*second.delayed, Finish(second.finish.reason, usage)))

    def _begin_answer(self, request: ChatRequest) -> "_Answer":
        form = request.response_format if self._rules.demands_json else None
        schemas = {
            tool.name: tool.function.parameters
            for tool in request.tools or ()
            if isinstance(tool, ChatFunctionTool) and tool.function.strict and tool.function.parameters
        }
        return _Answer(form, schemas, self._rules)


@dataclass(frozen=True, slots=True)
class _Problem:
    """The fault of an answer, as a sentence, and the error of the response. `is_json` says that it is JSON and
    breaks its schema."""

    sentence: str
    is_json: bool = True
    error: str = "The model's answer is not valid against the schema in text.format"
    param: str = "text.format"

    def to_error(self) -> UpstreamError:
        return UpstreamError(f"{self.error}: {self.sentence}", param=self.param)


class _Answer:
    """One answer of the model. What waits until it is checked is in `delayed`; `has_left` says that something of it has
    been passed on that cannot be taken back. `has_left_text` says that text has left which needs no check: the text of
    an answer after it `begins_message`. `finish` is its Finish."""

    def __init__(self, form: ResponseFormat | None, schemas: Mapping[str, dict[str, Any]], rules: CheckRules) -> None:
        self.delayed: list[Delta] = []
        self.finish: Finish | None = None
        self.has_left = self.has_left_text = self.begins_message = False
        self._form = form
        self._schemas = schemas
        self._rules = rules
        self._delays_text = form is not None
        self._has_begun = False
        self._texts: list[str] = []
        self._calls: dict[str, tuple[str, list[str]]] = {}
        self._has_other_output = False

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _is_final(self) -> bool:
        """The answer is a whole text, without a call or a refusal."""
        is_whole = self.finish is not None and self.finish.reason == "stop"
        return is_whole and not (self._has_other_output or self._calls)

    def take(self, batch: DeltaBatch) -> DeltaBatch:
        """Return what may leave of a batch now, without the Finish, and the count of what is delayed."""
        output: list[Delta] = []
        for delta in batch:
            match delta:
                case TextDelta(text, _, phase):
                    if self._form is not None and phase != "commentary":
                        self._texts.append(text)
                        if self._delays_text:
                            self._take_text(delta, output)
                            continue
                        self.has_left = True
                    elif self._form is None and not self._rules.streams_calls:
                        self._take_unchecked(delta, output)
                        continue
                case ToolArgumentsDelta(call_id, text):
                    if call_id in self._calls:
                        self._calls[call_id][1].append(text)
                case ToolCallStart():
                    self._take_call(delta, output)
                    continue
                case RefusalDelta():
                    self._take_other(output)
                case Finish():
                    self.finish = delta
                    continue
                case DelayedOutput():
                    output.append(delta)
                    continue
                case _:
                    pass
            (self.delayed or output).append(delta)
        return count_delayed(batch, output)

    def _take_text(self, delta: TextDelta, output: list[Delta]) -> None:
        """Delay text. A streamed one leaves as soon as it begins as JSON does."""
        self.delayed.append(delta)
        beginning = "" if self._has_begun else delta.text.lstrip()
        self._has_begun = self._has_begun or bool(beginning)
        if beginning and self._rules.streams_text and not self._calls and beginning[0] in _JSON_BEGINNINGS:
            self._delays_text = False
            self._release(output)

    def _take_unchecked(self, delta: TextDelta, output: list[Delta]) -> None:
        """Take text that is not checked, of an answer that may be written once more for its calls."""
        self._texts.append(delta.text)
        self.has_left_text = self.has_left_text or not self.delayed
        if self.begins_message:
            self.begins_message = False
            delta = msgspec.structs.replace(delta, begins_message=True)
        (self.delayed or output).append(delta)

    def _take_call(self, start: ToolCallStart, output: list[Delta]) -> None:
        is_checked = not start.custom and self._rules.is_client_function(start.name)
        if is_checked:
            self._calls[start.id] = start.name, []
        if is_checked and not self._rules.streams_calls:
            self.delayed.append(start)
            return
        self._take_other(output)
        (self.delayed or output).append(start)

    def _take_other(self, output: list[Delta]) -> None:
        """Take the beginning of what is not checked: the text before it then is no final answer."""
        self._has_other_output = True
        self._delays_text = False
        if self._rules.streams_calls or not self._calls:
            self._release(output)

    def _release(self, output: list[Delta]) -> None:
        output += self.delayed
        self.delayed = []
        self.has_left = True

    async def find_problem(self) -> _Problem | None:
        """Return what is wrong about the complete answer; None for a right one. The code fence around JSON is taken off
        a text that is delayed."""
        if self.finish is None or self.finish.reason not in ("stop", "tool_calls"):
            return None
        problem = None
        if self._form is not None and self._is_final:
            problem = await asyncio.to_thread(self._find_text_problem, self._form)
        elif self._calls:
            problem = await asyncio.to_thread(self._find_call_problem) if self._is_slow else self._find_call_problem()
        is_believed = problem is not None and problem.is_json and await self._rules.promises_schemas()
        return None if is_believed else problem

    def _find_text_problem(self, form: ResponseFormat) -> _Problem | None:
        problem = _find_problem_but_for_marks(self._text, form)
        text = None if problem is None or self.has_left else _without_fence(self._text)
        if text is not None and _find_problem_but_for_marks(text, form) is None:
            first = next(delta for delta in self.delayed if isinstance(delta, TextDelta))
            self.delayed = list[Delta]([msgspec.structs.replace(first, text=text, logprobs=())])
            return None
        return problem

    @property
    def _is_slow(self) -> bool:
        """Checking the calls may take longer than a thread for it."""
        size = sum(len(text) for _, texts in self._calls.values() for text in texts)
        return bool(self._schemas) or size > _SMALL_CHARS

    def _find_call_problem(self) -> _Problem | None:
        for name, texts in self._calls.values():
            schema = self._schemas.get(name) or self._schemas.get(name.removeprefix("functions."))
            arguments = "".join(texts).strip() or EMPTY_ARGUMENTS
            problem = _find_problem(arguments, schema)
            if problem is None and not arguments.startswith("{"):
                problem = _Problem("it is no JSON object.", is_json=False)
            if problem is not None:
                return _of_call(problem, name)
        return None

    def build_retry(self, request: ChatRequest, problem: _Problem) -> ChatRequest:
        """Return the chat with the wrong answer and what is wrong about it."""
        assert self.finish is not None
        limit = request.max_completion_tokens
        changes: dict[str, Any] = {"max_completion_tokens": limit and max(1, limit - self.finish.usage.output_tokens)}
        if self._calls:
            calls = [
                FunctionCall(id=call_id, function=CalledFunction(name=name, arguments="".join(texts)))
                for call_id, (name, texts) in self._calls.items()
            ]
            words = _CALL_CORRECTION.format(problem=problem.sentence)
            wrong = [Message(role="assistant", content=self._text or None, tool_calls=[*calls])]
            corrections = [Message(role="tool", tool_call_id=call.id, content=words) for call in calls]
        else:
            wrong = [Message(role="assistant", content=self._text)] if self._text else []
            words = _CORRECTION.format(problem=problem.sentence, form=_describe(request.response_format))
            corrections = [Message(role="user", content=words)]
            changes["tool_choice"] = "none" if request.tools else None
        return request.model_copy(update={**changes, "messages": [*request.messages, *wrong, *corrections]})


def _describe(form: ResponseFormat | None) -> str:
    if not isinstance(form, ChatJsonSchemaFormat):
        return "a JSON object."
    return f"JSON that is valid against this schema:\n{orjson.dumps(form.json_schema.schema_).decode()}"


def _without_fence(text: str) -> str | None:
    """Return what a code fence around a whole text holds; None for a text without one."""
    head, _, body = text.strip().partition("\n")
    language = head.removeprefix(_FENCE).strip()
    is_fenced = head.startswith(_FENCE) and body.endswith(_FENCE) and (not language or language.isalnum())
    return body.removesuffix(_FENCE).strip() if is_fenced else None


def _find_problem_but_for_marks(text: str, form: ResponseFormat) -> _Problem | None:
    """Return what is wrong about the answer, also without the marks of citations, which clients do not see in JSON."""
    problem = _find_format_problem(text, form)
    if problem is None or "【" not in text:
        return problem
    return _find_format_problem(_CITATION_MARK.sub("", text), form)


def _find_format_problem(text: str, form: ResponseFormat) -> _Problem | None:
    if isinstance(form, ChatJsonSchemaFormat):
        return _find_problem(text, form.json_schema.schema_)
    problem = _find_problem(text, {"type": "object"})
    error = "The model's answer is not the JSON object that text.format demands"
    return problem and replace(problem, error=error, is_json=False)


def _of_call(problem: _Problem, name: str) -> _Problem:
    error = f"The model's call of the function '{name[:64]}' has wrong arguments"
    return replace(problem, error=error, param="tools")


def _find_problem(text: str, schema: Mapping[str, Any] | None) -> _Problem | None:
    """Return what is wrong about a text that has to be JSON, and valid against a schema if there is one; None for a
    right text, and for a schema that cannot be checked."""
    try:
        value = load_json(text)
    except (ValueError, RecursionError) as exc:
        return _Problem(f"it is not JSON ({exc}).", is_json=False)
    if schema is None:
        return None
    # loaded by the first answer that needs it: 15 MB that many processes never use
    jsonschema: Any = importlib.import_module("jsonschema_rs")
    failure: type[Exception] = jsonschema.ValidationError
    try:
        validator: _Validator = jsonschema.validator_for(schema, retriever=_refuse_reference)
    except (failure, ValueError):
        return None
    try:
        validator.validate(value)
    except failure as exc:
        place = "/".join(map(str, getattr(exc, "instance_path", ())))
        message = str(getattr(exc, "message", exc))[:_MAX_PROBLEM_CHARS]
        return _Problem(f"at '{place}', {message}." if place else f"{message}.")
    return None


def _refuse_reference(uri: str) -> Any:
    raise ValueError(f"a schema refers to no other document: {uri[:100]}")
