"""Parse a stream of /completions with token ids: bytes in, deltas out, by Harmony's own rules. Synchronous, no I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from apis.chat import ChatRequest
from apis.deltas import Delta, TokenLogprob
from apis.errors import InvalidRequest, StackError, Unsupported, UpstreamError
from providers.inference.chat_completions.answer_limits import deltas_bytes, tokens_with_slack
from providers.inference.chat_completions.chunks import DECODE_ERRORS, DONE_PAYLOAD, MIN_LOGPROB
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.chat_completions.usage import parse_usage
from providers.inference.harmony.harmony import Harmony
from providers.inference.http.event_stream import EventReader

TOKEN_ID_PREFIX: Final = "token_id:"  # noqa: S105 - a prefix, not a password
"""Prefix of a token that the server writes as its id."""
NOT_ENFORCED_MESSAGE: Final = (
    "The model's server cannot be made to enforce what this request demands, unless vLLM is started with "
    '--structured-outputs-config \'{"backend": "guidance", "enable_in_reasoning": true}\'.'
)
HARMONY_FINISH_REASONS: Final[dict[str, Literal["stop", "length"]]] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class EnforcedGrammar:
    """Grammar that the server must enforce: the request field that demands it, and a function that checks each
    token."""

    param: str
    accept_token: Callable[[int], bool]


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


class HarmonyChunkReader:
    """Reader with the fields of ChatChunkReader. An answer that goes on after `max_tokens` is cut. Every token is
    checked against the grammar: output that violates it is Unsupported and is never returned as valid."""

    def __init__(
        self,
        harmony: Harmony,
        request: ChatRequest,
        *,
        prompt_tokens: int,
        max_tokens: int,
        enforced_grammar: EnforcedGrammar | None = None,
    ) -> None:
        self.failure: StackError | None = None
        self.is_finished = False
        self.saw_activity = False
        self.was_cut = False
        self.answer_bytes = 0
        self.delta_count = 0
        self._max_tokens = tokens_with_slack(max_tokens)
        self._harmony = harmony
        self._token_reader = harmony.build_reader(request)
        self._model = request.model
        self._top_logprobs = request.top_logprobs or 0
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
        try:
            chunk = _decode(payload)
        except DECODE_ERRORS as exc:
            raise UpstreamError("The inference server sent a chunk that is not valid.") from exc
        if chunk.error is not None:
            raise self._explain_failure(failure_to_error(chunk.error, self._model))
        if chunk.usage is not None:
            usage = parse_usage(chunk.usage)
            self._input_tokens = usage.input_tokens or self._input_tokens
            self._cached_tokens = min(usage.cached_tokens, self._input_tokens)
        deltas: list[Delta] = []
        for choice in chunk.choices or ():
            if choice.index == 0 and self._finish_reason is None:
                deltas += self._handle_choice(choice)
        if self._token_reader.is_stopped and not self.is_finished:
            self._finish_reason = "stop"
            deltas += self._finish()
        return deltas

    def _handle_choice(self, choice: _Choice) -> list[Delta]:
        ids = choice.token_ids
        if ids is None:
            raise UpstreamError("The inference server sends no token ids: template harmony needs a vLLM that does.")
        if ids:
            self.saw_activity = self._has_tokens = True
        self._finish_reason = choice.finish_reason
        if self._enforced_grammar is not None and not all(map(self._enforced_grammar.accept_token, ids)):
            raise Unsupported(NOT_ENFORCED_MESSAGE, param=self._enforced_grammar.param)
        return self._token_reader.feed(
            ids, self._build_logprobs(choice.logprobs) if choice.logprobs is not None else ()
        )

    def _explain_failure(self, failure: StackError) -> StackError:
        """Return the failure as its probable cause: vLLM fails in several ways when it cannot enforce a grammar that
        compiled here."""
        if self._enforced_grammar is None or self._has_tokens:
            return failure
        refused = isinstance(failure, InvalidRequest) and "grammar" in failure.message.lower()
        if refused or type(failure) is UpstreamError:
            return Unsupported(f"{failure.message} {NOT_ENFORCED_MESSAGE}", param=self._enforced_grammar.param)
        return failure

    def _finish(self) -> list[Delta]:
        if self._finish_reason is None:
            raise UpstreamError("The inference server's stream ended before the answer did.")
        reason = HARMONY_FINISH_REASONS.get(self._finish_reason)
        if reason is None:
            raise UpstreamError("The inference server broke the generation off.")
        self.is_finished = True
        return self._token_reader.finish(reason, input_tokens=self._input_tokens, cached_tokens=self._cached_tokens)

    def _build_logprobs(self, logprobs: _Logprobs) -> Sequence[TokenLogprob]:
        alternatives = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        if not len(logprobs.tokens) == len(logprobs.token_logprobs) == len(alternatives):
            raise UpstreamError("The inference server sent logprobs that do not fit its tokens.")
        rows = zip(logprobs.tokens, logprobs.token_logprobs, alternatives, strict=True)
        return [self._build_logprob(token, logprob, others or {}) for token, logprob, others in rows]

    def _build_logprob(self, token: str, logprob: float | None, alternatives: dict[str, float | None]) -> TokenLogprob:
        likeliest = sorted(
            ((_clamp_logprob(value), _parse_token_id(name)) for name, value in alternatives.items()), reverse=True
        )
        top = [(token_id, value) for value, token_id in likeliest[: self._top_logprobs]]
        return self._harmony.build_token_logprob(_parse_token_id(token), _clamp_logprob(logprob), top)


def _parse_token_id(name: str) -> int:
    """Return the id of a token that the server wrote as an id."""
    number = name.removeprefix(TOKEN_ID_PREFIX)
    if name == number or not number.isascii() or not number.isdigit():
        raise UpstreamError("The inference server sent logprobs without token ids.")
    return int(number)


def _clamp_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
