"""Kernel 2 of a layer: attention of single tokens over paged keys and values, with sinks and window.

Grid: tokens x kv heads x `splits`. All query heads of a key head are one left operand (8, padded to 16). A split beyond
the token's length leaves at once, and of sliding layers only the 9 pages that the window touches are visited. The sink
is the first running maximum, with a weight of one, in exactly one split; the split that arrives last combines them.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. A row with 8,192 cached
tokens reads 16.8 MB in a full layer: at 32 rows 65 % of 4.3 TB/s; sliding layers no slower than 128 tokens would be.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from typing import Final

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    PAGE_TOKENS,
    StepBuffers,
    split_count,
)
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    dot,
    is_last_arrival,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

_BLOCK: Final = 64
"""Keys of one product."""

_SPLITS_PER_READ: Final = 8
"""Splits that are read together when they are combined."""

LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def combine_splits(  # noqa: PLR0913, PLR0917 - a kernel's part
    output,
    numbers,
    tops,
    weights,
    used_parts,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    parts: tl.constexpr,
    parts_per_read: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Store the sum of the first `used_parts` parts: each with its `numbers` [group, head_dim], their `weights`' sum,
    and in `tops` the power of two that both are to be multiplied by."""
    head = tl.arange(0, padded_group)
    dim = tl.arange(0, head_dim)
    part = tl.arange(0, parts)
    real = head < group
    there = (part < used_parts)[:, None] & real[None, :]
    at = part[:, None] * group + head[None, :]
    scales = tl.load(tops + at, there, other=-float("inf"))
    top = tl.max(tl.where(real[None, :], scales, 0), 0)
    total = tl.sum(tl.load(weights + at, there, other=0) * tl.exp2(scales - top[None, :]), 0)
    total = tl.where(real, total, 1)
    sums = tl.zeros([padded_group, head_dim], tl.float32)
    for low in range(0, used_parts, parts_per_read):
        one = low + tl.arange(0, parts_per_read)
        inside = (one < used_parts)[:, None] & real[None, :]
        place = one[:, None] * group + head[None, :]
        scale = tl.exp2(tl.load(tops + place, inside, other=-float("inf")) - top[None, :])
        sums_of_splits = tl.load(
            numbers + place[:, :, None] * head_dim + dim[None, None, :], inside[:, :, None], other=0
        )
        sums += tl.sum(sums_of_splits * scale[:, :, None], 0)
    result = round_to_type(sums / total[:, None], output.dtype.element_ty, interpreted)
    tl.store(output + head[:, None] * head_dim + dim[None, :], result, real[:, None])


@triton.jit
def attend_decode_kernel(  # noqa: PLR0913, PLR0915, PLR0917 - a kernel
    attention_output,
    queries,
    keys,
    values,
    sinks,
    positions,
    slots,
    pages,
    partials,
    arrivals,
    columns,
    scale,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    combined_group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    parts_per_read: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    position = tl.load(positions + row)
    low = 0
    if window:
        low = tl.maximum(position - window + 1, 0)
    begin = low // page_tokens * page_tokens
    # Blocks of all parts, of each part, and the number of parts that have any.
    blocks = tl.cdiv(position + 1 - begin, block)
    blocks_per_part = tl.maximum(tl.cdiv(blocks, parts), 1)
    used = tl.cdiv(blocks, blocks_per_part)
    if part < used:
        slot = tl.load(slots + row)
        kind = keys.dtype.element_ty
        head = tl.arange(0, padded_group)
        dim = tl.arange(0, head_dim)
        real = head < group
        row_head = row * kv_heads + kv_head
        at = (row_head * group + head)[:, None] * head_dim + dim[None, :]
        query = tl.load(queries + at, real[:, None], other=0)
        top = tl.load(sinks + kv_head * group + head, real, other=0) * LOG2_E
        top = tl.where(part == 0, top, -float("inf"))
        total = tl.zeros([padded_group], tl.float32) + tl.where(part == 0, 1.0, 0.0)
        sums = tl.zeros([padded_group, head_dim], tl.float32)
        first = begin + part * blocks_per_part * block
        for place in range(first, tl.minimum(first + blocks_per_part * block, position + 1), block):
            token = place + tl.arange(0, block)
            visible = token <= position
            if window:
                visible = visible & (token >= low)
            page = tl.load(pages + slot * columns + token // page_tokens, visible, other=0).to(tl.int64)
            offset = ((page * kv_heads + kv_head) * page_tokens + token % page_tokens) * head_dim
            key = tl.load(keys + offset[None, :] + dim[:, None], visible[None, :], other=0)
            scores = dot(query, key, tl.zeros([padded_group, block], tl.float32), interpreted) * (scale * LOG2_E)
            scores = tl.where(visible[None, :], scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            value = tl.load(values + offset[:, None] + dim[None, :], visible[:, None], other=0)
            sums = dot(round_to_type(weights, kind, interpreted), value, sums * shrink[:, None], interpreted)
            top = higher

        if used == 1:
            result = round_to_type(sums / total[:, None], attention_output.dtype.element_ty, interpreted)
            tl.store(attention_output + at, result, real[:, None])
        else:
            # All parts' numbers, then all tops, then all weights.
            count = tl.num_programs(0) * kv_heads * parts * group
            heads = row_head * parts * group
            tops = partials + count * head_dim
            mine = heads + part * group + head
            tl.store(partials + mine[:, None] * head_dim + dim[None, :], sums, real[:, None])
            tl.store(tops + mine, top, real)
            tl.store(tops + count + mine, total, real)
            if is_last_arrival(arrivals + row_head, used):
                to = attention_output + row_head * group * head_dim
                numbers = partials + heads * head_dim
                more = tops + heads
                combine_splits(
                    to,
                    numbers,
                    more,
                    more + count,
                    used,
                    group,
                    combined_group,
                    head_dim,
                    parts,
                    parts_per_read,
                    interpreted,
                )


def attend_decode(layer: Layer, step: StepBuffers) -> None:
    """Set `attention_output` of the first `singles` rows; each attends to the keys of its slot up to its own position.

    Keys and values outside of a row's range can be anything, NaN too.
    """
    spec, tables = layer.spec, step.tables
    # A window is few blocks: to read them one after the other is quicker than to combine splits.
    parts = split_count(spec, step.singles) if layer.window is None or layer.window > 4 * _BLOCK else 1
    group = spec.heads // spec.kv_heads
    attend_decode_kernel[(step.singles, spec.kv_heads, parts)](
        step.attention_output,
        step.queries,
        tables.keys[layer.index],
        tables.values[layer.index],
        layer.sinks,
        step.positions,
        step.slots,
        tables.pages,
        step.partials,
        step.arrivals,
        tables.pages.shape[1],
        spec.head_dim**-0.5,
        kv_heads=spec.kv_heads,
        group=group,
        padded_group=max(16, triton.next_power_of_2(group)),
        combined_group=triton.next_power_of_2(group),
        head_dim=spec.head_dim,
        page_tokens=PAGE_TOKENS,
        window=layer.window or 0,
        block=_BLOCK,
        parts=parts,
        parts_per_read=min(parts, _SPLITS_PER_READ),
        interpreted=INTERPRETED,
        **launch_options(warps=4, stages=5),
    )
