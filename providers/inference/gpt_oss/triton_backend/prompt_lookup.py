"""Prompt lookup: guesses a sequence's next tokens from what followed when its last few stood there before. No torch.

A step that verifies guesses reads more experts than one that does not, so a guess is only worth making where guesses
were right of late: each sequence keeps count, and one whose guesses fail is left alone for some hundred tokens.
Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

from array import array
from collections.abc import Sequence
from typing import Final

from providers.inference.gpt_oss.checkpoint.spec import MXFP4_GROUP, ModelSpec

MAX_DRAFTS: Final = 7
DRAFT_COUNTS: Final = (1, 3, MAX_DRAFTS)
"""How many tokens may be guessed: with the one that is known they fill a bucket of rows."""

MIN_SPEEDUP: Final = 1.1
"""A step with guesses must be expected to make so much more of its time: what it costs is an estimate."""

MAX_INDEXED_TOKENS: Final = 2**15
"""Tokens that are looked at in one go: some hundredths of a second, while all others wait."""

_NGRAM_TOKENS: Final = 3
_INITIAL_ACCEPTANCE: Final = 0.75
_HISTORY_DECAY: Final = 0.8
_RECOVERY_RATE: Final = 1 / 128


class PromptLookup:
    """One sequence's tokens, and where each three of them stood last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = array("i", tokens)
        self._position_after: dict[tuple[int, int, int], int] = {}
        self._indexed_end = _NGRAM_TOKENS
        self._accepted_drafts, self._tested_drafts = 2 * _INITIAL_ACCEPTANCE, 2.0

    def extend(self, start: int, tokens: Sequence[int]) -> None:
        """The sequence has `tokens` from position `start` on, some of which may be known."""
        fresh = tokens[max(0, len(self._tokens) - start) :]
        self._tokens.extend(iter(fresh))
        self._accepted_drafts += (_INITIAL_ACCEPTANCE * self._tested_drafts - self._accepted_drafts) * (
            1 - (1 - _RECOVERY_RATE) ** len(fresh)
        )

    def propose_drafts(self, count: int) -> Sequence[int]:
        """Up to `count` tokens that may follow the last; none where nothing is like it."""
        if count <= 0 or len(self._tokens) < _NGRAM_TOKENS:
            return ()
        self._index_tokens()
        first, second, third = self._tokens[-_NGRAM_TOKENS:]
        at = self._position_after.get((first, second, third))
        if at is None:
            return ()
        # What repeats itself within less than `count` tokens is guessed to go on doing so.
        period = len(self._tokens) - at
        return [self._tokens[at + place % period] for place in range(count)]

    def _index_tokens(self) -> None:
        """At all tokens since the last time; of a long prompt's at its end alone."""
        tokens = self._tokens
        begin = max(self._indexed_end, len(tokens) - MAX_INDEXED_TOKENS)
        for place in range(begin, len(tokens)):
            self._position_after[tokens[place - 3], tokens[place - 2], tokens[place - 1]] = place
        self._indexed_end = max(begin, len(tokens))

    def record_drafts(self, drafted_count: int, accepted_count: int) -> None:
        """Of `drafted` tokens the first `accepted` were right; those behind a wrong one were not put to the test."""
        self._accepted_drafts = self._accepted_drafts * _HISTORY_DECAY + accepted_count
        self._tested_drafts = self._tested_drafts * _HISTORY_DECAY + accepted_count + (accepted_count < drafted_count)

    def best_draft_count(self, costs: Sequence[float], rows: int) -> int:
        """How many tokens to guess beside a step's `rows` rows, by `costs` (of n rows, n from 0): 0 where none pays."""
        share = self._accepted_drafts / self._tested_drafts
        best, most = 0, MIN_SPEEDUP
        for count in DRAFT_COUNTS:
            if rows + count < len(costs):
                made = rows + sum(share**place for place in range(1, count + 1))
                gain = made / rows * costs[rows] / costs[rows + count]
                if gain > most:
                    best, most = count, gain
        return best


def step_costs(spec: ModelSpec, rows: int) -> list[float]:
    """The bytes of weights that a step of 0 to `rows` rows reads, every token choosing its experts at random."""
    expert = spec.expert_weights * (0.5 + 1 / MXFP4_GROUP) + 2 * spec.expert_biases
    missed = 1 - spec.experts_per_token / spec.experts
    whole = len(spec.layers) * spec.experts * expert
    return [2.0 * spec.dense_parameters + whole * (1 - missed**count) for count in range(rows + 1)]
