"""Parse a chat-completions stream: bytes in, deltas out. Synchronous, no I/O.

Correct for every stream and fast for the usual one, because this runs for every token that passes through the server.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from apis.chat import ChatRequest
from apis.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from apis.errors import StackError, UpstreamError
from providers.inference.chat_completions.answer_limits import (
    BYTES_PER_TOKEN,
    LOGPROB_BYTES,
    text_bytes,
    tokens_with_slack,
)
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.streamed_calls import StreamedCalls
from providers.inference.chat_completions.text_repair import SurrogateJoiner, repair_surrogates
from providers.inference.chat_completions.usage import parse_usage
from providers.inference.http.event_stream import EventReader

DONE_PAYLOAD: Final = b"[DONE]"
MIN_LOGPROB: Final = -9999.0
DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}

ProseKind = Literal["text", "reasoning", "refusal"]


class _FunctionDelta(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct, gc=False):
    index: int | None = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _TokenLogprob(_TopLogprob, gc=False):
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    index: int = 0


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    object: str | None = None
    message: Any = None
    code: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class ChatChunkReader(ChunkReader):
    """Reader of chat completions. An answer that goes on after its `max_completion_tokens` ends here with a Finish, and
    `was_cut` is true."""

    __slots__ = (
        "_calls",
        "_deltas",
        "_event_reader",
        "_finish_reason",
        "_logprobs",
        "_max_deltas",
        "_on_fast_path",
        "_prose_kind",
        "_request",
        "_surrogate_joiner",
        "_usage",
    )

    def __init__(self, request: ChatRequest) -> None:
        super().__init__()
        limit = request.max_completion_tokens
        self._max_deltas = sys.maxsize if limit is None else tokens_with_slack(limit)
        self._request = request
        self._event_reader = EventReader()
        self._finish_reason: str | None = None
        self._usage: Any = None
        self._deltas: list[Delta] = []
        self._logprobs: list[TokenLogprob] = []
        self._prose_kind: ProseKind | None = None
        self._surrogate_joiner = SurrogateJoiner()
        self._calls: StreamedCalls | None = None  # most answers have none
        self._on_fast_path = True

    def feed(self, data: bytes) -> list[Delta]:
        """Return the deltas that `data` completed, none after the Finish."""
        out: list[Delta] = []
        self._deltas = out
        if self.is_finished or self.failure is not None:
            return out
        try:
            self._handle_payloads(self._event_reader.feed(data))
            self.delta_count += len(out)
            if self.delta_count > self._max_deltas and self.answer_bytes > self._max_deltas * BYTES_PER_TOKEN:
                self._cut(out)
        except StackError as exc:
            self.failure = exc
        return out

    def end(self) -> list[Delta]:
        """Return the last deltas after the body ended cleanly. Sets `failure` if no finish reason was received."""
        out = self._deltas = list[Delta]()
        if not self.is_finished and self.failure is None:
            try:
                self._finish()
            except StackError as exc:
                self.failure = exc
        return out

    def _handle_payloads(self, payloads: list[bytes]) -> None:
        deltas, size_bytes = self._deltas, 0
        if self.keeps_head and payloads:
            self.keeps_head, self.first_payload = False, payloads[0]
        for payload in payloads:
            try:
                chunk = _decode(payload)
            except DECODE_ERRORS:
                if payload.strip() == DONE_PAYLOAD:
                    self._finish()
                    break
                chunk = _decode_leniently(payload)
                self._on_fast_path = False
            choices = chunk.choices
            if chunk.error is not None or not choices:
                self._handle_chunk_without_choices(chunk)
                continue
            if chunk.usage is not None:
                self._usage = chunk.usage
            for choice in choices:
                if choice.index or self._finish_reason is not None:
                    continue
                delta = choice.delta
                if (
                    self._on_fast_path
                    and delta is not None
                    and (content := delta.content)
                    and choice.logprobs is None
                    and delta.tool_calls is None
                    and delta.reasoning is None
                    and delta.reasoning_content is None
                    and delta.refusal is None
                ):
                    deltas.append(TextDelta(content))
                    size_bytes += len(content) if content.isascii() else text_bytes(content)
                elif delta is not None:
                    self._handle_delta(delta, choice.logprobs)
                if choice.finish_reason is not None:
                    self._finish_reason = choice.finish_reason
        self.answer_bytes += size_bytes

    def _handle_chunk_without_choices(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise failure_to_error(chunk.error, self._request.model)
        if chunk.object == "error":
            raise failure_to_error({"message": chunk.message, "code": chunk.code}, self._request.model)
        if chunk.usage is not None:
            self._usage = chunk.usage

    def _handle_delta(self, delta: _Delta, logprobs: _Logprobs | None) -> None:
        if thought := delta.reasoning or delta.reasoning_content:
            self._add_prose("reasoning", thought)
        if delta.content is not None:
            if logprobs is not None and logprobs.content:
                self.saw_activity = True
                self._logprobs += [_build_logprob(token) for token in logprobs.content]
                self.answer_bytes += LOGPROB_BYTES * sum(
                    1 + len(token.top_logprobs or ()) for token in logprobs.content
                )
            if delta.content:
                self._add_prose("text", delta.content)
        if delta.refusal:
            self._add_prose("refusal", delta.refusal)
        for call in delta.tool_calls or ():
            self._add_call(call)

    # --- text, reasoning, refusal ------------------------------------------------------------------------------------

    def _add_prose(self, kind: ProseKind, text: str) -> None:
        if kind != self._prose_kind:
            self._end_prose()
            self._prose_kind = kind
        self.answer_bytes += text_bytes(text)
        text = self._surrogate_joiner.feed(text)
        self._on_fast_path = not self._surrogate_joiner.pending_half and not self._logprobs
        if text:
            self._emit(kind, text)
        else:
            self.saw_activity = True

    def _end_prose(self) -> None:
        """Emit the buffered text before a different kind of output."""
        if self._prose_kind is not None and (remainder := self._surrogate_joiner.flush()):
            self._emit(self._prose_kind, remainder)
        if self._logprobs and self._prose_kind == "text":
            self._emit("text", "")
        self._prose_kind = None
        self._on_fast_path = True

    def _emit(self, kind: ProseKind, text: str) -> None:
        if kind == "reasoning":
            self._deltas.append(ReasoningDelta(text))
        elif kind == "refusal":
            self._deltas.append(RefusalDelta(text))
        else:
            self._deltas.append(TextDelta(text, tuple(self._logprobs)))
            self._logprobs.clear()

    # --- calls and the end -------------------------------------------------------------------------------------------

    def _add_call(self, call: _CallDelta) -> None:
        self._end_prose()
        function = call.function or _FunctionDelta()
        if self._calls is None:
            self._calls = StreamedCalls(self._request)
        calls = self._calls
        size_bytes = calls.size_bytes
        self._deltas += calls.add_delta(call.index or 0, call.id or "", function.name or "", function.arguments or "")
        grown_bytes = calls.size_bytes - size_bytes
        if grown_bytes:  # a delta that adds nothing to a call is no sign of generation
            self.saw_activity = True
            self.answer_bytes += grown_bytes

    def _finish(self) -> None:
        if self._finish_reason is None:
            raise UpstreamError("The inference server's stream ended before the answer did.")
        reason = FINISH_REASONS.get(self._finish_reason)
        if reason is None:
            raise UpstreamError("The inference server broke the generation off.")
        self._end_prose()
        if self._calls is not None:
            self._deltas += self._calls.finish()
        # With a named tool choice, servers report "stop" although there is a call to execute.
        if reason in ("stop", "tool_calls"):
            reason = "tool_calls" if self._calls else "stop"
        self._deltas.append(Finish(reason, parse_usage(self._usage)))
        self.is_finished = True

    def _cut(self, deltas: list[Delta]) -> None:
        """End an answer that has more tokens than were asked for; the deltas after the limit are dropped."""
        del deltas[max(0, len(deltas) - (self.delta_count - self._max_deltas)) :]
        usage = parse_usage(self._usage) if self._usage is not None else Usage(output_tokens=self._max_deltas)
        deltas.append(Finish("length", usage))
        self.is_finished = self.was_cut = True


def _decode_leniently(payload: bytes) -> _Chunk:
    """Decode a chunk that the strict decoder refuses but that is still readable: lone surrogates and wrong UTF-8."""
    try:
        return _decode(payload)
    except DECODE_ERRORS:
        pass
    try:
        value = json.loads(payload.decode("utf-8", "replace"), parse_constant=_refuse_constant)
        return msgspec.convert(value, _Chunk)
    except (ValueError, RecursionError) as exc:
        raise UpstreamError("The inference server sent a chunk that is not valid.") from exc


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _build_logprob(token: _TokenLogprob) -> TokenLogprob:
    top = (
        TopLogprob(repair_surrogates(one.token), _clamp_logprob(one.logprob), _token_bytes(one))
        for one in token.top_logprobs or ()
    )
    return TokenLogprob(repair_surrogates(token.token), _clamp_logprob(token.logprob), _token_bytes(token), tuple(top))


def _clamp_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)


def _token_bytes(token: _TopLogprob) -> Sequence[int]:
    try:
        return list(bytes(token.bytes or ()) or repair_surrogates(token.token).encode())
    except (ValueError, OverflowError):  # numbers that are no bytes
        return list(repair_surrogates(token.token).encode())
