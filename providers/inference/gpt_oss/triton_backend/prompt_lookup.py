"""PromptLookup: drafts a sequence's next tokens from those that followed its last few at an earlier place. No torch.

A step that verifies drafts reads more experts than one that does not, so drafting only pays where drafts were accepted
of late: each sequence keeps count, and one whose drafts fail has none for some hundred tokens. Source: Saxena, "Prompt
Lookup Decoding" (2023).
"""

from array import array
from collections.abc import Sequence
from typing import Final

from providers.inference.gpt_oss.checkpoint.spec import MXFP4_GROUP, ModelSpec

MAX_DRAFTS: Final = 7
DRAFT_COUNTS: Final = (1, 3, MAX_DRAFTS)
"""Numbers of tokens to draft: with the one that is known they fill a bucket of rows."""

MIN_SPEEDUP: Final = 1.1
"""Expected gain in tokens per second below which no drafts are made: the costs of steps are estimates."""

MAX_INDEXED_TOKENS: Final = 2**15
"""Tokens indexed in one call: some hundredths of a second, while all other sequences wait."""

_NGRAM_TOKENS: Final = 3
_INITIAL_ACCEPTANCE: Final = 0.75
_HISTORY_DECAY: Final = 0.8
_RECOVERY_RATE: Final = 1 / 128


class PromptLookup:
    """One sequence's tokens, and the last position after each three of them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = array("i", tokens)
        self._position_after: dict[tuple[int, int, int], int] = {}
        self._indexed_end = _NGRAM_TOKENS
        self._accepted_drafts, self._tested_drafts = 2 * _INITIAL_ACCEPTANCE, 2.0

    def extend(self, start: int, tokens: Sequence[int]) -> None:
        """Append `tokens`, which stand at `start` and after; those that are known already are skipped."""
        new_tokens = tokens[max(0, len(self._tokens) - start) :]
        self._tokens.extend(iter(new_tokens))
        self._accepted_drafts += (_INITIAL_ACCEPTANCE * self._tested_drafts - self._accepted_drafts) * (
            1 - (1 - _RECOVERY_RATE) ** len(new_tokens)
        )

    def propose_drafts(self, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the last; none without an earlier match."""
        if count <= 0 or len(self._tokens) < _NGRAM_TOKENS:
            return ()
        self._index_tokens()
        first, second, third = self._tokens[-_NGRAM_TOKENS:]
        at = self._position_after.get((first, second, third))
        if at is None:
            return ()
        # A run that repeats itself within less than `count` tokens is expected to go on doing so.
        period = len(self._tokens) - at
        return [self._tokens[at + index % period] for index in range(count)]

    def _index_tokens(self) -> None:
        """Index all tokens since the last call; of a long prompt its end alone."""
        tokens = self._tokens
        begin = max(self._indexed_end, len(tokens) - MAX_INDEXED_TOKENS)
        for position in range(begin, len(tokens)):
            self._position_after[tokens[position - 3], tokens[position - 2], tokens[position - 1]] = position
        self._indexed_end = max(begin, len(tokens))

    def record_drafts(self, drafted_count: int, accepted_count: int) -> None:
        """Count the accepted drafts: the first `accepted_count` of `drafted_count`. Those after a wrong one were not
        tested."""
        self._accepted_drafts = self._accepted_drafts * _HISTORY_DECAY + accepted_count
        self._tested_drafts = self._tested_drafts * _HISTORY_DECAY + accepted_count + (accepted_count < drafted_count)

    def best_draft_count(self, costs: Sequence[float], rows: int) -> int:
        """Return how many tokens to draft in a step of `rows` rows, by `costs` (of n rows, n from 0): 0 where none
        pays."""
        acceptance = self._accepted_drafts / self._tested_drafts
        best, best_gain = 0, MIN_SPEEDUP
        for count in DRAFT_COUNTS:
            if rows + count < len(costs):
                expected_tokens = rows + sum(acceptance**depth for depth in range(1, count + 1))
                gain = expected_tokens / rows * costs[rows] / costs[rows + count]
                if gain > best_gain:
                    best, best_gain = count, gain
        return best


def step_costs(spec: ModelSpec, rows: int) -> list[float]:
    """Return the bytes of weights that a step of 0 to `rows` rows reads, every token choosing its experts at random."""
    expert = spec.expert_weights * (0.5 + 1 / MXFP4_GROUP) + 2 * spec.expert_biases
    missed = 1 - spec.experts_per_token / spec.experts
    whole = len(spec.layers) * spec.experts * expert
    return [2.0 * spec.dense_parameters + whole * (1 - missed**count) for count in range(rows + 1)]
