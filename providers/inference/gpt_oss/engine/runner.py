"""Runner: the interface between the engine and the code that computes a model. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A run of one sequence's tokens to compute in this step.

    `tokens` (one or more) stand at positions `start`, `start + 1`, ...; everything before is computed. `pages` is the
    block table: position p lives in page `pages[p // page_tokens]`, for all p up to the row's last. Between a slot's
    `open` and `close` its block table only grows at its end; it may be the engine's own live list, so read it during
    the step and hold no reference to it. `needs_sample` requests the token that follows the row's last.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    needs_sample: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's rows, each of another slot, those of one token first. No two rows write to the same page."""

    rows: Sequence[PlanRow]

    @property
    def token_count(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledRun(SampledToken):
    """A chosen token and the ones that follow it, which a runner with drafts verified in the same step.

    They equal the tokens that as many more steps would return. The sequence's next row has them all, and the runner
    computes again only what it has to.
    """

    following_tokens: Sequence[SampledToken] = ()


class Runner(Protocol):
    """Computes plans, one at a time, on the engine's thread.

    Pages are numbered 0 to `page_count` - 1 and hold `page_tokens` positions each; at most `slots` sequences are open
    at once, and none is longer than `context_tokens`. Any method may raise anything: the engine then fails the
    requests of the step, closes every slot and trusts no page's content any more.
    """

    @property
    def page_tokens(self) -> int: ...
    @property
    def page_count(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Open a free slot for a sequence. `generated` is its output from before it was paused, else empty.

        For the penalties: `prompt` and `generated` are counted as such at once. Every token of a later row that stands
        after them is a generated one, counted before its row samples.
        """
        ...

    def close(self, slot: int) -> None:
        """Close the slot of a sequence. Safe for a slot that is not open."""
        ...

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        """Compute the rows' keys and values into their pages, and return the sampled tokens by slot.

        `masks` are token bitmasks by slot (little-endian 32-bit words, bit t of the whole says that token t is
        allowed); a slot without one allows every token. The result of a row without a mask may be a SampledRun.
        """
        ...
