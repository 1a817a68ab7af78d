"""StepBuffers: the memory of a step, allocated once, at addresses that never change, so that a graph of a step can be
replayed.

The kernels get nothing but the addresses of this memory. The inputs that differ from step to step (which tokens, of
which slot, at which position) are in tensors on the device, written before the step; a graph contains only a bucket's
shapes.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.triton_backend.kernels.weights import sum_dtype

PAGE_TOKENS: Final = 16
QUERY_TILE: Final = 16
"""Tokens of one sequence that prefill attention takes together: with 8 heads to a key, 128 rows of a product."""

MAX_DECODE_ROWS: Final = 128
"""The largest bucket of decoding. Up to this many rows `project_out` sorts the pairs too, beyond it `route` does."""

MAX_UNGROUPED_ROWS: Final = 3
"""Up to this many rows an expert is computed for each row that chose it; beyond it, once for all of them."""

MAX_CERTIFIED_ROWS: Final = 8
"""Up to this many rows are sampled by way of an int8 copy of the unembedding, where there is one."""

MAX_SPLITS: Final = 32
_CTAS: Final = 264


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Size of the memory: `slots` sequences with `context_tokens` each, in `pages` pages; numbers of type `dtype`."""

    slots: int
    context_tokens: int
    pages: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Tables:
    """Memory that lasts from step to step, one for each runner.

    keys, values [layers, pages, kv_heads, PAGE_TOKENS, head_dim]: positions not written yet may be anything, NaN too;
    pages [slots, P] int32: position p of slot s is in page `pages[s, p // PAGE_TOKENS]`;
    last_tokens [slots] int32: the token that was sampled last;
    temperatures [slots] float32: 0 is greedy; seeds [slots] int64.
    """

    keys: Tensor
    values: Tensor
    pages: Tensor
    last_tokens: Tensor
    temperatures: Tensor
    seeds: Tensor


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """One bucket's memory: T tokens, of which the first `singles` are attended by `attend_decode` (each by itself,
    though several may be of one slot), the others by `attend_prefill`, in M tiles; S rows may be sampled.

    Inputs, written before the step:
    slots, positions, tokens [T] int32: a token's slot, its position (-1: the row is padding), and its number (-1: the
    slot's `last_tokens`). A slot's tokens of one step stand one after the other, and all before them are cached.
    tiles [M, 4] int32: first token's row, how many (0 to QUERY_TILE; 0 is padding), slot, first token's position.
    sample_rows [S] int32: the rows whose next token is to be sampled; -1 is padding.

    Outputs of the step, of the model's type where not said otherwise. Rows of padding hold anything, but their
    `chosen_experts` are -1.
    hidden [T, hidden]: the residual stream; normed_hidden [T, hidden]: it, normed for the experts;
    queries [T, heads, head_dim]: turned, not scaled; attention_output [T, heads * head_dim];
    chosen_experts [T, K] int32: the experts of a token, best first, the lower number of equals; shares [T, K] float32;
    inner [T, K, intermediate]: after SwiGLU;
    order [T * K] int32: pairs t * K + k by expert, then by number, those of padding last;
    starts [experts + 1] int32: where in `order` each expert's begin; the last is how many pairs there are;
    logits [S, vocabulary] float32; sampled_tokens [S] int32: -1 where a logit is not finite, or the row is padding.

    Private to the kernels: `partials` float32 and `arrivals` int32, which is zero between kernels, always.
    """

    tables: Tables
    singles: int
    slots: Tensor
    positions: Tensor
    tokens: Tensor
    tiles: Tensor
    sample_rows: Tensor
    hidden: Tensor
    normed_hidden: Tensor
    queries: Tensor
    attention_output: Tensor
    chosen_experts: Tensor
    shares: Tensor
    inner: Tensor
    order: Tensor
    starts: Tensor
    logits: Tensor
    sampled_tokens: Tensor
    partials: Tensor
    arrivals: Tensor


