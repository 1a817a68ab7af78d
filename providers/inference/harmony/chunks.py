"""Parse a stream of completions in token ids: bytes in, deltas out, by Harmony's own rules. Synchronous, no I/O.

A server's own chunks are read by a ChunkDecoder, of which there is one per server: vLLM's is here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from apis.chat import ChatRequest
from apis.deltas import Delta, TokenLogprob, Usage
from apis.errors import InvalidRequest, StackError, Unsupported, UpstreamError
from providers.common.net.http.event_stream import EventReader
from providers.inference.chat_completions.answer_limits import deltas_bytes, tokens_with_slack
from providers.inference.chat_completions.chunk_reader import ChunkReader
from providers.inference.chat_completions.chunk_types import clamp_logprob
from providers.inference.chat_completions.chunks import DECODE_ERRORS, DONE_PAYLOAD
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.usage import parse_usage
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.vocabulary import END, STOP_IDS

TOKEN_ID_PREFIX: Final = "token_id:"  # noqa: S105 - a prefix, not a password
"""Prefix of a token that the server writes as its id."""
NOT_ENFORCED_MESSAGE: Final = (
    "The model's server cannot be made to enforce what this request demands, unless vLLM is started with "
    '--structured-outputs-config \'{"backend": "guidance", "enable_in_reasoning": true}\'.'
)
HARMONY_FINISH_REASONS: Final[dict[str, Literal["stop", "length"]]] = {"stop": "stop", "length": "length"}


@dataclass(slots=True)
class EnforcedGrammar:
    """Grammar that the server must enforce: the request field that demands it, and a function that checks each token.

    `texts` are the ids of control tokens that the server takes for their text where the grammar allows that text, with
    the ids of the text: there they are read as text, as the server did. Where `<|end|>` is such a token and the turn
    may end, it ends the turn: `is_over`, and what the server goes on to write is not read. `message` explains output
    that violates the grammar."""

    param: str
    accept_token: Callable[[int], bool]
    texts: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    message: str = NOT_ENFORCED_MESSAGE
    is_over: bool = False

    def read_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids as the server's grammar took them. Raises Unsupported for output that violates it."""
        read: list[int] = []
        for token in ids:
            if self.accept_token(token):
                read.append(token)
            elif token == END and (end := next(filter(self.accept_token, STOP_IDS), None)) is not None:
                self.is_over = True
                return [*read, end]
            elif (text := self.texts.get(token)) and all(map(self.accept_token, text)):
                read += text
            else:
                raise Unsupported(self.message, param=self.param)
        return read


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one event of a server. `logprobs` are those of the ids, or empty; `unread_tokens` were generated but
    not sent; `usage` counts the whole prompt; `error` is the server's report of a failure, in any shape."""

    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob | None] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: Any = None
    unread_tokens: int = 0


class ChunkDecoder(Protocol):
    """Decoder of one server's events. `reason_is_last` says that nothing follows the event with the finish reason."""

    reason_is_last: bool

    def decode(self, payload: bytes) -> TokenChunk:
        """Return the content of an event. Raises UpstreamError for one that cannot be read."""
        ...


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class VLLMChunkDecoder:
    """Decoder of vLLM's /completions with `return_token_ids`."""

    reason_is_last = False

    def __init__(self, harmony: Harmony, top_logprobs: int) -> None:
        self._harmony = harmony
        self._top_logprobs = top_logprobs

    def decode(self, payload: bytes) -> TokenChunk:
        """See `ChunkDecoder.decode`."""
        try:
            chunk = _decode(payload)
        except DECODE_ERRORS as exc:
            raise UpstreamError("The inference server sent a chunk that is not valid.") from exc
        usage = None if chunk.usage is None else parse_usage(chunk.usage)
        choice = next((choice for choice in chunk.choices or () if choice.index == 0), None)
        if chunk.error is not None or choice is None:
            return TokenChunk(usage=usage, error=chunk.error)
        if choice.token_ids is None:
            raise UpstreamError("The inference server sends no token ids: template harmony needs a vLLM that does.")
        logprobs = self._build_logprobs(choice.logprobs) if choice.logprobs is not None else ()
        return TokenChunk(choice.token_ids, logprobs, choice.finish_reason, usage)

    def _build_logprobs(self, logprobs: _Logprobs) -> Sequence[TokenLogprob]:
        alternatives = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        if not len(logprobs.tokens) == len(logprobs.token_logprobs) == len(alternatives):
            raise UpstreamError("The inference server sent logprobs that do not fit its tokens.")
        rows = zip(logprobs.tokens, logprobs.token_logprobs, alternatives, strict=True)
        return [self._build_logprob(token, logprob, others or {}) for token, logprob, others in rows]

    def _build_logprob(self, token: str, logprob: float | None, alternatives: dict[str, float | None]) -> TokenLogprob:
        likeliest = sorted(
            ((clamp_logprob(value), _parse_token_id(name)) for name, value in alternatives.items()), reverse=True
        )
        top = [(token_id, value) for value, token_id in likeliest[: self._top_logprobs]]
        return self._harmony.build_token_logprob(_parse_token_id(token), clamp_logprob(logprob), top)


