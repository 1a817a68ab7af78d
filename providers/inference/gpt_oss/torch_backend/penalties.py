"""Presence, frequency and repetition penalties over the tokens of each slot that has one."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from providers.inference.gpt_oss.engine.sampling import RowSampling


class Penalties:
    """Costs nothing for slots without a penalty, and for the others as much as they have tokens."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._slots: dict[int, _SlotPenalties] = {}

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        if penalties != (0.0, 0.0, 1.0):
            self._slots[slot] = _SlotPenalties(sampling, prompt, torch.zeros(self._vocabulary, device=self._device))
            self.count(slot, len(prompt), generated)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def count(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Count tokens at positions from `start` on; positions that were counted before, being recomputed, are
        skipped."""
        penalties = self._slots.get(slot)
        if penalties is not None and start + len(tokens) > penalties.counted_tokens:
            penalties.add(tokens[max(0, penalties.counted_tokens - start) :])

    def apply(self, scores: Tensor, slots: Sequence[int]) -> None:
        """Change the rows of `scores` whose slots have penalties, in place."""
        for row, slot in enumerate(slots):
            if slot in self._slots:
                self._slots[slot].apply(scores[row])


class _SlotPenalties:
    """One slot's tokens and counts. `_tokens` may repeat: each gets its new score from its old one and its count, again
    and again."""

    def __init__(self, sampling: RowSampling, prompt: Sequence[int], counts: Tensor) -> None:
        self.counted_tokens = len(prompt)
        self._sampling = sampling
        self._tokens = array("q", prompt if sampling.repetition_penalty != 1 else ())
        self._counts = counts

    def add(self, tokens: Sequence[int]) -> None:
        self.counted_tokens += len(tokens)
        self._tokens.extend(iter(tokens))  # arrays take from arrays of their own type alone
        new_tokens = torch.tensor(list(tokens), device=self._counts.device)
        self._counts.index_add_(0, new_tokens, torch.ones_like(new_tokens, dtype=self._counts.dtype))

    def apply(self, scores: Tensor) -> None:
        if not self._tokens:
            return
        sampling = self._sampling
        tokens = torch.frombuffer(self._tokens, dtype=torch.int64).to(scores.device)
        counts = self._counts[tokens].to(scores.dtype)
        old_scores = scores[tokens]
        repeated = torch.where(
            old_scores > 0, old_scores / sampling.repetition_penalty, old_scores * sampling.repetition_penalty
        )
        scores[tokens] = repeated - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
