"""Kernel 4 of a layer: the chosen experts' first matrix, with SwiGLU, for up to MAX_UNGROUPED_ROWS rows.

One CTA for a tile of outputs and a pair; an expert that two rows chose is read twice, the second time from L2. Weights
go from packed words to operands in registers. In a tile's order a gate and its linear part lie in one thread: SwiGLU
is the epilogue. `grouped_up` launches the same kernel for tiles of pairs.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. At most 4.0 instructions
a weight in its inner loop on sm_90, 2.1 of them of integers. At one row it reads 35.3 MB: 8.2 us at 4.3 TB/s, to be
done within 60 % of that speed.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
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


@triton.jit
def experts_up_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    inner,
    normed_hidden,
    values,
    scales,
    bias,
    chosen_experts,
    order,
    starts,
    limit,
    alpha,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    experts: tl.constexpr,
    experts_per_token: tl.constexpr,
    single_pair: tl.constexpr,
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
        rows: tl.constexpr = (2 * intermediate + 63) // 64
        # Past the last tile it is computed again, and not stored.
        tiles = expert * rows + tl.minimum(tl.program_id(0) * output_tiles + tl.arange(0, output_tiles), rows - 1)
        inputs = normed_hidden + (pairs // experts_per_token).to(tl.int64) * hidden
        total = expert_product(
            values, scales, tiles, inputs, is_own, 0, 1, hidden, pair_columns, output_tiles, input_tiles, interpreted
        )
        gate, line = tl.split(total.reshape(32 * output_tiles, 2, pair_columns).permute(0, 2, 1))
        outputs = tl.program_id(0) * (32 * output_tiles) + tl.arange(0, 32 * output_tiles)
        inside = outputs < intermediate
        biases = bias + expert * (2 * intermediate) + 2 * outputs
        gate += tl.load(biases, inside, other=0).to(tl.float32)[:, None]
        line += tl.load(biases + 1, inside, other=0).to(tl.float32)[:, None]
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        line = tl.clamp(line, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        activations = gate * tl.sigmoid(gate * alpha) * (line + 1)
        at = inner + (pairs * intermediate)[None, :] + outputs[:, None]
        tl.store(at, round_to_type(activations, inner.dtype.element_ty, interpreted), inside[:, None] & is_own[None, :])


def experts_up(layer: Layer, step: StepBuffers) -> None:
    """Set `inner` [T, K, intermediate] of every pair of a row and an expert it chose; pairs of expert -1 are not
    written."""
    launch_up(layer, step, SINGLE_PAIR_TILING)


def launch_up(layer: Layer, step: StepBuffers, tiling: ExpertTiling) -> None:
    """Launch the kernel with this tiling."""
    spec, weights = layer.spec, layer.gate_up
    experts_up_kernel[(tiling.output_group_count(weights.rows), tiling.pair_tile_count(step, spec))](
        step.inner,
        step.normed_hidden,
        weights.values,
        weights.scales.view(torch.int16),
        weights.bias,
        step.chosen_experts,
        step.order,
        step.starts,
        spec.swiglu_limit,
        spec.swiglu_alpha,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        experts=spec.experts,
        experts_per_token=spec.experts_per_token,
        **tiling.kernel_constants(),
    )
