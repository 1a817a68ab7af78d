"""Parse a chat-completions stream: bytes in, deltas out. Synchronous, no I/O.

Correct for every stream and fast for the usual one, because this runs for every token that passes through the server.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from apis.chat import ChatRequest
from apis.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    Usage,
)
from apis.errors import StackError, UpstreamError
from providers.common.net.http.event_stream import EventReader
from providers.inference.chat_completions.answer_body import AnswerBody, JsonReader, is_json
from providers.inference.chat_completions.answer_limits import (
    BYTES_PER_TOKEN,
    LOGPROB_BYTES,
    text_bytes,
    tokens_with_slack,
)
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.chunk_types import (
    AnyChatChunk,
    ChatChunk,
    ChatDelta,
    LogprobChoice,
    Logprobs,
    PlainChoice,
    build_logprob,
    decode_chunk,
    decode_chunk_with_logprobs,
    holds_content,
    is_odd,
)
from providers.inference.chat_completions.deviations import (
    EndReason,
    find_stop_sequence,
    has_unread_fields,
    holds_call,
    load_json,
    normalize_chunk,
    read_error,
    read_finish_reason,
    split_texts,
)
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.repetitions import ProseKind, Repetitions
from providers.inference.chat_completions.streamed_calls import StreamedCalls
from providers.inference.chat_completions.text_repair import SurrogateJoiner
from providers.inference.chat_completions.usage import find_usage, parse_usage

DONE_PAYLOAD: Final = b"[DONE]"
DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_CAUTION: Final[Sequence[EndReason]] = ("tool_calls", "stop", "length", "content_filter", "error")
"""Finish reasons by what they take from an answer. Of two for one end, the later in this order counts."""
_MAX_UNREAD: Final = 64
"""Chunks in which nothing was read that are kept until something is read."""
_MAX_RECENT_TEXTS: Final = 1024
"""Deltas at the end of a text in which a call is looked for."""


class ChatChunkReader(ChunkReader):
    """Reader of chat completions. An answer that goes on after its `max_completion_tokens` ends here with a Finish, and
    `was_cut` is true.

    A finish reason does not end the answer: `[DONE]` or the end of the body does. Where more of the answer follows the
    last finish reason, only `[DONE]` is an end, because such a body may have been cut.
    """

    __slots__ = (
        "_body",
        "_calls",
        "_decode",
        "_deltas",
        "_finish_is_early",
        "_finish_reason",
        "_has_messages",
        "_has_reasoning",
        "_has_text",
        "_logprobs",
        "_max_deltas",
        "_names_calls",
        "_on_fast_path",
        "_prose_kind",
        "_recent_texts",
        "_repetitions",
        "_request",
        "_stop_sequence",
        "_surrogate_joiner",
        "_unread",
        "_unread_part",
        "_usage",
    )

    def __init__(self, request: ChatRequest) -> None:
        super().__init__()
        limit = request.max_completion_tokens
        self._max_deltas = sys.maxsize if limit is None else tokens_with_slack(limit)
        self._request = request
        self._decode: Callable[[bytes], AnyChatChunk] = decode_chunk_with_logprobs if request.logprobs else decode_chunk
        self._body: AnswerBody | EventReader | JsonReader = AnswerBody()
        self._finish_reason: EndReason | None = None
        self._stop_sequence: str | None = None
        self._finish_is_early = False
        self._names_calls = False
        self._usage: Any = None
        self._deltas: list[Delta] = []
        self._logprobs: list[TokenLogprob] = []
        self._prose_kind: ProseKind | None = None
        self._has_text = self._has_reasoning = False
        self._repetitions = Repetitions()
        # the end of the text, where the model may have written a call into it
        self._recent_texts: deque[str] | None = deque(maxlen=_MAX_RECENT_TEXTS) if request.tools else None
        self._has_messages = False
        self._unread: list[bytes] = []
        self._unread_part = ""
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
            self._handle_payloads(self._body.feed(data))
            if type(self._body) is not EventReader:
                self._follow_body()
            self.delta_count += len(out)
            if self.delta_count > self._max_deltas and self.answer_bytes > self._max_deltas * BYTES_PER_TOKEN:
                self._cut(out)
        except StackError as exc:
            self.failure = exc.with_traceback(None)  # which would hold this reader
        return out

    def end(self) -> list[Delta]:
        """Return the last deltas after the body ended cleanly. Sets `failure` if the answer has no end."""
        out = self._deltas = list[Delta]()
        if not self.is_finished and self.failure is None:
            try:
                if isinstance(self._body, JsonReader):
                    self._handle_payloads(self._body.end())
                elif isinstance(self._body, EventReader):  # its last event may have been cut
                    self._handle_payloads([data for data in self._body.end() if is_json(data) or split_texts(data)])
                if not self.is_finished:
                    self._finish(is_ended=False)
            except StackError as exc:
                self.failure = exc.with_traceback(None)
        self.delta_count += len(out)
        return out

    def _follow_body(self) -> None:
        """Let the reader of the body's form take over. A JSON text that grows is a sign of generation."""
        if isinstance(self._body, AnswerBody) and self._body.reader is not None:
            self._body = self._body.reader
        if isinstance(self._body, JsonReader):
            self.saw_activity = True

    def _handle_payloads(self, payloads: Sequence[bytes]) -> None:
        deltas, size_bytes, last_text = self._deltas, 0, ""
        decode, recent_texts = self._decode, self._recent_texts
        if self.keeps_head and payloads:
            self.keeps_head, self.first_payload = False, payloads[0]
        for payload in payloads:
            try:
                chunk = decode(payload)
            except DECODE_ERRORS:
                self._count_texts(size_bytes, last_text)
                size_bytes = 0
                if (chunk := self._read_odd_payload(payload)) is None:
                    continue
            choices = () if self.is_finished else chunk.choices
            if not choices or chunk.error:
                self._handle_chunk_without_choices(chunk, payload)
                continue
            if chunk.usage or chunk.x_groq or chunk.timings:
                self._usage = find_usage(chunk.usage, chunk.x_groq, chunk.timings) or self._usage
            for choice in choices:
                if choice.index:
                    continue
                delta = choice.delta
                if (
                    self._on_fast_path
                    and delta is not None
                    and (content := delta.content)
                    and choice.logprobs is None
                    and choice.error is None
                    and delta.tool_calls is None
                    and delta.reasoning is None
                    and delta.reasoning_content is None
                    and delta.refusal is None
                    and not delta.thinking
                    and not delta.reasoning_details
                    and not delta.unread
                    and self._finish_reason is None
                ):
                    deltas.append(TextDelta(content))
                    last_text = content
                    if recent_texts is not None:
                        recent_texts.append(content)
                    size_bytes += len(content) if content.isascii() else text_bytes(content)
                    if choice.finish_reason is not None:
                        self._end_choice(choice)
                else:
                    self._count_texts(size_bytes, last_text)
                    size_bytes = 0
                    self._handle_choice(choice, payload)
        self._count_texts(size_bytes, last_text)

    def _read_odd_payload(self, payload: bytes) -> AnyChatChunk | None:
        """Return the chunk of a payload in an unusual form; None for the end, for what follows it, and for several
        chunks, which are handled."""
        if self.is_finished:
            return None
        if payload.strip(b' \t\r\n"').upper() == DONE_PAYLOAD:
            self._finish(is_ended=True)
            return None
        texts = split_texts(payload)
        self._handle_payloads(texts)
        return None if texts else self._normalize(payload)

    def _count_texts(self, size_bytes: int, last_text: str) -> None:
        """Count the texts of the fast path."""
        if size_bytes:
            self._has_text = True
            self.answer_bytes += size_bytes
            self._repetitions.add_deltas("text", size_bytes, last_text)

    def _normalize(self, payload: bytes) -> AnyChatChunk:
        """Return a chunk that has another form than the usual one. Raises UpstreamError for what is no chunk."""
        self._on_fast_path = False
        is_whole = isinstance(self._body, JsonReader) and self._body.is_whole
        try:
            value = load_json(payload)
            fields = normalize_chunk(value, is_whole=is_whole)
            if not fields["choices"] and fields["error"] is None and is_whole:
                fields["error"] = read_error(value, is_body=True)
            return msgspec.convert(
                fields, ChatChunk[LogprobChoice] if self._request.logprobs else ChatChunk[PlainChoice]
            )
        except (ValueError, RecursionError) as exc:
            raise UpstreamError("The inference server sent a chunk that is not valid.") from exc

    def _handle_chunk_without_choices(self, chunk: AnyChatChunk, payload: bytes) -> None:
        if self.is_finished:
            return
        if chunk.usage is not None and not chunk.error:
            self._usage = chunk.usage
            return
        chunk = self._normalize(payload)
        if chunk.error is not None:
            is_whole = isinstance(self._body, JsonReader) and self._body.is_whole
            raise failure_to_error(chunk.error, self._request.model, is_whole_answer=is_whole)
        self._keep_unread(payload)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            if not choice.index:
                self._handle_choice(choice, payload)

    def _handle_choice(self, choice: PlainChoice | LogprobChoice, payload: bytes) -> None:
        """Read a choice that may hold anything."""
        if choice.is_message is None and is_odd(choice):
            choice = next((other for other in self._normalize(payload).choices or () if not other.index), choice)
        if choice.error and (error := read_error({"error": choice.error}, has_answer=True)):
            raise failure_to_error(error, self._request.model)
        delta = choice.delta
        if delta is not None and delta.unread:
            self._unread_part = str(delta.unread)
        if delta is not None and choice.is_message:
            self._drop_repetitions(delta, is_last=choice.finish_reason is not None)
        holds_something = delta is not None and holds_content(delta)
        if not holds_something:
            self._keep_unread(payload)
        elif self._finish_reason is not None:
            self._finish_is_early = True
        if delta is not None and (holds_something or choice.logprobs is not None):
            self._handle_delta(delta, choice.logprobs)
        self._end_choice(choice)

    def _keep_unread(self, payload: bytes) -> None:
        """Keep a chunk in which nothing was read."""
        if len(self._unread) < _MAX_UNREAD:
            self._unread.append(payload)

    def _drop_repetitions(self, delta: ChatDelta, *, is_last: bool) -> None:
        """Drop from a message what has been read before: the deltas that it sums up, or the earlier messages that it
        begins with."""
        repetitions = self._repetitions
        if not self._has_messages and (self._has_text or self._has_reasoning or self._calls):
            delta.content = repetitions.find_end("text", delta.content)
            delta.reasoning = repetitions.find_end("reasoning", delta.reasoning)
            if self._calls and delta.tool_calls:
                delta.tool_calls = self._calls.find_ends(delta.tool_calls)
            return
        self._has_messages = True
        delta.content = repetitions.find_growth("text", delta.content, is_last=is_last)
        delta.reasoning = repetitions.find_growth("reasoning", delta.reasoning, is_last=is_last)

    def _handle_delta(self, delta: ChatDelta, logprobs: Logprobs | None) -> None:
        if thought := delta.reasoning or delta.reasoning_content:
            self._has_reasoning = True
            self._add_prose("reasoning", thought)
        if delta.content is not None:
            if logprobs is not None and logprobs.content:
                self.saw_activity = True
                self._logprobs += [build_logprob(token) for token in logprobs.content]
                self.answer_bytes += LOGPROB_BYTES * sum(
                    1 + len(token.top_logprobs or ()) for token in logprobs.content
                )
            if delta.content:
                self._has_text = True
                self._add_prose("text", delta.content)
        if delta.refusal:
            self._has_text = True
            self._add_prose("refusal", delta.refusal)
        if delta.tool_calls:
            self._add_calls(delta.tool_calls)

    # --- text, reasoning, refusal ------------------------------------------------------------------------------------

    def _add_prose(self, kind: ProseKind, text: str) -> None:
        if kind != self._prose_kind:
            self._end_prose()
            self._prose_kind = kind
        size_bytes = text_bytes(text)
        self.answer_bytes += size_bytes
        self._repetitions.add_deltas(kind, size_bytes, text)
        if self._recent_texts is not None and kind == "text":
            self._recent_texts.append(text)
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

    def _add_calls(self, entries: Sequence[Any]) -> None:
        self._end_prose()
        if self._calls is None:
            self._calls = StreamedCalls(self._request)
        calls = self._calls
        size_bytes = calls.size_bytes
        self._deltas += calls.add_entries(entries)
        grown_bytes = calls.size_bytes - size_bytes
        self.delta_count += bool(grown_bytes and not self._deltas)  # what is delayed counts, too
        if grown_bytes:  # a delta that adds nothing to a call is no sign of generation
            self.saw_activity = True
            self.answer_bytes += grown_bytes

    def _end_choice(self, choice: PlainChoice | LogprobChoice) -> None:
        if choice.finish_reason is None or (reason := read_finish_reason(choice.finish_reason)) is None:
            return
        self._usage = choice.usage or self._usage
        self._stop_sequence = find_stop_sequence(choice.stop_reason or choice.matched_stop, self._request.stop)
        self._names_calls = self._names_calls or reason == "tool_calls"
        former = self._finish_reason
        is_replaced = former is None or (self._finish_is_early and former != "error")
        if is_replaced or _CAUTION.index(reason) > _CAUTION.index(former or reason):
            self._finish_reason = reason
        self._finish_is_early = False

    def _finish(self, *, is_ended: bool) -> None:
        """End the answer, which `is_ended` by the server's own word. Raises UpstreamError for one without an end, and
        for one in which nothing could be read."""
        reason = self._finish_reason
        if reason is None or (self._finish_is_early and not is_ended):
            if reason is None and not self._unread and not self.answer_bytes:
                raise UpstreamError("The inference server sent neither chunks of an answer nor a whole one.")
            raise UpstreamError("The inference server's stream ended before the answer did.")
        if reason == "error":
            raise UpstreamError("The inference server broke the generation off.")
        self._end_prose()
        self._refuse_unread_part()
        if self._calls is not None:
            self._deltas += self._calls.finish(is_cut=reason in ("length", "content_filter"))
        self._refuse_unread_answer()
        # With a named tool choice, servers report "stop" although there is a call to execute.
        if reason in ("stop", "tool_calls"):
            reason = "tool_calls" if self._calls else "stop"
        self._deltas.append(Finish(reason, parse_usage(self._usage), self._stop_sequence))
        self.is_finished = True

    def _refuse_unread_part(self) -> None:
        """Raise UpstreamError where a part of the answer could not be read: it is not complete without that."""
        if self._unread_part:
            raise UpstreamError(
                f"The inference server sent {self._unread_part} as a part of its answer, which cannot be read here."
            )

    def _refuse_unread_answer(self) -> None:
        """Raise UpstreamError where something was sent and nothing was read, and where a call was meant and not read. A
        text without a sign of a call is one, under any finish reason."""
        if self._calls:
            return
        if self._names_calls and (not self._has_text or self._has_sign_of_call()):
            raise UpstreamError("The inference server said that the model calls a tool, and sent no call.")
        if not (self._has_text or self._has_reasoning) and self._has_unread_fields():
            raise UpstreamError("The inference server sent an answer of an unknown form: nothing in it could be read.")

    def _has_sign_of_call(self) -> bool:
        """Return true if something was sent that may be a call, in the text or in fields of which nothing was read."""
        has_mark = self._recent_texts is not None and holds_call("".join(self._recent_texts))
        return has_mark or self._has_unread_fields()

    def _has_unread_fields(self) -> bool:
        return any(has_unread_fields(load_json(payload)) for payload in self._unread)

    def _cut(self, deltas: list[Delta]) -> None:
        """End an answer that has more tokens than were asked for; the deltas after the limit are dropped."""
        del deltas[max(0, len(deltas) - (self.delta_count - self._max_deltas)) :]
        self._refuse_unread_part()
        usage = parse_usage(self._usage) if self._usage is not None else Usage(output_tokens=self._max_deltas)
        deltas.append(Finish("length", usage))
        self.is_finished = self.was_cut = True
