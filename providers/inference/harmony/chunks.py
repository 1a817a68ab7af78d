"""A stream of /completions with token ids, as bytes -> Deltas, by Harmony's own rules. Synchronous, no I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from apis.chat import ChatRequest
from apis.deltas import Delta, TokenLogprob
from apis.errors import InvalidRequest, StackError, Unsupported, UpstreamError
from providers.inference.chat_completions.chunks import DONE, LOGPROB_FLOOR, UNDECODABLE
from providers.inference.chat_completions.errors import failure_to_error
from providers.inference.harmony.harmony import Harmony
from providers.inference.http.event_stream import EventReader

BY_ID: Final = "token_id:"
"""How the server spells a token where it was asked to write ids."""
NOT_ENFORCED: Final = (
    "The model's server cannot be made to enforce what this request demands, unless vLLM is started with "
    '--structured-outputs-config \'{"backend": "guidance", "enable_in_reasoning": true}\'.'
)
REASONS: Final[dict[str, Literal["stop", "length"]]] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Enforced:
    """What the server was told to hold the answer to: the field that demands it, and whether a token keeps to it."""

    param: str
    allows: Callable[[int], bool]


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class HarmonyChunks:
    """The fields are those of ChatChunks. What is to be enforced is held against each token: an answer that was not
    held to it is Unsupported and never taken for one that was."""

    def __init__(
        self, harmony: Harmony, request: ChatRequest, *, prompt_tokens: int, enforced: Enforced | None = None
    ) -> None:
        self.failure: StackError | None = None
        self.finished = False
        self.alive = False
        self._harmony = harmony
        self._reader = harmony.reader(request)
        self._model = request.model
        self._top_logprobs = request.top_logprobs or 0
        self._input_tokens = prompt_tokens
        self._cached_tokens = 0
        self._enforced = enforced
        self._began = False
        self._events = EventReader()
        self._reason: str | None = None

    def feed(self, read: bytes) -> list[Delta]:
        """The deltas that `read` completed, none after the Finish."""
        out: list[Delta] = []
        if self.finished or self.failure is not None:
            return out
        try:
            for payload in self._events.feed(read):
                if payload.strip() == DONE:
                    out += self._finish()
                else:
                    out += self._take(payload)
                if self.finished:
                    break
        except StackError as exc:
            self.failure = exc
        return out

    def end(self) -> list[Delta]:
        """The last deltas, when the body ended cleanly. Sets `failure` where no finish was announced."""
        try:
            return [] if self.finished or self.failure is not None else self._finish()
        except StackError as exc:
            self.failure = exc
            return []

    def _take(self, payload: bytes) -> list[Delta]:
        try:
            chunk = _decode(payload)
        except UNDECODABLE as exc:
            raise UpstreamError("The inference server sent a chunk that is not valid.") from exc
        if chunk.error is not None:
            raise self._failure(failure_to_error(chunk.error, self._model))
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._input_tokens = chunk.usage.prompt_tokens or self._input_tokens
            self._cached_tokens = min((details and details.cached_tokens) or 0, self._input_tokens)
        deltas: list[Delta] = []
        for choice in chunk.choices or ():
            if choice.index == 0 and self._reason is None:
                deltas += self._take_choice(choice)
        if self._reader.stopped and not self.finished:
            self._reason = "stop"
            deltas += self._finish()
        return deltas

    def _take_choice(self, choice: _Choice) -> list[Delta]:
        ids = choice.token_ids
        if ids is None:
            raise UpstreamError("The inference server sends no token ids: template harmony needs a vLLM that does.")
        if ids:
            self.alive = self._began = True
        self._reason = choice.finish_reason
        if self._enforced is not None and not all(map(self._enforced.allows, ids)):
            raise Unsupported(NOT_ENFORCED, param=self._enforced.param)
        return self._reader.feed(ids, self._logprobs(choice.logprobs) if choice.logprobs is not None else ())

    def _failure(self, failure: StackError) -> StackError:
        """vLLM fails in its own ways where it cannot enforce a grammar, which was found good before it was sent."""
        if self._enforced is None or self._began:
            return failure
        refused = isinstance(failure, InvalidRequest) and "grammar" in failure.message.lower()
        if refused or type(failure) is UpstreamError:
            return Unsupported(f"{failure.message} {NOT_ENFORCED}", param=self._enforced.param)
        return failure

    def _finish(self) -> list[Delta]:
        if self._reason is None:
            raise UpstreamError("The inference server's stream ended before the answer did.")
        reason = REASONS.get(self._reason)
        if reason is None:
            raise UpstreamError("The inference server broke the generation off.")
        self.finished = True
        return self._reader.finish(reason, input_tokens=self._input_tokens, cached_tokens=self._cached_tokens)

    def _logprobs(self, said: _Logprobs) -> Sequence[TokenLogprob]:
        alternatives = said.top_logprobs or [None] * len(said.tokens)
        if not len(said.tokens) == len(said.token_logprobs) == len(alternatives):
            raise UpstreamError("The inference server sent logprobs that do not fit its tokens.")
        rows = zip(said.tokens, said.token_logprobs, alternatives, strict=True)
        return [self._logprob(token, logprob, others or {}) for token, logprob, others in rows]

    def _logprob(self, token: str, logprob: float | None, others: dict[str, float | None]) -> TokenLogprob:
        likeliest = sorted(((_floored(each), _id(name)) for name, each in others.items()), reverse=True)
        top = [(each, value) for value, each in likeliest[: self._top_logprobs]]
        return self._harmony.token_logprob(_id(token), _floored(logprob), top)


def _id(name: str) -> int:
    """Of a token that the server was asked to write by its id."""
    number = name.removeprefix(BY_ID)
    if name == number or not number.isascii() or not number.isdigit():
        raise UpstreamError("The inference server sent logprobs without token ids.")
    return int(number)


def _floored(logprob: float | None) -> float:
    return LOGPROB_FLOOR if logprob is None else max(logprob, LOGPROB_FLOOR)
