"""Kernel 5 of a layer: the chosen experts' second matrix, their weighted sum and the residual sum.

For as few rows as `experts_up`, in the same way; the last arriving CTA sums a row's experts, in the order of
`chosen_experts`: the result does not depend on the order of arrival. The bias is added before the share is multiplied.
At one row the inputs are cut in two, for there would be too few CTAs. `grouped_down` launches the same kernel for tiles
of pairs.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16; the same bits every time.
Instructions as kernel 4's. At one row it reads 17.7 MB: 4.1 us at 4.3 TB/s, to be done within 60 % of that speed.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from typing import Final

import torch
import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers, expert_parts
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import (
    SINGLE_PAIR_TILING,
    ExpertTiling,
    expert_product,
    load_tile_pairs,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

_BLOCK: Final = 1024


@triton.jit
def experts_down_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    inner,
    partials,
    arrivals,
    values,
    scales,
    bias,
    chosen_experts,
    shares,
    order,
    starts,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    experts: tl.constexpr,
    experts_per_token: tl.constexpr,
    parts: tl.constexpr,
    single_pair: tl.constexpr,
    sums_experts: tl.constexpr,
    pair_columns: tl.constexpr,
    output_tiles: tl.constexpr,
    input_tiles: tl.constexpr,
    dependent: tl.constexpr,
    interpreted: tl.constexpr,
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    expert, pairs, is_own = load_tile_pairs(
        chosen_experts, order, starts, tl.program_id(1), experts, pair_columns, single_pair
    )
    if expert >= 0:
        tile_rows: tl.constexpr = (hidden + 63) // 64
        group, part = tl.program_id(0), tl.program_id(2)
        tiles = expert * tile_rows + tl.minimum(group * output_tiles + tl.arange(0, output_tiles), tile_rows - 1)
        inputs = inner + pairs.to(tl.int64) * intermediate
        total = expert_product(
            values,
            scales,
            tiles,
            inputs,
            is_own,
            part,
            parts,
            intermediate,
            pair_columns,
            output_tiles,
            input_tiles,
            interpreted,
        )
        outputs = group * (64 * output_tiles) + tl.arange(0, 64 * output_tiles)
        inside = (outputs < hidden)[:, None] & is_own[None, :]
        tl.store(partials + ((pairs * parts + part) * hidden)[None, :] + outputs[:, None], total, inside)
        if sums_experts:
            add_complete_sums(
                stream,
                partials,
                arrivals,
                bias,
                chosen_experts,
                shares,
                pairs // experts_per_token,
                is_own,
                hidden,
                experts_per_token,
                parts,
                64 * output_tiles,
                interpreted,
            )


@triton.jit
def add_complete_sums(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    arrivals,
    bias,
    chosen_experts,
    shares,
    rows,
    mask,
    hidden: tl.constexpr,
    experts_per_token: tl.constexpr,
    parts: tl.constexpr,
    output_count: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Call `add_sums` for the rows of `rows` [n] in `mask` of which this CTA brought the last sums of its outputs."""
    group = tl.program_id(0)
    # All threads' sums are stored before one thread counts the arrival.
    tl.debug_barrier()
    counters = arrivals + rows * tl.num_programs(0) + group
    last = mask & (tl.atomic_add(counters, 1, mask, sem="acq_rel") == experts_per_token * parts - 1)
    if tl.max(last.to(tl.int32), 0) > 0:
        tl.store(counters, 0, last)
        outputs = group * output_count + tl.arange(0, output_count)
        add_sums(
            stream,
            partials,
            bias,
            chosen_experts,
            shares,
            rows,
            last,
            outputs,
            hidden,
            experts_per_token,
            parts,
            interpreted,
        )


@triton.jit
def add_sums(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    bias,
    chosen_experts,
    shares,
    rows,
    mask,
    outputs,
    hidden: tl.constexpr,
    experts_per_token: tl.constexpr,
    parts: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Add the sum of their experts to `outputs` [m] of the residual stream, for the rows of `rows` [n] in `mask`."""
    inside = (outputs < hidden)[:, None] & mask[None, :]
    at = stream + (rows * hidden)[None, :] + outputs[:, None]
    sums = tl.zeros(inside.shape, tl.float32)
    for place in tl.static_range(experts_per_token):
        pairs = rows * experts_per_token + place
        experts = tl.load(chosen_experts + pairs, mask, other=0)
        output = tl.load(bias + (experts * hidden)[None, :] + outputs[:, None], inside, other=0).to(tl.float32)
        for part in tl.static_range(parts):
            start = (pairs * parts + part) * hidden
            output += tl.load(partials + start[None, :] + outputs[:, None], inside, other=0)
        sums += output * tl.load(shares + pairs, mask, other=0)[None, :]
    sums += tl.load(at, inside, other=0).to(tl.float32)
    tl.store(at, round_to_type(sums, stream.dtype.element_ty, interpreted), inside)


@triton.jit
def add_sums_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    bias,
    chosen_experts,
    shares,
    hidden: tl.constexpr,
    experts_per_token: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
    interpreted: tl.constexpr,
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    rows = tl.program_id(0) + tl.arange(0, 1)
    outputs = tl.program_id(1) * block + tl.arange(0, block)
    is_live = tl.load(chosen_experts + rows * experts_per_token) >= 0
    add_sums(
        stream,
        partials,
        bias,
        chosen_experts,
        shares,
        rows,
        is_live,
        outputs,
        hidden,
        experts_per_token,
        1,
        interpreted,
    )


def experts_down(layer: Layer, step: StepBuffers) -> None:
    """Add to `hidden` the sum of a row's experts, each times its share; rounded once. Rows of padding are not
    written."""
    launch_down(layer, step, SINGLE_PAIR_TILING)


def launch_down(layer: Layer, step: StepBuffers, tiling: ExpertTiling) -> None:
    """Launch the kernel with this tiling; a second kernel sums over experts if the tiling says so."""
    spec, weights, rows = layer.spec, layer.down, len(step.positions)
    parts = expert_parts(rows) if tiling.single_pair else 1
    experts_down_kernel[(tiling.output_group_count(weights.rows), tiling.pair_tile_count(step, spec), parts)](
        step.hidden,
        step.inner,
        step.partials,
        step.arrivals,
        weights.values,
        weights.scales.view(torch.int16),
        weights.bias,
        step.chosen_experts,
        step.shares,
        step.order,
        step.starts,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.experts,
        experts_per_token=spec.experts_per_token,
        parts=parts,
        sums_experts=tiling.sums_experts,
        **tiling.kernel_constants(),
    )
    if not tiling.sums_experts:
        add_sums_kernel[(rows, -(-spec.hidden // _BLOCK))](
            step.hidden,
            step.partials,
            weights.bias,
            step.chosen_experts,
            step.shares,
            hidden=spec.hidden,
            experts_per_token=spec.experts_per_token,
            block=_BLOCK,
            interpreted=INTERPRETED,
            **launch_options(warps=4),
        )
