"""Attention over paged keys and values: rotary positions, the page memory, and one routine for any ragged batch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec, Rotary

PAGE_TOKENS: Final = 16


def rotary_table(rotary: Rotary, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head_dim / 2] in float32, each times YaRN's concentration.

    The order of the operations is transformers' own: at position 131,071 another order is another angle. Source: YaRN
    (arXiv:2309.00071), sections 3.2 to 3.4.
    """
    frequencies = rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    concentration = 1.0
    inverse = 1.0 / frequencies
    if rotary.factor > 1:
        low, high = (_correction_dimension(rotary, head_dim, turns) for turns in (rotary.beta_fast, rotary.beta_slow))
        if rotary.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        unscaled_share = 1 - ramp
        inverse = 1.0 / (rotary.factor * frequencies) * (1 - unscaled_share) + inverse * unscaled_share
        concentration = 0.1 * math.log(rotary.factor) + 1
    if rotary.concentration is not None:
        concentration = rotary.concentration
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(-1) * inverse
    return angles.cos() * concentration, angles.sin() * concentration


def _correction_dimension(rotary: Rotary, head_dim: int, rotations: float) -> float:
    """Return the dimension that turns this often within the original context."""
    wavelengths = rotary.original_context_tokens / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelengths) / (2 * math.log(rotary.theta))


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn `heads` [T, heads, D] by [T, 1, D / 2]; a pair is one element of each half."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class PageMemory:
    """Keys and values of all layers: [layers, kv_heads, pages, PAGE_TOKENS, head_dim] each."""

    def __init__(self, spec: ModelSpec, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (len(spec.layers), spec.kv_heads, pages, PAGE_TOKENS, spec.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def clear_pages(self, pages: Tensor) -> None:
        """Zero the values of pages that get a new owner: a weight of zero does not silence a value that is NaN."""
        self.values.index_fill_(2, pages, 0)

    def write(self, layer: int, kv_offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv_heads, D] at `kv_offsets` [T]: page * PAGE_TOKENS + offset."""
        self.keys[layer].flatten(1, 2).index_copy_(1, kv_offsets, keys.transpose(0, 1))
        self.values[layer].flatten(1, 2).index_copy_(1, kv_offsets, values.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`rows` sequences with `queries` tokens each, which are the batch's tokens `first` to `end` (exclusive).

    `pages` [rows, P] hold the keys; the first key of row r stands at `origin[r]`. `positions` [rows, queries].
    """

    first: int
    end: int
    pages: Tensor
    origin: Tensor
    positions: Tensor

    def masked_keys(self, window: int | None) -> Tensor:
        """Return a mask [rows, queries, P * PAGE_TOKENS], true for keys after a query and keys that its window has
        passed."""
        offsets = torch.arange(self.pages.shape[1] * PAGE_TOKENS, device=self.pages.device)
        ages = self.positions.unsqueeze(-1) - (self.origin.unsqueeze(-1) + offsets).unsqueeze(1)
        return ages < 0 if window is None else (ages < 0) | (ages >= window)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One row of a batch: its tokens `first` to `end` (exclusive) begin at position `start`; `pages` [P]."""

    first: int
    end: int
    start: int
    pages: Tensor


class AttentionGrouping:
    """Cuts a batch into groups whose scores, and gathered keys and values, take at most about `scratch_bytes`."""

    def __init__(self, spec: ModelSpec, item_bytes: int, scratch_bytes: int) -> None:
        self._query_bytes = spec.heads * 4
        self._key_bytes = 2 * spec.kv_heads * spec.head_dim * item_bytes
        self._scratch_bytes = scratch_bytes

    def group_single_tokens(self, pages: Tensor, positions: Tensor, window: int | None) -> Iterator[AttentionGroup]:
        """Group rows of one token, the batch's first ones: tables [R, P] and positions [R]."""
        origin = torch.zeros_like(positions)
        if window is not None:
            first_page = (positions - (window - 1)).clamp_(min=0) // PAGE_TOKENS
            column_count = min((window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1, pages.shape[1])
            columns = first_page.unsqueeze(-1) + torch.arange(column_count, device=pages.device)
            pages = pages.gather(1, columns.clamp_(max=pages.shape[1] - 1))
            origin = first_page * PAGE_TOKENS
        rows = self._scratch_bytes // (pages.shape[1] * PAGE_TOKENS * (self._key_bytes + self._query_bytes))
        rows = max(1, rows)
        for low in range(0, len(positions), rows):
            high = min(low + rows, len(positions))
            yield AttentionGroup(low, high, pages[low:high], origin[low:high], positions[low:high].unsqueeze(-1))

    def group_span(self, span: TokenSpan, window: int | None) -> Iterator[AttentionGroup]:
        """Group a row of several tokens, in blocks of queries."""
        end = span.start + span.end - span.first
        visible_keys = end if window is None else min(end, 2 * window)
        block = max(1, self._scratch_bytes // (self._query_bytes * (visible_keys + 2 * PAGE_TOKENS)))
        if window is not None:
            block = min(block, max(window, PAGE_TOKENS))
        for start in range(span.start, end, block):
            stop = min(start + block, end)
            low = 0 if window is None else max(0, start - window + 1) // PAGE_TOKENS
            high = (stop - 1) // PAGE_TOKENS + 1
            positions = torch.arange(start, stop, device=span.pages.device).unsqueeze(0)
            origin = torch.full((1,), low * PAGE_TOKENS, device=span.pages.device)
            first = span.first + start - span.start
            yield AttentionGroup(first, first + stop - start, span.pages[low:high].unsqueeze(0), origin, positions)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The groups of a batch for one kind of layer, and that kind's window."""

    window: int | None
    groups: Sequence[AttentionGroup]


def attend(queries: Tensor, memory: PageMemory, layer: int, sinks: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the attention [T, heads * D] of `queries` [T, heads, D], whose keys and values are in memory already.

    `sinks` [heads], in the type to sum in, is one more score of each head, which has weight and no value.
    """
    results = [_attend_group(queries, memory, layer, sinks, (group, plan.window)) for group in plan.groups]
    return results[0] if len(results) == 1 else torch.cat(results)


def _attend_group(
    queries: Tensor, memory: PageMemory, layer: int, sinks: Tensor, part: tuple[AttentionGroup, int | None]
) -> Tensor:
    group, window = part
    rows, count = group.positions.shape
    heads, width = queries.shape[1:]
    kv_heads = memory.keys.shape[1]
    flat = group.pages.reshape(-1)
    keys = memory.keys[layer].index_select(1, flat).view(kv_heads, rows, -1, width)
    values = memory.values[layer].index_select(1, flat).view(kv_heads, rows, -1, width)
    grouped_queries = queries[group.first : group.end].view(rows, count, kv_heads, heads // kv_heads, width)
    grouped_queries = grouped_queries.permute(2, 0, 1, 3, 4).reshape(kv_heads, rows, -1, width)
    scores = (grouped_queries @ keys.transpose(-1, -2)).to(sinks.dtype).mul_(width**-0.5)
    scores = scores.view(kv_heads, rows, count, heads // kv_heads, -1)
    scores.masked_fill_(group.masked_keys(window).unsqueeze(2), -torch.inf)
    sink_scores = sinks.view(kv_heads, 1, 1, -1, 1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink_scores)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True) + (sink_scores - highest).exp()
    weights = weights.div_(total).to(values.dtype).view(kv_heads, rows, -1, weights.shape[-1])
    output = (weights @ values).view(kv_heads, rows, count, heads // kv_heads, width)
    return output.permute(1, 2, 0, 3, 4).reshape(rows * count, heads * width)