def make_tables(spec: ModelSpec, sizes: TableSizes) -> Tables:
    """Return new tables; keys and values are not initialised."""
    shape = (len(spec.layers), sizes.pages, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
    columns = -(-sizes.context_tokens // PAGE_TOKENS)
    return Tables(
        keys=torch.empty(shape, dtype=sizes.dtype, device=sizes.device),
        values=torch.empty(shape, dtype=sizes.dtype, device=sizes.device),
        pages=torch.zeros(sizes.slots, columns, dtype=torch.int32, device=sizes.device),
        last_tokens=torch.zeros(sizes.slots, dtype=torch.int32, device=sizes.device),
        temperatures=torch.zeros(sizes.slots, dtype=torch.float32, device=sizes.device),
        seeds=torch.zeros(sizes.slots, dtype=torch.int64, device=sizes.device),
    )


def make_step(spec: ModelSpec, tables: Tables, tokens: int, samples: int, singles: int | None = None) -> StepBuffers:
    """Return memory for `tokens` tokens and `samples` sampled ones; all tokens are singles unless `singles` says less.

    Every input is padding, so that the step as it is computes nothing.
    """
    device, dtype = tables.keys.device, tables.keys.dtype
    chosen = spec.experts_per_token
    singles = tokens if singles is None else singles

    def numbers(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    def padding(*shape: int, value: int = -1) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return StepBuffers(
        tables=tables,
        singles=singles,
        slots=padding(tokens, value=0),
        positions=padding(tokens),
        tokens=padding(tokens),
        tiles=padding(tokens - singles, 4, value=0),
        sample_rows=padding(samples),
        hidden=numbers(tokens, spec.hidden),
        normed_hidden=numbers(tokens, spec.hidden),
        queries=numbers(tokens, spec.heads, spec.head_dim),
        attention_output=numbers(tokens, spec.heads * spec.head_dim),
        chosen_experts=padding(tokens, chosen),
        shares=numbers(tokens, chosen, kind=sum_dtype(dtype)),
        inner=numbers(tokens, chosen, spec.intermediate),
        order=padding(tokens * chosen),
        starts=padding(spec.experts + 1, value=0),
        logits=numbers(samples, spec.vocabulary, kind=sum_dtype(dtype)),
        sampled_tokens=padding(samples),
        partials=numbers(_partial_count(spec, max(tokens, samples)), kind=torch.float32),
        arrivals=padding(_arrival_count(spec, tokens), value=0),
    )


def split_count(spec: ModelSpec, singles: int) -> int:
    """Return the most parts that decode attention cuts a sequence into: as many as fill the largest card, a power
    of 2."""
    needed_parts = -(-_CTAS // (spec.kv_heads * max(1, singles)))
    return min(MAX_SPLITS, 1 << (needed_parts - 1).bit_length())


def expert_parts(rows: int) -> int:
    """Return into how many parts `experts_down` cuts its inputs: the pairs of one row are too few for a large card."""
    return 2 if rows == 1 else 1


def query_tiles(first: int, count: int, slot: int, start: int) -> list[tuple[int, int, int, int]]:
    """Return the tiles of one sequence's `count` tokens, which are the rows `first`, ... and stand at `start`, ..."""
    return [(first + low, min(QUERY_TILE, count - low), slot, start + low) for low in range(0, count, QUERY_TILE)]


def tensor_to_list(values: Tensor) -> list[int]:
    """Return a tensor of integers as a list; torch's own `tolist` does not say what the list contains."""
    return cast("Any", values).tolist()


def _partial_count(spec: ModelSpec, tokens: int) -> int:
    """Return the size of `partials`, enough for split attention (a value, a sum and a maximum for every head), a sum of
    every output, and sampling."""
    # However few of the tokens are singles, their parts are never more than this.
    parts = max(tokens, 4 * _CTAS // spec.kv_heads)
    attention = parts * spec.heads * (spec.head_dim + 2)
    experts = tokens * expert_parts(tokens) * spec.experts_per_token * spec.hidden
    # Rows that are sampled, normed, and of each block of the vocabulary the best score and its token.
    blocks = -(-spec.vocabulary // 128)
    sampling = tokens * (spec.hidden + 2 * blocks)
    # Rows' digits as well, and of each token a bound; eight pieces, which begin at multiples of four.
    certified = min(tokens, MAX_CERTIFIED_ROWS) * (2 * spec.hidden + spec.vocabulary + 3 * blocks + 4) + 32
    return max(attention, experts, sampling, certified)


def _arrival_count(spec: ModelSpec, tokens: int) -> int:
    return max(1, tokens) * max(spec.kv_heads, spec.experts_per_token, -(-spec.hidden // 16))
