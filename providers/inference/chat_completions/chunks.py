"""A chat-completions stream as bytes -> Deltas. Synchronous, no I/O.

Correct for every stream; quick for the usual one, because this runs for every token that passes through the server.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from apis.chat import ChatRequest
from apis.deltas import Delta, Finish, FinishReason, Reasoning, Refusal, Text, TokenLogprob, TopLogprob, Usage
from apis.errors import StackError, UpstreamError
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.streamed_calls import StreamedCalls
from providers.inference.chat_completions.text_repair import SurrogateJoiner, encodable
from providers.inference.http.event_stream import EventReader

DONE: Final = b"[DONE]"
LOGPROB_FLOOR: Final = -9999.0
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}

Prose = Literal["text", "reasoning", "refusal"]


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct, gc=False):
    index: int | None = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Top(msgspec.Struct, gc=False):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _Token(_Top, gc=False):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    index: int = 0


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None
    code: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class ChatChunks:
    """Feed it what the socket gives; then `end` it when the body ended as it should.

    `failure` is set once the stream is known to be bad; the deltas returned with it were still good. `finished` is
    set with the Finish, after which nothing more comes. `alive` is set by every sign of generation and is for the
    reader's watchdog to clear.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.failure: StackError | None = None
        self.finished = False
        self.alive = False
        self._model = request.model
        self._reader = EventReader()
        self._reason: str | None = None
        self._usage: _Usage | None = None
        self._out: list[Delta] = []
        self._logprobs: list[TokenLogprob] = []
        self._prose: Prose | None = None
        self._joiner = SurrogateJoiner()
        self._calls = StreamedCalls(request)
        self._plain = True

    def feed(self, read: bytes) -> list[Delta]:
        """The deltas that `read` completed, none after the Finish."""
        out: list[Delta] = []
        self._out = out
        if self.finished or self.failure is not None:
            return out
        try:
            payloads = self._reader.feed(read)
            if payloads:
                self._take(payloads)
        except StackError as exc:
            self.failure = exc
        return out

    def end(self) -> list[Delta]:
        """The last deltas, when the body ended cleanly. Sets `failure` where no finish was announced."""
        out = self._out = list[Delta]()
        if not self.finished and self.failure is None:
            try:
                self._finish()
            except StackError as exc:
                self.failure = exc
        return out

    def _take(self, payloads: list[bytes]) -> None:
        append, decode = self._out.append, _decode
        for payload in payloads:
            try:
                chunk = decode(payload)
            except UNDECODABLE:
                if payload.strip() == DONE:
                    self._finish()
                    return
                chunk = _decode_leniently(payload)
                self._plain = False
            if chunk.error is not None or not chunk.choices:
                self._take_bare(chunk)
                continue
            if chunk.usage is not None:
                self._usage = chunk.usage
            for choice in chunk.choices:
                delta = choice.delta
                if choice.index or self._reason is not None:
                    continue
                if (
                    self._plain
                    and delta is not None
                    and (content := delta.content)
                    and choice.logprobs is None
                    and delta.tool_calls is None
                    and delta.reasoning is None
                    and delta.reasoning_content is None
                    and delta.refusal is None
                ):
                    append(Text(content))
                elif delta is not None:
                    self._take_delta(delta, choice.logprobs)
                if choice.finish_reason is not None:
                    self._reason = choice.finish_reason

    def _take_bare(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise failure_to_error(chunk.error, self._model)
        if chunk.object == "error":
            raise failure_to_error({"message": chunk.message, "code": chunk.code}, self._model)
        if chunk.usage is not None:
            self._usage = chunk.usage

    def _take_delta(self, delta: _Delta, logprobs: _Logprobs | None) -> None:
        if thought := delta.reasoning or delta.reasoning_content:
            self._add_prose("reasoning", thought)
        if delta.content is not None:
            if logprobs is not None and logprobs.content:
                self._logprobs += [_logprob(token) for token in logprobs.content]
            if delta.content:
                self._add_prose("text", delta.content)
            elif self._logprobs:
                self.alive = True
        if delta.refusal:
            self._add_prose("refusal", delta.refusal)
        for call in delta.tool_calls or ():
            self._add_call(call)

    # --- text, reasoning, refusal ------------------------------------------------------------------------------------

    def _add_prose(self, prose: Prose, text: str) -> None:
        if prose != self._prose:
            self._end_prose()
            self._prose = prose
        text = self._joiner.feed(text)
        self._plain = not self._joiner.half and not self._logprobs
        if text:
            self._emit(prose, text)
        else:
            self.alive = True

    def _end_prose(self) -> None:
        """Let go of what was held back, before something else comes."""
        if self._prose is not None and (rest := self._joiner.flush()):
            self._emit(self._prose, rest)
        if self._logprobs and self._prose == "text":
            self._emit("text", "")
        self._prose = None
        self._plain = True

    def _emit(self, prose: Prose, text: str) -> None:
        if prose == "reasoning":
            self._out.append(Reasoning(text))
        elif prose == "refusal":
            self._out.append(Refusal(text))
        else:
            self._out.append(Text(text, tuple(self._logprobs)))
            self._logprobs.clear()

    # --- calls and the end -------------------------------------------------------------------------------------------

    def _add_call(self, call: _CallDelta) -> None:
        self._end_prose()
        self.alive = True
        said = call.function or _Function()
        self._out += self._calls.add(call.index or 0, call.id or "", said.name or "", said.arguments or "")

    def _finish(self) -> None:
        if self._reason is None:
            raise UpstreamError("The inference server's stream ended before the answer did.")
        reason = FINISH_REASONS.get(self._reason)
        if reason is None:
            raise UpstreamError("The inference server broke the generation off.")
        self._end_prose()
        self._out += self._calls.finish()
        # A named tool choice makes servers say "stop" although there is a call to answer.
        if reason in ("stop", "tool_calls"):
            reason = "tool_calls" if self._calls else "stop"
        self._out.append(Finish(reason, _usage(self._usage)))
        self.finished = True


def _decode_leniently(payload: bytes) -> _Chunk:
    """One chunk, with what the strict decoder refuses and still has a meaning: lone surrogates and wrong UTF-8."""
    try:
        return _decode(payload)
    except UNDECODABLE:
        pass
    try:
        value = json.loads(payload.decode("utf-8", "replace"), parse_constant=_refuse_constant)
        return msgspec.convert(value, _Chunk)
    except (ValueError, RecursionError) as exc:
        raise UpstreamError("The inference server sent a chunk that is not valid.") from exc


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _usage(usage: _Usage | None) -> Usage:
    if usage is None:
        return Usage()
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    counts = (
        usage.prompt_tokens,
        usage.completion_tokens,
        prompt.cached_tokens if prompt else 0,
        output.reasoning_tokens if output else 0,
    )
    return Usage(*(max(count or 0, 0) for count in counts))


def _logprob(token: _Token) -> TokenLogprob:
    top = (TopLogprob(encodable(one.token), _floored(one.logprob), _bytes(one)) for one in token.top_logprobs or ())
    return TokenLogprob(encodable(token.token), _floored(token.logprob), _bytes(token), tuple(top))


def _floored(logprob: float | None) -> float:
    return LOGPROB_FLOOR if logprob is None else max(logprob, LOGPROB_FLOOR)


def _bytes(token: _Top) -> Sequence[int]:
    return token.bytes if token.bytes is not None else list(encodable(token.token).encode())
