"""Sampler: chooses tokens from logits, each row by its own parameters: vectorised, and independent of the other
rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.torch_backend.penalties import Penalties

GREEDY_BELOW: Final = 1e-5
CANDIDATES: Final = 512
"""Tokens that are sorted first; a row that needs more has CANDIDATE_GROWTH times as many sorted, and so on."""

CANDIDATE_GROWTH: Final = 16

_BLOCK: Final = 128
_WORD_MASK: Final = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on these two alone: splitmix64 (Steele et al., 2014) over a hashed
    seed."""
    return _mix_bits(_mix_bits(seed & _WORD_MASK) + 0x9E3779B97F4A7C15 * (position + 1) & _WORD_MASK) / 2**53


def _mix_bits(word: int) -> int:
    """Return 53 well-mixed bits of 64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD_MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD_MASK
    return (word ^ word >> 31) >> 11


class Sampler:
    """One per runner. Slots are opened before they sample, with the tokens that the penalties count from."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._sampling_by_slot: dict[int, RowSampling] = {}
        self._bias_by_slot: dict[int, tuple[Tensor, Tensor]] = {}
        self._penalties = Penalties(vocabulary, device)
        self._device = device

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self.close(slot)
        self._sampling_by_slot[slot] = sampling
        self._penalties.open(slot, sampling, prompt, generated)
        # A token that does not exist has no logit to bias, and must not fail the step of the other rows.
        biases = {token: bias for token, bias in sampling.logit_bias.items() if 0 <= token < self._vocabulary}
        if biases:
            tokens = torch.tensor(list(biases), device=self._device)
            self._bias_by_slot[slot] = (
                tokens,
                torch.tensor(list(biases.values()), dtype=torch.float32, device=self._device),
            )

    def close(self, slot: int) -> None:
        self._sampling_by_slot.pop(slot, None)
        self._bias_by_slot.pop(slot, None)
        self._penalties.close(slot)

    def count(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Record that the slot's sequence has `tokens` from position `start` on."""
        self._penalties.count(slot, start, tokens)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int]], masks: Mapping[int, bytes]
    ) -> dict[int, SampledToken]:
        """Return a token for each of `rows` (slot, position to fill) from its logits [rows, vocabulary], which are
        overwritten.

        Log-probabilities are the model's own: before penalties, bias, mask and temperature. Raises FloatingPointError
        when a row's logits are not numbers.
        """
        scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        logprob_rows = [row for row, (slot, _) in enumerate(rows) if self._sampling_by_slot[slot].logprobs is not None]
        raw = scores[logprob_rows] if logprob_rows else None
        self._adjust_scores(scores, [slot for slot, _ in rows], masks)
        tokens: list[int] = _tensor_to_list(self._choose_tokens(scores, rows))
        chosen = {slot: SampledToken(token) for (slot, _), token in zip(rows, tokens, strict=True)}
        if raw is not None:
            slot_tokens = [(rows[row][0], tokens[row]) for row in logprob_rows]
            chosen |= self._report_logprobs(raw, slot_tokens)
        return chosen

    def _adjust_scores(self, scores: Tensor, slots: Sequence[int], masks: Mapping[int, bytes]) -> None:
        self._penalties.apply(scores, slots)
        for row, slot in enumerate(slots):
            if slot in self._bias_by_slot:
                tokens, bias = self._bias_by_slot[slot]
                scores[row].index_add_(0, tokens, bias.to(scores.dtype))
            if slot in masks:
                scores[row].masked_fill_(_forbidden_tokens(masks[slot], self._vocabulary, self._device), -torch.inf)

    def _choose_tokens(self, scores: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
        kinds: dict[str, list[int]] = {}
        for row, (slot, _) in enumerate(rows):
            kinds.setdefault(_sampling_kind(self._sampling_by_slot[slot]), []).append(row)
        if len(kinds) == 1:
            return self._choose_same_kind(next(iter(kinds)), scores, rows)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
        for kind, members in kinds.items():
            chosen[members] = self._choose_same_kind(kind, scores[members], [rows[row] for row in members])
        return chosen

    def _choose_same_kind(self, kind: str, scores: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
        if kind == "greedy":
            best, tokens = scores.max(dim=-1)
            _check_finite(best)
            return tokens
        samplings = [self._sampling_by_slot[slot] for slot, _ in rows]
        uniforms = torch.tensor(
            [uniform(self._sampling_by_slot[slot].seed, position) for slot, position in rows],
            dtype=torch.float64,
            device=scores.device,
        )
        if any(sampling.temperature != 1 for sampling in samplings):
            scores.div_(_column((sampling.temperature for sampling in samplings), scores))
        if kind == "plain":
            return draw(scores, uniforms)
        limits = torch.tensor(
            [(sampling.top_k or self._vocabulary, sampling.top_p, sampling.min_p) for sampling in samplings],
            dtype=torch.float64,
            device=scores.device,
        )
        return draw_filtered(scores, limits, uniforms)

    def _report_logprobs(self, raw_logits: Tensor, slot_tokens: Sequence[tuple[int, int]]) -> dict[int, SampledToken]:
        total = raw_logits.logsumexp(dim=-1, keepdim=True)
        top_count = max(self._sampling_by_slot[slot].logprobs or 0 for slot, _ in slot_tokens)
        values, tokens = raw_logits.topk(min(top_count, self._vocabulary), dim=-1)
        values = values - total
        own: list[float] = _tensor_to_list(
            raw_logits[range(len(slot_tokens)), [token for _, token in slot_tokens]] - total.squeeze(-1)
        )
        tops: list[list[tuple[int, float]]] = [
            list(zip(*pair, strict=True)) for pair in zip(_tensor_to_list(tokens), _tensor_to_list(values), strict=True)
        ]
        row_ids = [self._sampling_by_slot[slot].score_ids for slot, _ in slot_tokens]
        scores = self._score_tokens(raw_logits, total, row_ids)
        return {
            slot: SampledToken(token, own[row], tops[row][: self._sampling_by_slot[slot].logprobs or 0], scores[row])
            for row, (slot, token) in enumerate(slot_tokens)
        }

    def _score_tokens(self, raw_logits: Tensor, total: Tensor, row_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log probabilities of the tokens that each row asks for."""
        longest = max(map(len, row_ids))
        if not longest:
            return [[] for _ in row_ids]
        padded = torch.tensor([[*ids, *[-1] * (longest - len(ids))] for ids in row_ids], device=raw_logits.device)
        exists = (padded >= 0) & (padded < self._vocabulary)
        values = raw_logits.gather(1, padded.clamp(0, self._vocabulary - 1)) - total
        scores: list[list[float]] = _tensor_to_list(values.masked_fill_(~exists, -torch.inf))
        return [row[: len(ids)] for row, ids in zip(scores, row_ids, strict=True)]


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token of each row of `scores` [R, V], which are overwritten, with softmax's probabilities, by inverse CDF.

    The sums are of blocks first, so that only a block's worth of each row is cumulated.
    """
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    if weights.shape[-1] % _BLOCK:
        weights = pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    _check_finite(ends[:, -1])
    target = (uniforms * ends[:, -1]).unsqueeze(-1)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[-1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = blocks[torch.arange(len(blocks), device=block.device), block.squeeze(-1)].double().cumsum(dim=-1)
    return block.squeeze(-1) * _BLOCK + _first_above(within, (target - before).clamp_(min=0))


def draw_filtered(scores: Tensor, limits: Tensor, uniforms: Tensor, candidates: int = CANDIDATES) -> Tensor:
    """Draw like `draw` from the tokens that `limits` [R, 3] allow: top-k, then top-p of those, then min-p; at least
    one."""
    count = min(candidates, scores.shape[-1])
    values, tokens = scores.topk(count, dim=-1)
    top_k, top_p, min_p = (limits[:, column].unsqueeze(-1) for column in range(3))
    total = scores.logsumexp(dim=-1, keepdim=True).double()
    _check_finite(total)
    weights = (values.double() - total).exp()
    weights.mul_(torch.arange(count, device=scores.device) < top_k)
    mass = torch.where(top_k < scores.shape[-1], weights.sum(dim=-1, keepdim=True), 1.0)
    allowed = (weights.cumsum(dim=-1) - weights < top_p * mass) | (top_p >= 1)
    allowed &= values - values[:, :1] >= min_p.log()
    allowed[:, 0] = True
    complete = ~allowed[:, -1] | (top_k.squeeze(-1) <= count)
    cumulated = weights.mul_(allowed).cumsum(dim=-1)
    place = _first_above(cumulated, uniforms.unsqueeze(-1) * cumulated[:, -1:])
    chosen = tokens.gather(1, place.unsqueeze(-1)).squeeze(-1)
    if count < scores.shape[-1] and not bool(complete.all()):
        rest = (~complete).nonzero().squeeze(-1)
        chosen[rest] = draw_filtered(scores[rest], limits[rest], uniforms[rest], candidates * CANDIDATE_GROWTH)
    return chosen


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return the first column where [R, n] is above `target` [R, 1]; rounding cannot push it past the last with
    weight."""
    total = cumulated[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1).clamp_(max=cumulated.shape[-1] - 1)


def _sampling_kind(sampling: RowSampling) -> str:
    if sampling.temperature < GREEDY_BELOW:
        return "greedy"
    plain = sampling.top_p >= 1 and sampling.top_k <= 0 and sampling.min_p <= 0
    return "plain" if plain else "filtered"


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device).unsqueeze(-1)


def _tensor_to_list(values: Tensor) -> Any:
    """Return `values.tolist()`, whose own type does not say what the list contains."""
    return cast("Any", values).tolist()


def _check_finite(values: Tensor) -> None:
    if not math.isfinite(float(values.sum())):
        raise FloatingPointError("the model's logits are not finite")


def _forbidden_tokens(mask: bytes, vocabulary: int, device: torch.device) -> Tensor:
    """Return [vocabulary] of bool, true for tokens whose bit is clear or past the mask's end."""
    size = (vocabulary + 7) // 8
    octets = torch.frombuffer(bytearray(mask[:size].ljust(size, b"\0")), dtype=torch.uint8).to(device)
    return _clear_bits(device).index_select(0, octets.int()).view(torch.bool)[:vocabulary]


@cache
def _clear_bits(device: torch.device) -> Tensor:
    """Return for every byte its eight bits, inverted, as eight booleans in one wide element."""
    bits = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)) & 1
    return (bits == 0).view(torch.int64).flatten().to(device)
