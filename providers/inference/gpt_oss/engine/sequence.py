"""TokenSequence: one request's tokens, the number of them that are computed, and when the sequence ends."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from providers.inference.gpt_oss.engine.prefix import PrefixNode
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken

EngineFinishReason = Literal["stop", "length"]
Rank = tuple[int, int]
NO_RANK: Rank = (0, 0)


class TokenMatcher(Protocol):
    """Constrains generation to a grammar. `forced_tokens` looks ahead: only `accept` moves on.

    Called on the engine's thread. An exception of any of these fails the request alone; a StackError's text reaches the
    client.
    """

    @property
    def is_done(self) -> bool:
        """The grammar allows no further token."""
        ...

    def mask(self) -> bytes:
        """Return the tokens that may follow: a bit each, in little-endian 32-bit words."""
        ...

    def accept(self, token: int) -> bool:
        """Move on over `token`; return False, and move nothing, when it may not follow."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that must follow; empty where there is a choice."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Tokens to continue by at most `max_tokens`; a token of `stop_ids` ends the output and is part of it.

    Tenants get equal shares of the engine; prefixes are shared only where `salt` is equal. `priority`, lower first,
    orders one tenant's requests: a level is worth PRIORITY_ARRIVALS arrivals.
    """

    ids: Sequence[int]
    sampling: RowSampling
    max_tokens: int | None = None
    stop_ids: Sequence[int] = ()
    matcher: TokenMatcher | None = None
    tenant: str = ""
    priority: int = 0
    salt: str | None = None


class GrammarViolation(Exception):
    """The runner sampled a token that the grammar's mask forbids."""


class TokenSequence:
    """`tokens` are the prompt's, then the generated ones; the first `computed_tokens` have their keys and values in
    `pages`, of which the first `shared_pages` belong to the prefix tree, under the lock on `node`. Owned by the
    engine's thread."""

    def __init__(self, request: EngineRequest, context_tokens: int) -> None:
        self.request = request
        self.tokens = array("i", request.ids)
        self.prompt_tokens = len(self.tokens)
        max_length = context_tokens if request.max_tokens is None else self.prompt_tokens + request.max_tokens
        self.limit = min(max_length, context_tokens)
        self.stop_ids = frozenset(request.stop_ids)
        self.rank = NO_RANK
        self.reset()
        self.mask: bytes | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: EngineFinishReason | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are not computed yet: exactly one while the sequence decodes."""
        return len(self.tokens) - self.computed_tokens

    def reset(self) -> None:
        """Detach the sequence from its slot and pages; nothing of it counts as computed."""
        self.slot = -1
        self.computed_tokens = 0
        self.pages: list[int] = []
        self.shared_pages = 0
        self.node: PrefixNode | None = None

    def append_sampled(self, sampled_token: SampledToken) -> list[SampledToken]:
        """Append a sampled token and those that a grammar forces after it; return all that fit before the end.

        Raises GrammarViolation when the mask did not allow the token.
        """
        matcher = self.request.matcher
        if matcher is None:
            self._append(sampled_token.token)
            return [sampled_token]
        if not matcher.accept(sampled_token.token):
            raise GrammarViolation(sampled_token.token)
        self._append(sampled_token.token)
        return [sampled_token, *self.append_forced()]

    def append_forced(self) -> list[SampledToken]:
        """Append and return the tokens that the grammar forces now; end the sequence when the grammar is done."""
        matcher = self.request.matcher
        appended: list[SampledToken] = []
        if matcher is None:
            return appended
        logprob = None if self.request.sampling.logprobs is None else 0.0
        while self.finish_reason is None and (forced := matcher.forced_tokens()):
            for token in forced:
                if self.finish_reason is not None:
                    break
                if not matcher.accept(token):
                    raise GrammarViolation(token)
                self._append(token)
                appended.append(SampledToken(token, logprob))
        if self.finish_reason is None and matcher.is_done:
            self.finish_reason = "stop"
        self.mask = None if self.finish_reason else matcher.mask()
        return appended

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
