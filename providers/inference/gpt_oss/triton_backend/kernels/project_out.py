"""Kernel 3 of a layer: the projection of the attention's output, the residual sum, the experts' norm and the router.

Two launches when decoding. The router's CTAs hold the weights of some experts before the projection ends, and then need
a row's numbers alone. The last of them to arrive chooses for all rows and sorts the pairs. The projection's own last
CTA could do so too, but all would wait while it reads the router's weights (184 KB of 20b's, 737 KB of 120b's). For
more rows the norm is a launch, and the router is a product like others.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16, `chosen_experts` equal
where no two scores are within the tolerance. At one row it reads 23.6 MB: 5.5 us at 4.3 TB/s, to be done within 60 % of
that speed; at 2,048 rows 45 % of 790 TFLOP/s.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Final

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import MAX_DECODE_ROWS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    is_last_arrival,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.norm import norm_rows
from providers.inference.gpt_oss.triton_backend.kernels.product import choose_tiling, dense_product, prefetch_weights
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

_EXPERTS_PER_CTA: Final = 4
"""Experts of a CTA: their weights are in its registers."""

_CTAS: Final = 128
"""CTAs of the router; a multiprocessor runs one of them, as they take many registers."""

_TOKENS_PER_CTA: Final = 16
"""Tokens of a CTA of the router, where there are so many that its weights are read for several at once."""

_MAX_SINGLE_CTA_ROWS: Final = 16
"""Up to this many rows one CTA chooses for all and sorts; beyond it, each CTA that is its rows' last chooses for
those."""


@triton.jit(do_not_specialize=["rows"])
def project_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    hidden,
    attention_output,
    weight,
    bias,
    rows,
    height: tl.constexpr,
    width: tl.constexpr,
    outputs: tl.constexpr,
    tokens: tl.constexpr,
    depth: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    if tokens <= 64 and height % outputs == 0:
        prefetch_weights(weight, tl.program_id(0), outputs * width, dependent)
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    token = tl.program_id(1) * tokens + tl.arange(0, tokens)
    row = tl.minimum(token, rows - 1)
    place = tl.minimum(output, height - 1)
    product = dense_product(weight, place, attention_output, row, token < rows, width, depth, interpreted)
    inside = (output < height)[:, None] & (token < rows)[None, :]
    at = hidden + row[None, :] * height + output[:, None]
    product += tl.load(bias + output, output < height, other=0).to(tl.float32)[:, None]
    product += tl.load(at, inside, other=0).to(tl.float32)
    tl.store(at, round_to_type(product, hidden.dtype.element_ty, interpreted), inside)


@triton.jit
def choose_experts(  # noqa: PLR0913, PLR0917 - a kernel's part
    scores,
    positions,
    chosen_experts,
    shares,
    row,
    rows,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    experts_per_token: tl.constexpr,
    places: tl.constexpr,
):
    """Set `chosen_experts` and `shares` of the rows `row`. Returns the experts [rows, places]; `experts` stands for
    none."""
    expert = tl.arange(0, padded_experts)[None, :]
    place = tl.arange(0, places)[None, :]
    at = row[:, None]
    remaining = tl.load(scores + at * padded_experts + expert, (at < rows) & (expert < experts), other=0)
    # A score that is NaN equals nothing, and an expert must be chosen all the same.
    remaining = tl.where(remaining == remaining, remaining, -3e38)  # noqa: PLR0124 - false for NaN alone
    remaining = tl.where(expert < experts, remaining, -float("inf"))
    tops = tl.full([row.shape[0], places], -float("inf"), tl.float32)
    picks = tl.full([row.shape[0], places], experts, tl.int32)
    for k in tl.static_range(experts_per_token):
        top = tl.max(remaining, 1)[:, None]
        pick = tl.min(tl.where(remaining == top, expert, padded_experts), 1)[:, None]
        tops = tl.where(place == k, top, tops)
        picks = tl.where(place == k, pick, picks)
        remaining = tl.where(expert == pick, -float("inf"), remaining)
    weights = tl.exp(tops - tl.max(tops, 1)[:, None])
    inside = (at < rows) & (place < experts_per_token)
    tl.store(shares + at * experts_per_token + place, weights / tl.sum(weights, 1)[:, None], inside)
    live = tl.load(positions + row, row < rows, other=-1)[:, None] >= 0
    tl.store(chosen_experts + at * experts_per_token + place, tl.where(live, picks, -1), inside)
    return tl.where(live, picks, experts)


@triton.jit
def sort_pairs(  # noqa: PLR0913, PLR0917 - a kernel's part
    picks,
    order,
    starts,
    row,
    rows,
    experts: tl.constexpr,
    count: tl.constexpr,
    places: tl.constexpr,
    bins: tl.constexpr,
):
    """Set `order` and `starts` from the `picks` [rows, places] of all rows."""
    size: tl.constexpr = row.shape[0] * places
    place = tl.arange(0, places)[None, :]
    # The pairs of padding (of no expert) come after all others, then the places without a pair.
    is_pair = (place < count) & (row < rows)[:, None]
    expert = tl.where(is_pair, picks, experts + 1)
    pairs = tl.sort(tl.reshape(expert * size + row[:, None] * count + place, [size]))
    index = tl.arange(0, size)
    tl.store(order + index, pairs % size, index < rows * count)
    every = tl.arange(0, bins)
    tl.store(starts, 0)
    tl.store(starts + 1 + every, tl.cumsum(tl.histogram(pairs // size, bins), 0), every < experts)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    hidden,
    normed_hidden,
    norm,
    weight,
    bias,
    positions,
    scores,
    arrivals,
    chosen_experts,
    shares,
    order,
    starts,
    rows,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    count: tl.constexpr,
    places: tl.constexpr,
    experts_per_cta: tl.constexpr,
    rows_per_cta: tl.constexpr,
    rows_per_choice: tl.constexpr,
    padded_rows: tl.constexpr,
    bins: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    columns = tl.arange(0, block)
    inside = columns < width
    expert = tl.program_id(0) * experts_per_cta + tl.arange(0, experts_per_cta)
    exists = expert < experts
    weights = tl.load(weight + expert[:, None] * width + columns[None, :], exists[:, None] & inside[None, :], other=0)
    factors = tl.load(norm + columns, inside, other=0)
    biases = tl.load(bias + expert, exists, other=0).to(tl.float32)
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    begin = tl.program_id(1) * rows_per_cta
    for row in range(begin, tl.minimum(begin + rows_per_cta, rows)):
        numbers = tl.load(hidden + row * width + columns, inside, other=0)
        wide = numbers.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        result = round_to_type(wide * scale * factors, numbers.dtype, interpreted)
        if tl.program_id(0) == 0:
            tl.store(normed_hidden + row * width + columns, result, inside)
        score = tl.sum(weights.to(tl.float32) * result.to(tl.float32)[None, :], 1) + biases
        tl.store(scores + row * padded_experts + expert, score, exists)

    first = begin // rows_per_choice * rows_per_choice
    arriving = tl.num_programs(0) * tl.cdiv(tl.minimum(rows - first, rows_per_choice), rows_per_cta)
    if is_last_arrival(arrivals + begin // rows_per_choice, arriving):
        choice_rows = first + tl.arange(0, rows_per_choice)
        picks = choose_experts(
            scores, positions, chosen_experts, shares, choice_rows, rows, experts, padded_experts, count, places
        )
        if rows_per_choice >= padded_rows:
            sort_pairs(picks, order, starts, choice_rows, rows, experts, count, places, bins)
        else:
            groups = tl.cdiv(rows, rows_per_choice)
            if is_last_arrival(arrivals + groups, groups):
                all_rows = tl.arange(0, padded_rows)
                place = tl.arange(0, places)[None, :]
                is_pair = (all_rows < rows)[:, None] & (place < count)
                picked = tl.load(chosen_experts + all_rows[:, None] * count + place, is_pair, other=-1)
                picked = tl.where(picked < 0, experts, picked)
                sort_pairs(picked, order, starts, all_rows, rows, experts, count, places, bins)


@triton.jit(do_not_specialize=["rows"])
def route_many_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    normed_hidden,
    weight,
    bias,
    positions,
    scores,
    chosen_experts,
    shares,
    rows,
    width: tl.constexpr,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    count: tl.constexpr,
    places: tl.constexpr,
    outputs: tl.constexpr,
    tokens: tl.constexpr,
    depth: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    expert = tl.arange(0, outputs)
    exists = expert < experts
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    row = tl.minimum(token, rows - 1)
    place = tl.minimum(expert, experts - 1)
    router_scores = dense_product(weight, place, normed_hidden, row, token < rows, width, depth, interpreted)
    router_scores += tl.load(bias + expert, exists, other=0).to(tl.float32)[:, None]
    tl.store(
        scores + row[None, :] * padded_experts + expert[:, None],
        router_scores,
        exists[:, None] & (token < rows)[None, :],
    )
    tl.debug_barrier()
    choose_experts(scores, positions, chosen_experts, shares, token, rows, experts, padded_experts, count, places)


def project_out(layer: Layer, step: StepBuffers) -> None:
    """Add to `hidden`; set `normed_hidden`, `chosen_experts` (-1 for rows of padding) and `shares`, the softmax of the
    chosen ones.

    Up to MAX_DECODE_ROWS rows it sets `order` and `starts` as well. `hidden` is rounded before it is normed, and
    `normed_hidden` before the router reads it.
    """
    rows, width = step.attention_output.shape
    height = layer.spec.hidden
    tiles = choose_tiling(rows, 32)
    project_kernel[tiles.grid(height, rows)](
        step.hidden,
        step.attention_output,
        layer.out_weight,
        layer.out_bias,
        rows,
        height=height,
        width=width,
        outputs=tiles.outputs,
        tokens=tiles.tokens,
        depth=min(tiles.depth, triton.next_power_of_2(width)),
        interpreted=INTERPRETED,
        **launch_options(tiles.warps, tiles.stages),
    )
    if rows <= MAX_DECODE_ROWS:
        _route(layer, step)
    else:
        _route_many(layer, step)


def _route(layer: Layer, step: StepBuffers) -> None:
    spec, rows = layer.spec, len(step.positions)
    expert_groups = triton.cdiv(spec.experts, _EXPERTS_PER_CTA)
    rows_per_cta = triton.next_power_of_2(triton.cdiv(rows * expert_groups, _CTAS))
    padded_rows = triton.next_power_of_2(rows)
    route_kernel[(expert_groups, triton.cdiv(rows, rows_per_cta))](
        step.hidden,
        step.normed_hidden,
        layer.mlp_norm,
        layer.router_weight,
        layer.router_bias,
        step.positions,
        step.partials,
        step.arrivals,
        step.chosen_experts,
        step.shares,
        step.order,
        step.starts,
        rows,
        spec.norm_eps,
        width=spec.hidden,
        block=triton.next_power_of_2(spec.hidden),
        experts=spec.experts,
        padded_experts=triton.next_power_of_2(spec.experts),
        count=spec.experts_per_token,
        places=triton.next_power_of_2(spec.experts_per_token),
        experts_per_cta=_EXPERTS_PER_CTA,
        rows_per_cta=rows_per_cta,
        rows_per_choice=max(rows_per_cta, padded_rows) if rows <= _MAX_SINGLE_CTA_ROWS else rows_per_cta,
        padded_rows=padded_rows,
        bins=triton.next_power_of_2(spec.experts + 2),
        interpreted=INTERPRETED,
        **launch_options(warps=8),
    )


def _route_many(layer: Layer, step: StepBuffers) -> None:
    """Launch the router for many rows: a product like others, after a norm of its own."""
    spec, rows = layer.spec, len(step.positions)
    norm_rows(step.normed_hidden, step.hidden, layer.mlp_norm, spec.norm_eps)
    padded = triton.next_power_of_2(spec.experts)
    route_many_kernel[(triton.cdiv(rows, _TOKENS_PER_CTA),)](
        step.normed_hidden,
        layer.router_weight,
        layer.router_bias,
        step.positions,
        step.partials,
        step.chosen_experts,
        step.shares,
        rows,
        width=spec.hidden,
        experts=spec.experts,
        padded_experts=padded,
        count=spec.experts_per_token,
        places=triton.next_power_of_2(spec.experts_per_token),
        outputs=max(16, padded),
        tokens=_TOKENS_PER_CTA,
        # With 128 experts 64 inputs at a time: more would not fit into every card's shared memory.
        depth=min(128 if padded < 128 else 64, triton.next_power_of_2(spec.hidden)),
        interpreted=INTERPRETED,
        **launch_options(warps=4, stages=4),
    )
