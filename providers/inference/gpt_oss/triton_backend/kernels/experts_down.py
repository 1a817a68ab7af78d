"""Kernel 5 of a layer: the chosen experts' second matrix, their weighted sum and the residual sum.

For rows as few as in `experts_up`, and as there; the sum over a row's experts is the last arriving CTA's, in the order
of `chosen`: the result does not depend on who came first. The bias is added before the share is multiplied. At one row
the inputs are cut in two, for there would be too few CTAs. `grouped_down` launches the same kernel for tiles of pairs.

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
from torch import Tensor
from torch.nn.functional import linear

from providers.inference.gpt_oss.triton_backend.kernels.buffers import Step, expert_parts
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    let_next_begin,
    options,
    rounded,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.layout import matrix
from providers.inference.gpt_oss.triton_backend.kernels.unpacking import ALONE, Cut, pairs_of, product
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
    chosen,
    shares,
    order,
    starts,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    experts: tl.constexpr,
    each: tl.constexpr,
    parts: tl.constexpr,
    alone: tl.constexpr,
    finish: tl.constexpr,
    wide: tl.constexpr,
    high: tl.constexpr,
    together: tl.constexpr,
    dependent: tl.constexpr,
    interpreted: tl.constexpr,
):
    wait_for_inputs(dependent)
    let_next_begin(dependent)
    expert, pairs, wanted = pairs_of(chosen, order, starts, tl.program_id(1), experts, wide, alone)
    if expert >= 0:
        tall: tl.constexpr = (hidden + 63) // 64
        group, part = tl.program_id(0), tl.program_id(2)
        tiles = expert * tall + tl.minimum(group * high + tl.arange(0, high), tall - 1)
        inputs = inner + pairs.to(tl.int64) * intermediate
        total = product(
            values, scales, tiles, inputs, wanted, part, parts, intermediate, wide, high, together, interpreted
        )
        outputs = group * (64 * high) + tl.arange(0, 64 * high)
        kept = (outputs < hidden)[:, None] & wanted[None, :]
        tl.store(partials + ((pairs * parts + part) * hidden)[None, :] + outputs[:, None], total, kept)
        if finish:
            add_finished(
                stream,
                partials,
                arrivals,
                bias,
                chosen,
                shares,
                pairs // each,
                wanted,
                hidden,
                each,
                parts,
                64 * high,
                interpreted,
            )


@triton.jit
def add_finished(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    arrivals,
    bias,
    chosen,
    shares,
    rows,
    wanted,
    hidden: tl.constexpr,
    each: tl.constexpr,
    parts: tl.constexpr,
    tall: tl.constexpr,
    interpreted: tl.constexpr,
):
    """`add_sums` for those `wanted` ones of `rows` [n] of which this CTA brought the last sums of its outputs."""
    group = tl.program_id(0)
    # All threads' sums are there before one thread says so.
    tl.debug_barrier()
    counters = arrivals + rows * tl.num_programs(0) + group
    last = wanted & (tl.atomic_add(counters, 1, wanted, sem="acq_rel") == each * parts - 1)
    if tl.max(last.to(tl.int32), 0) > 0:
        tl.store(counters, 0, last)
        outputs = group * tall + tl.arange(0, tall)
        add_sums(stream, partials, bias, chosen, shares, rows, last, outputs, hidden, each, parts, interpreted)


@triton.jit
def add_sums(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    bias,
    chosen,
    shares,
    rows,
    wanted,
    outputs,
    hidden: tl.constexpr,
    each: tl.constexpr,
    parts: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Add the sum of their experts to `outputs` [m] of the residual stream of the `wanted` ones of `rows` [n]."""
    kept = (outputs < hidden)[:, None] & wanted[None, :]
    at = stream + (rows * hidden)[None, :] + outputs[:, None]
    found = tl.zeros(kept.shape, tl.float32)
    for place in tl.static_range(each):
        pairs = rows * each + place
        experts = tl.load(chosen + pairs, wanted, other=0)
        output = tl.load(bias + (experts * hidden)[None, :] + outputs[:, None], kept, other=0).to(tl.float32)
        for part in tl.static_range(parts):
            start = (pairs * parts + part) * hidden
            output += tl.load(partials + start[None, :] + outputs[:, None], kept, other=0)
        found += output * tl.load(shares + pairs, wanted, other=0)[None, :]
    found += tl.load(at, kept, other=0).to(tl.float32)
    tl.store(at, rounded(found, stream.dtype.element_ty, interpreted), kept)


@triton.jit
def add_sums_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    stream,
    partials,
    bias,
    chosen,
    shares,
    hidden: tl.constexpr,
    each: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
    interpreted: tl.constexpr,
):
    wait_for_inputs(dependent)
    let_next_begin(dependent)
    rows = tl.program_id(0) + tl.arange(0, 1)
    outputs = tl.program_id(1) * block + tl.arange(0, block)
    wanted = tl.load(chosen + rows * each) >= 0
    add_sums(stream, partials, bias, chosen, shares, rows, wanted, outputs, hidden, each, 1, interpreted)


def experts_down(layer: Layer, step: Step) -> None:
    """Add to `hidden` the sum of a row's experts, each times its share; rounded once. Padding is left alone."""
    launch_down(layer, step, ALONE)


def launch_down(layer: Layer, step: Step, cut: Cut) -> None:
    """The kernel above, cut so; the sums over experts in a kernel of their own if it does not finish them."""
    spec, weights, rows = layer.spec, layer.down, len(step.positions)
    parts = expert_parts(rows) if cut.alone else 1
    experts_down_kernel[(cut.groups(weights.rows), cut.tiles(step, spec), parts)](
        step.hidden,
        step.inner,
        step.partials,
        step.arrivals,
        weights.values,
        weights.scales.view(torch.int16),
        weights.bias,
        step.chosen,
        step.shares,
        step.order,
        step.starts,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.experts,
        each=spec.experts_per_token,
        parts=parts,
        finish=cut.finish,
        **cut.constants(),
    )
    if not cut.finish:
        add_sums_kernel[(rows, -(-spec.hidden // _BLOCK))](
            step.hidden,
            step.partials,
            weights.bias,
            step.chosen,
            step.shares,
            hidden=spec.hidden,
            each=spec.experts_per_token,
            block=_BLOCK,
            interpreted=INTERPRETED,
            **options(warps=4),
        )


def experts_down_reference(layer: Layer, step: Step) -> None:
    inner = step.inner.flatten(0, 1)
    outputs = torch.zeros(len(inner), layer.spec.hidden, dtype=layer.sinks.dtype, device=inner.device)
    for expert in range(layer.spec.experts):
        pairs = (step.chosen.flatten() == expert).nonzero().squeeze(-1)
        if len(pairs):
            outputs[pairs] = output_of(layer, expert, inner[pairs])
    add_weighted(step, outputs.view(*step.chosen.shape, -1))


def output_of(layer: Layer, expert: int, inner: Tensor) -> Tensor:
    """One expert's [n, hidden] of [n, intermediate], not rounded."""
    wide = layer.sinks.dtype
    return linear(inner.to(wide), matrix(layer.down, expert, wide), layer.down.bias[expert].to(wide))


def add_weighted(step: Step, outputs: Tensor) -> None:
    """Add [T, K, hidden] to the residual stream of the rows that are not padding."""
    live = step.positions >= 0
    found = (outputs[live] * step.shares[live].unsqueeze(-1)).sum(dim=1)
    step.hidden[live] = (step.hidden[live].to(found.dtype) + found).to(step.hidden.dtype)
