"""Scripted: replays a script of model outputs. A real provider for tests, demos and trying clients without a model."""

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from apis.chat import ChatRequest, Message, TextPart
from apis.deltas import (
    Delta,
    DeltaBatch,
    Finish,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    Usage,
)
from apis.errors import ModelNotFound, UpstreamError
from apis.inference import Inference, Model
from apis.provider import Provider
from apis.wire.base import Phase

_WORD_END = re.compile(r"(?<=\S)(?=\s)")
_MAX_KEPT: Final = 1000
_MAX_KEPT_CHARS: Final = 16_000_000


class ScriptLine(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Say(ScriptLine):
    """Text, whole or as a list of chunks; each chunk is a batch of its own."""

    text: str | list[str]
    phase: Phase | None = None


class Think(ScriptLine):
    reasoning: str | list[str]


class Refuse(ScriptLine):
    refusal: str | list[str]


class CallTool(ScriptLine):
    """Complete tool call. `arguments` is JSON text, or free text for a `custom` tool."""

    call: str
    arguments: str | list[str] = ""
    id: str | None = None
    custom: bool = False


class ParallelCalls(ScriptLine):
    """Calls whose chunks interleave, as when a model writes them in parallel."""

    calls: list[CallTool]


class Wait(ScriptLine):
    wait_s: float = Field(ge=0)


class Stop(ScriptLine):
    """Ends the turn. Without it a turn ends by itself, with the matching reason."""

    finish: FinishReason
    usage: dict[Literal["input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens"], int] = {}
    stop_sequence: str | None = None


class Fail(ScriptLine):
    """Breaks the turn off, like a failing upstream."""

    fail: str


def _line_tag(value: Any) -> str | None:
    keys: Any = cast(Any, value if isinstance(value, dict) else vars(value))
    return next(
        (key for key in ("text", "reasoning", "refusal", "call", "calls", "wait_s", "finish", "fail") if key in keys),
        None,
    )


AnyScriptLine = Annotated[
    Annotated[Say, Tag("text")]
    | Annotated[Think, Tag("reasoning")]
    | Annotated[Refuse, Tag("refusal")]
    | Annotated[CallTool, Tag("call")]
    | Annotated[ParallelCalls, Tag("calls")]
    | Annotated[Wait, Tag("wait_s")]
    | Annotated[Stop, Tag("finish")]
    | Annotated[Fail, Tag("fail")],
    Discriminator(_line_tag),
]


class Scripted(Inference):
    """Each chat plays the next turn of the script, and the first again after the last. Without a script it repeats the
    last user message word by word. One word counts as one token."""

    class Config(Provider.Config):
        model: str = "scripted"
        turns: list[list[AnyScriptLine]] = Field(default_factory=list[list[AnyScriptLine]])

    def __init__(self, config: Config) -> None:
        self._config = config
        self._played_turns = 0
        self.requests: deque[ChatRequest] = deque()
        """Received requests, newest last: a thousand, and of those with long prompts as many as are 16 MB together."""
        self._kept_sizes: deque[int] = deque()
        self._kept_chars = 0
        self.abandoned_chats = 0
        """Number of chats closed before their Finish."""

    async def models(self) -> Sequence[Model]:
        return [Model(id=self._config.model, owned_by="stack", created=int(time.time()))]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if request.model != self._config.model:
            raise ModelNotFound(request.model, [self._config.model])
        words, chars = _measure_prompt(request)
        self._keep(request, chars)
        turns = self._config.turns or [[Say(text=_split_words(_last_user_text(request)))]]
        lines = turns[self._played_turns % len(turns)]
        self._played_turns += 1
        player = _Player(words, request.max_completion_tokens)
        try:
            for line in lines:
                if isinstance(line, Wait):
                    await asyncio.sleep(line.wait_s)
                for batch in player.play(line):
                    yield batch
                    await asyncio.sleep(0)
                    if player.is_finished:
                        return
            yield (player.finish(),)
        except GeneratorExit:
            self.abandoned_chats += not player.is_finished
            raise
        except asyncio.CancelledError:
            self.abandoned_chats += 1
            raise

    def _keep(self, request: ChatRequest, chars: int) -> None:
        self.requests.append(request)
        self._kept_sizes.append(chars)
        self._kept_chars += chars
        while len(self.requests) > 1 and (len(self.requests) > _MAX_KEPT or self._kept_chars > _MAX_KEPT_CHARS):
            self.requests.popleft()
            self._kept_chars -= self._kept_sizes.popleft()

    async def count_tokens(self, request: ChatRequest) -> int:
        return count_words(request)


class _Player:
    """Converts script lines into batches and counts their tokens."""

    def __init__(self, input_tokens: int, max_tokens: int | None) -> None:
        self.is_finished = False
        self._input_tokens = input_tokens
        self._max_tokens = max_tokens
        self._output_tokens = 0
        self._reasoning_tokens = 0
        self._call_count = 0

    def play(self, line: AnyScriptLine) -> Iterable[DeltaBatch]:
        """Yield the batches of a line. Each is counted when it is consumed; none may be consumed once `is_finished` is
        true."""
        match line:
            case Say():
                return (self._count_delta(TextDelta(chunk, phase=line.phase)) for chunk in _to_chunks(line.text))
            case Think():
                return (self._count_delta(ReasoningDelta(chunk)) for chunk in _to_chunks(line.reasoning))
            case Refuse():
                return (self._count_delta(RefusalDelta(chunk)) for chunk in _to_chunks(line.refusal))
            case CallTool():
                return self._play_calls([line])
            case ParallelCalls():
                return self._play_calls(line.calls)
            case Stop():
                finish = self.finish(line.finish, line.usage)
                return [(msgspec.structs.replace(finish, stop_sequence=line.stop_sequence),)]
            case Fail():
                raise UpstreamError(line.fail)
            case Wait():
                return []

    def finish(self, reason: FinishReason | None = None, usage: dict[Any, int] | None = None) -> Finish:
        self.is_finished = True
        counted = {
            "input_tokens": self._input_tokens,
            "output_tokens": self._output_tokens,
            "reasoning_tokens": self._reasoning_tokens,
        }
        return Finish(reason or ("tool_calls" if self._call_count else "stop"), Usage(**{**counted, **(usage or {})}))

    def _play_calls(self, calls: Sequence[CallTool]) -> Iterator[DeltaBatch]:
        ids: list[str] = []
        for call in calls:
            self._call_count += 1
            ids.append(call.id or f"call_{self._call_count}")
            yield self._count_delta(ToolCallStart(ids[-1], call.call, call.custom))
        written = [_to_chunks(call.arguments) for call in calls]
        for position in range(max(map(len, written))):
            for call_id, chunks in zip(ids, written, strict=True):
                if position < len(chunks):
                    yield self._count_delta(ToolArgumentsDelta(call_id, chunks[position]))

    def _count_delta(self, delta: Delta) -> DeltaBatch:
        self._output_tokens += 1
        self._reasoning_tokens += isinstance(delta, ReasoningDelta)
        if self._max_tokens is not None and self._output_tokens >= self._max_tokens:
            return delta, self.finish("length")
        return (delta,)


def _to_chunks(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _last_user_text(request: ChatRequest) -> str:
    for message in reversed(request.messages):
        if message.role == "user" and message.content:
            if isinstance(message.content, str):
                return message.content
            return " ".join(part.text for part in message.content if isinstance(part, TextPart))
    return "..."


def count_words(request: ChatRequest) -> int:
    """Return the length of the prompt in words."""
    return _measure_prompt(request)[0]


def _measure_prompt(request: ChatRequest) -> tuple[int, int]:
    """Return the words and the characters of the prompt."""
    words = chars = 0
    for message in request.messages:
        text = _content_to_json(message)
        words += len(text.split())
        chars += len(text)
    return words, chars


def _content_to_json(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return orjson.dumps(content).decode()
    return message.model_dump_json(include={"content"})


def _split_words(text: str) -> list[str]:
    """Return the words, each with the white space before it."""
    return [word for word in _WORD_END.split(text) if not word.isspace() and word]
