"""Kernel 2 of a layer, for rows of several tokens: banded flash attention over paged keys and values, with sinks.

Grid: tiles x kv heads. A tile is up to QUERY_TILE tokens of one sequence with all the query heads of a key head: 128
rows of a left operand. Only the pages between the first token's window and the last token are visited, and of full
layers only the last blocks are masked. The sink is the first running maximum, with a weight of one.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. 2,048 tokens after 6,144
others: 45 % of 790 TFLOP/s in a full layer; a sliding layer in the time of its own band.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from typing import Final

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.attend_decode import LOG2_E
from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, QUERY_TILE, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    dot,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer

_BLOCK: Final = 64
"""Keys of one product: more than QUERY_TILE and a page together, so that every row sees one of the first block's."""


@triton.jit
def attend_block(  # noqa: PLR0913, PLR0917 - a kernel's part
    query,
    sums,
    top,
    total,
    keys,
    values,
    pages,
    token,
    position,
    last,
    factor,
    page_stride: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Return the sums, their maxima and weights, updated with the keys at `token`, for rows that stand at `position`;
    `last` is the last of those."""
    head_dim: tl.constexpr = query.shape[1]
    dim = tl.arange(0, head_dim)
    exists = token <= last
    if masked:
        page = tl.load(pages + token // page_tokens, exists, other=0).to(tl.int64)
    else:
        page = tl.load(pages + token // page_tokens).to(tl.int64)
    offset = page * page_stride + token % page_tokens * head_dim
    if masked:
        key = tl.load(keys + offset[None, :] + dim[:, None], exists[None, :], other=0)
    else:
        key = tl.load(keys + offset[None, :] + dim[:, None])
    scores = dot(query, key, tl.zeros([query.shape[0], token.shape[0]], tl.float32), interpreted)
    if masked:
        age = position[:, None] - token[None, :]
        visible = age >= 0
        if window:
            visible = visible & (age < window)
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    if masked:
        value = tl.load(values + offset[:, None] + dim[None, :], exists[:, None], other=0)
    else:
        value = tl.load(values + offset[:, None] + dim[None, :])
    sums = dot(round_to_type(weights, value.dtype, interpreted), value, sums * shrink[:, None], interpreted)
    return sums, higher, total


@triton.jit
def attend_prefill_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    attention_output,
    queries,
    keys,
    values,
    sinks,
    tiles,
    pages,
    columns,
    scale,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    query_tile: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    # The last tiles see most keys: they go first, and the short ones fill the remaining time.
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    count = tl.load(tile + 1)
    if count > 0:
        kv_head = tl.program_id(1)
        start = tl.load(tile + 3)
        last = start + count - 1
        index = tl.arange(0, query_tile * padded_group)
        token = index // padded_group
        head = index % padded_group
        real = (token < count) & (head < group)
        position = tl.minimum(start + token, last)
        row = tl.load(tile) + token
        dim = tl.arange(0, head_dim)
        at = ((row * kv_heads + kv_head) * group + head)[:, None] * head_dim + dim[None, :]
        query = tl.load(queries + at, real[:, None], other=0)
        top = tl.load(sinks + kv_head * group + head, head < group, other=0) * LOG2_E
        total = tl.full([query_tile * padded_group], 1, tl.float32)
        sums = tl.zeros([query_tile * padded_group, head_dim], tl.float32)
        factor = scale * LOG2_E
        stride: tl.constexpr = kv_heads * page_tokens * head_dim
        keys += kv_head * page_tokens * head_dim
        values += kv_head * page_tokens * head_dim
        pages += tl.load(tile + 2) * columns
        ahead = tl.arange(0, block)
        if window:
            edge = tl.maximum(start - window + 1, 0) // page_tokens * page_tokens
        else:
            # Before it every row sees every key.
            edge = (start + 1) // block * block
            for place in range(0, edge, block):
                sums, top, total = attend_block(
                    query, sums, top, total, keys, values, pages, place + ahead, position, last, factor,
                    stride, page_tokens, window, False, interpreted,
                )  # fmt: skip
        for place in range(edge, last + 1, block):
            sums, top, total = attend_block(
                query, sums, top, total, keys, values, pages, place + ahead, position, last, factor,
                stride, page_tokens, window, True, interpreted,
            )  # fmt: skip
        result = round_to_type(sums / total[:, None], attention_output.dtype.element_ty, interpreted)
        tl.store(attention_output + at, result, real[:, None])


def attend_prefill(layer: Layer, step: StepBuffers) -> None:
    """Set `attention_output` of the rows that `tiles` name. Keys and values that none of them sees can be anything."""
    spec, tables = layer.spec, step.tables
    group = spec.heads // spec.kv_heads
    attend_prefill_kernel[(len(step.tiles), spec.kv_heads)](
        step.attention_output,
        step.queries,
        tables.keys[layer.index],
        tables.values[layer.index],
        layer.sinks,
        step.tiles,
        tables.pages,
        tables.pages.shape[1],
        spec.head_dim**-0.5,
        kv_heads=spec.kv_heads,
        group=group,
        padded_group=triton.next_power_of_2(group),
        head_dim=spec.head_dim,
        query_tile=QUERY_TILE,
        page_tokens=PAGE_TOKENS,
        window=layer.window or 0,
        block=_BLOCK,
        interpreted=INTERPRETED,
        **launch_options(warps=8, stages=5),
    )
