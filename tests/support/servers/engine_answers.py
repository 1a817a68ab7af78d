"""Engines' answers, and the outcome of each by every route: whole and streamed responses, and chat completions."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openai import APIStatusError, AsyncOpenAI

from tests.providers.inference.remote import LIMITS
from tests.support.servers.serving import serving
from tests.support.servers.upstream_server import (
    DONE,
    LAST_HTTP_CHUNK,
    Answer,
    Chunk,
    Received,
    UpstreamServer,
    delta_chunk,
    event,
    head,
    http_chunk,
    plain_answer,
    usage_chunk,
)

RECORDINGS: Final = Path(__file__).parents[1] / "data/field"
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {field: {"type": "string"} for field in fields}},
    }
    for name, fields in (("lookup", ["q"]), ("weather", ["city"]), ("ping", []))
]
CHAT_TOOLS: Final = [
    {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}} for tool in TOOLS
]
Calls = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """An answer as a client sees it. The arguments of a call are parsed: they must be JSON."""

    status: str = "completed"
    text: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=tuple[tuple[str, Any], ...])
    error: str = ""


FAILED: Final = Outcome("failed")


def recording(name: str) -> Answer:
    """A recorded answer, with its content type."""
    body = next(path for path in RECORDINGS.glob(f"{name}.*") if path.suffix in (".sse", ".json"))
    meta = RECORDINGS / f"{name}.meta"
    kind = "application/json" if body.suffix == ".json" else "text/event-stream"
    kind = json.loads(meta.read_text())["ctype"] if meta.exists() else kind
    return whole_body(body.read_bytes(), kind)


def whole_body(body: bytes, content_type: str | None = None) -> Answer:
    """An answer of these bytes."""
    return plain_answer(body, 200, {} if content_type is None else {"content-type": content_type})


def events(*chunks: Chunk | str, done: bool = True) -> Answer:
    """A stream of these chunks, which ends properly; each chunk arrives by itself."""
    frames = [*map(event, chunks), *([DONE] if done else [])]
    return [head(), *map(http_chunk, frames), LAST_HTTP_CHUNK]


@dataclass
class Doors:
    """A running stack over one upstream, whose answer a test sets."""

    client: AsyncOpenAI
    upstream: UpstreamServer
    answer: Answer = ()

    async def ask(self, answer: Answer, **fields: Any) -> dict[str, Outcome]:
        """The outcome of this answer by each route."""
        self.answer = answer
        return {
            "whole": await self._respond(fields, stream=False),
            "streamed": await self._respond(fields, stream=True),
            "chat": await self._complete(),
            "chat streamed": await self._stream_completion(),
        }

    async def _respond(self, fields: dict[str, Any], *, stream: bool) -> Outcome:
        create: Any = self.client.responses.create
        try:
            response = await create(
                **{"model": "fake-model", "input": "go", "tools": TOOLS, "store": False, **fields}, stream=stream
            )
            if stream:
                response = [event async for event in response][-1].response
        except APIStatusError as exc:
            return Outcome("failed", error=str(exc.message))
        outputs = [item.model_dump() for item in response.output]
        reasoning = [part["text"] for item in outputs if item["type"] == "reasoning" for part in item["content"] or ()]
        calls = [(item["name"], item["arguments"]) for item in outputs if item["type"] == "function_call"]
        text, error = response.output_text, response.error.message if response.error else ""
        ids = [item["call_id"] for item in outputs if item["type"] == "function_call"]
        return _outcome(response.status, text, "".join(reasoning), calls, ids, error)

    async def _complete(self) -> Outcome:
        create: Any = self.client.chat.completions.create
        messages = [{"role": "user", "content": "go"}]
        try:
            completion = await create(model="fake-model", messages=messages, tools=CHAT_TOOLS)
        except APIStatusError as exc:
            return Outcome("failed", error=str(exc.message))
        choice = completion.choices[0]
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        status = "incomplete" if choice.finish_reason in ("length", "content_filter") else "completed"
        ids = [call.id for call in message.tool_calls or ()]
        return _outcome(status, message.content or "", getattr(message, "reasoning", None) or "", calls, ids)

    async def _stream_completion(self) -> Outcome:
        create: Any = self.client.chat.completions.create
        messages = [{"role": "user", "content": "go"}]
        text = reasoning = ""
        reason: str | None = None
        calls: dict[int, list[str]] = {}
        ids: list[str] = []
        try:
            async for chunk in await create(model="fake-model", messages=messages, tools=CHAT_TOOLS, stream=True):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasoning += getattr(choice.delta, "reasoning", None) or ""
                    reason = choice.finish_reason or reason
                    for call in choice.delta.tool_calls or ():
                        names = calls.setdefault(call.index, ["", ""])
                        names[0] += call.function.name or ""
                        names[1] += call.function.arguments or ""
                        ids += [call.id] if call.id else []
        except Exception as exc:  # noqa: BLE001 - the SDK raises several kinds for an error within a stream
            return Outcome("failed", error=str(exc))
        status = "incomplete" if reason in ("length", "content_filter") else "completed" if reason else "failed"
        return _outcome(status, text, reasoning, [(name, arguments) for name, arguments in calls.values()], ids)


def _outcome(
    status: str, text: str, reasoning: str, calls: Sequence[tuple[str, str]], ids: Sequence[str], error: str = ""
) -> Outcome:
    if status == "failed":
        return Outcome("failed", error=error)
    assert len({*ids}) == len(calls), ids
    parsed = tuple((name, arguments if status == "incomplete" else json.loads(arguments)) for name, arguments in calls)
    return Outcome(status, text, reasoning, parsed)


@asynccontextmanager
async def doors(**section: Any) -> AsyncGenerator[Doors]:
    """A stack over an upstream whose answer each question sets; no failure opens a breaker."""
    async with UpstreamServer() as upstream:
        fields = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving({**fields, "breaker_failures": 1000, **section}) as served:
            opened = Doors(served.client, upstream)

            def current(_received: Received) -> Answer:
                return opened.answer

            upstream.routes["/v1/chat/completions"] = current
            yield opened


# --- rows of the table -----------------------------------------------------------------------------------------------

HELLO: Final = Outcome(text="Hello there.")
A: Final = ("lookup", {"q": "a"})
B: Final = ("lookup", {"q": "b"})
CITY: Final = ("weather", {"city": "b"})
Row = tuple[Answer, Outcome]


def calls(*outcomes: tuple[str, Any], text: str = "") -> Outcome:
    return Outcome(text=text, calls=outcomes)


def pieces(*entries: Any, reason: str | None = "tool_calls") -> Answer:
    """A stream in which each chunk has one entry of `tool_calls`, or those of a list."""
    chunks = [delta_chunk(tool_calls=entry if isinstance(entry, list) else [entry]) for entry in entries]
    return events(*chunks, delta_chunk(reason), usage_chunk())


def entry(name: str | None = None, arguments: Any = None, **fields: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"type": "function", "function": function, **fields}


def said(*reasons: Any, text: str = "Hello there.") -> Answer:
    """A text, and then a chunk for each finish reason."""
    return events(delta_chunk(content=text), *(delta_chunk(reason) for reason in reasons), usage_chunk())


def choices(*entries: Mapping[str, Any], reason: str = "stop") -> Answer:
    """A stream of chunks with these choices."""
    return events(*({"choices": [choice]} for choice in entries), delta_chunk(reason))


def completion(message: Any, reason: Any = "stop", **fields: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return json.dumps({"id": "c1", "object": "chat.completion", "choices": [choice], **fields}).encode()


async def assert_rows(rows: Mapping[str, Row], **section: Any) -> None:
    """Ask for each answer by each route; all outcomes must be those of the table."""
    wrong: dict[str, Any] = {}
    async with doors(**section) as stack:
        for name, (answer, expected) in rows.items():
            outcomes = await stack.ask(answer)
            differing = {door: outcome for door, outcome in outcomes.items() if not _is_right(outcome, expected)}
            if differing:
                wrong[name] = differing
    assert wrong == {}


def _is_right(outcome: Outcome, expected: Outcome) -> bool:
    """A failure must give a reason of some length, with the words that are expected."""
    if expected.status == "failed":
        return outcome.status == "failed" and expected.error in outcome.error and len(outcome.error) >= 25
    return dataclasses.replace(outcome, error="") == expected