class HarmonyChunkReader(ChunkReader):
    """Reader of the tokens of gpt-oss. An answer that goes on after `max_tokens` is cut. Every token is checked against
    the grammar: output that violates it is Unsupported and is never returned as valid."""

    def __init__(
        self,
        harmony: Harmony,
        request: ChatRequest,
        decoder: ChunkDecoder,
        *,
        prompt_tokens: int,
        max_tokens: int,
        enforced_grammar: EnforcedGrammar | None = None,
    ) -> None:
        super().__init__()
        self._max_tokens = tokens_with_slack(max_tokens)
        self._token_reader = harmony.build_reader(request)
        self._decoder = decoder
        self._model = request.model
        self._input_tokens = prompt_tokens
        self._cached_tokens = 0
        self._enforced_grammar = enforced_grammar
        self._has_tokens = False
        self._event_reader = EventReader()
        self._finish_reason: str | None = None

    def feed(self, data: bytes) -> list[Delta]:
        """Return the deltas that `data` completed, none after the Finish."""
        out: list[Delta] = []
        if self.is_finished or self.failure is not None:
            return out
        try:
            for payload in self._event_reader.feed(data):
                if self.keeps_head:
                    self.keeps_head, self.first_payload = False, payload
                if payload.strip() == DONE_PAYLOAD:
                    out += self._finish()
                else:
                    out += self._handle_payload(payload)
                if self._token_reader.output_tokens > self._max_tokens and not self.is_finished:
                    self._finish_reason, self.was_cut = "length", True
                    out += self._finish()
                if self.is_finished:
                    break
        except StackError as exc:
            self.failure = exc
        self.delta_count += len(out)
        self.answer_bytes += deltas_bytes(out)
        return out

    def end(self) -> list[Delta]:
        """Return the last deltas after the body ended cleanly. Sets `failure` if no finish reason was received."""
        try:
            return [] if self.is_finished or self.failure is not None else self._finish()
        except StackError as exc:
            self.failure = exc
            return []

    def _handle_payload(self, payload: bytes) -> list[Delta]:
        chunk = self._decoder.decode(payload)
        if chunk.error is not None:
            raise self._explain_failure(failure_to_error(chunk.error, self._model))
        if chunk.usage is not None:
            self.saw_activity = True
            self._input_tokens = chunk.usage.input_tokens or self._input_tokens
            self._cached_tokens = min(chunk.usage.cached_tokens, self._input_tokens)
        deltas = self._handle_tokens(chunk) if self._finish_reason is None else []
        is_over = self._enforced_grammar is not None and self._enforced_grammar.is_over
        if (is_over or self._token_reader.is_stopped) and self._finish_reason is None:
            self._finish_reason, self.was_cut = "stop", self._decoder.reason_is_last
        if not self.is_finished and (
            is_over
            or self._token_reader.is_stopped
            or (self._decoder.reason_is_last and self._finish_reason is not None)
        ):
            deltas += self._finish()
        return deltas

    def _handle_tokens(self, chunk: TokenChunk) -> list[Delta]:
        ids, logprobs = chunk.ids, chunk.logprobs
        token_count = len(ids) + chunk.unread_tokens
        if ids:
            self.saw_activity = self._has_tokens = True
        self._finish_reason = chunk.finish_reason
        if self._enforced_grammar is not None:
            read = self._enforced_grammar.read_ids(ids)
            ids, logprobs = read, logprobs if len(read) == len(ids) else ()
        deltas = self._token_reader.feed(ids, logprobs)
        self._token_reader.output_tokens += token_count - len(ids)
        return deltas

    def _explain_failure(self, failure: StackError) -> StackError:
        """Return the failure as its probable cause: vLLM fails in several ways when it cannot enforce a grammar that
        compiled here."""
        if self._enforced_grammar is None or self._has_tokens:
            return failure
        refused = isinstance(failure, InvalidRequest) and "grammar" in failure.message.lower()
        if refused or type(failure) is UpstreamError:
            return Unsupported(
                f"{failure.message} {self._enforced_grammar.message}", param=self._enforced_grammar.param
            )
        return failure

    def _finish(self) -> list[Delta]:
        if self._finish_reason is None:
            raise UpstreamError("The inference server's stream ended before the answer did.")
        reason = HARMONY_FINISH_REASONS.get(self._finish_reason)
        if reason is None:
            raise UpstreamError("The inference server broke the generation off.")
        self.is_finished = True
        return self._token_reader.finish(reason, input_tokens=self._input_tokens, cached_tokens=self._cached_tokens)


def _parse_token_id(name: str) -> int:
    """Return the id of a token that the server wrote as an id."""
    number = name.removeprefix(TOKEN_ID_PREFIX)
    if name == number or not number.isascii() or not number.isdigit():
        raise UpstreamError("The inference server sent logprobs without token ids.")
    return int(number)
