"""TokenSequence: one request's tokens, how far they are computed, and when they end."""

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
    """Holds generation to a grammar. `forced` looks ahead: only `accept` moves on.

    Used by the engine's thread. What any of these raises fails the request alone; a StackError says so in its words.
    """

    @property
    def is_done(self) -> bool:
        """Nothing may follow any more."""
        ...

    def mask(self) -> bytes:
        """Which tokens may follow: a bit each, in little-endian 32-bit words."""
        ...

    def accept(self, token: int) -> bool:
        """Move on over `token`; False, and nothing moves, when it may not follow."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """The tokens that must follow; empty where there is a choice."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Tokens to continue. At most `max_tokens` come, fewer at a token of `stop_ids`, which is still given out.

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
    """The runner sampled what the grammar's mask forbids."""


class TokenSequence:
    """`tokens` are the prompt's, then the generated ones; the first `computed` have their keys and values in `pages`,
    of which the first `shared` belong to the prefix tree, under the lock on `node`. Owned by the engine's thread."""

    def __init__(self, request: EngineRequest, context_tokens: int) -> None:
        self.request = request
        self.tokens = array("i", request.ids)
        self.prompt_tokens = len(self.tokens)
        most = context_tokens if request.max_tokens is None else self.prompt_tokens + request.max_tokens
        self.limit = min(most, context_tokens)
        self.stop_ids = frozenset(request.stop_ids)
        self.rank = NO_RANK
        self.reset()
        self.mask: bytes | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: EngineFinishReason | None = None

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are known and not computed: one in the midst of decoding."""
        return len(self.tokens) - self.computed_tokens

    def reset(self) -> None:
        """It has no place: no slot, and nothing computed that it could count on."""
        self.slot = -1
        self.computed_tokens = 0
        self.pages: list[int] = []
        self.shared_pages = 0
        self.node: PrefixNode | None = None

    def append_sampled(self, sampled_token: SampledToken) -> list[SampledToken]:
        """Append a sampled token and those that a grammar forces behind it; all of them, up to the end if it is there.

        Raises GrammarBroken when the token is not one that its mask allowed.
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
        """Append what the grammar forces now, without a choice. Also ends the sequence when the grammar has."""
        matcher = self.request.matcher
        taken: list[SampledToken] = []
        if matcher is None:
            return taken
        logprob = None if self.request.sampling.logprobs is None else 0.0
        while self.finish_reason is None and (forced := matcher.forced_tokens()):
            for token in forced:
                if self.finish_reason is not None:
                    break
                if not matcher.accept(token):
                    raise GrammarViolation(token)
                self._append(token)
                taken.append(SampledToken(token, logprob))
        if self.finish_reason is None and matcher.is_done:
            self.finish_reason = "stop"
        self.mask = None if self.finish_reason else matcher.mask()
        return taken

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
