"""Kernel 1 of a layer: norm, projection to queries, keys and values, rotary positions, and the write to the cache.

The norm is a launch of its own: inside the product's loop it took twice the product's time, even of one row. The
product's weights are on their way meanwhile. The rotation and the write are the epilogue: keys and values leave
registers once, for their page.

Must meet, against the reference in float32: 2e-6 in float32 (interpreted), 4e-3 in bfloat16. At one row it reads 29.5
MB: 6.9 us at 4.3 TB/s, to be done within 60 % of that speed; at 2,048 rows 60 GFLOP, at 45 % of 790 TFLOP/s.
"""

# Triton has no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from dataclasses import replace

import triton
import triton.language as tl

from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, StepBuffers
from providers.inference.gpt_oss.triton_backend.kernels.device import (
    INTERPRETED,
    launch_options,
    release_next_kernel,
    round_to_type,
    wait_for_inputs,
)
from providers.inference.gpt_oss.triton_backend.kernels.norm import norm_rows
from providers.inference.gpt_oss.triton_backend.kernels.product import choose_tiling, dense_product, prefetch_weights
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer


@triton.jit
def locate_weight_rows(index, head_dim: tl.constexpr):
    """Return the head and the dimension of a row of a tile. Its 16 rows i and i + 8 are a pair that turns together: one
    thread holds both."""
    within = index % head_dim
    return index // head_dim, within // 8 % 2 * (head_dim // 2) + within // 16 * 8 + within % 8


@triton.jit(do_not_specialize=["rows"])
def qkv_kernel(  # noqa: PLR0913, PLR0917 - a kernel
    queries,
    keys,
    values,
    inputs,
    weight,
    bias,
    rotary,
    positions,
    slots,
    pages,
    rows,
    columns,
    rotary_positions,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    page_tokens: tl.constexpr,
    outputs: tl.constexpr,
    tokens: tl.constexpr,
    depth: tl.constexpr,
    interpreted: tl.constexpr,
    dependent: tl.constexpr,
):
    if tokens <= 64:
        prefetch_weights(weight, tl.program_id(0), outputs * width, dependent)
    wait_for_inputs(dependent)
    release_next_kernel(dependent)
    half: tl.constexpr = head_dim // 2
    head, dim = locate_weight_rows(tl.program_id(0) * outputs + tl.arange(0, outputs), head_dim)
    token = tl.program_id(1) * tokens + tl.arange(0, tokens)
    row = tl.minimum(token, rows - 1)
    product = dense_product(weight, head * head_dim + dim, inputs, row, token < rows, width, depth, interpreted)

    # Two of each 16 rows are a pair: 8 apart.
    first, second = tl.split(product.reshape(outputs // 16, 2, 8, tokens).permute(0, 2, 3, 1))
    first = first.reshape(outputs // 2, tokens)
    second = second.reshape(outputs // 2, tokens)
    pair = tl.arange(0, outputs // 2)
    head, dim = locate_weight_rows(tl.program_id(0) * outputs + pair // 8 * 16 + pair % 8, head_dim)
    # A tile's rows are all of queries, or all of keys, or of values: `stored` is their place among those.
    kind = tl.program_id(0) * outputs // head_dim
    stored = tl.max_contiguous(tl.multiple_of(head * head_dim + dim, 8), 8)
    at = bias + stored
    first += tl.load(at).to(tl.float32)[:, None]
    second += tl.load(at + half).to(tl.float32)[:, None]

    position = tl.load(positions + row)
    live = ((position >= 0) & (token < rows))[None, :]
    position = tl.maximum(position, 0)
    if kind < heads + kv_heads:
        # That is `dim`, but Triton 3.7 forgets hints on a call's results.
        turn = tl.max_contiguous(tl.multiple_of(stored % head_dim, 8), 8)
        angle = rotary + position[None, :] * half + turn[:, None]
        cosine = tl.load(angle)
        sine = tl.load(angle + rotary_positions * half)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    first = round_to_type(first, queries.dtype.element_ty, interpreted)
    second = round_to_type(second, queries.dtype.element_ty, interpreted)
    if kind < heads:
        query_place = queries + (row * (heads * head_dim))[None, :] + stored[:, None]
        tl.store(query_place, first, live)
        tl.store(query_place + half, second, live)
    else:
        page = tl.load(pages + tl.load(slots + row) * columns + position // page_tokens).to(tl.int64)
        start = page * (kv_heads * page_tokens * head_dim) + position % page_tokens * head_dim
        within = (head - heads) % kv_heads * (page_tokens * head_dim) + dim
        place = start[None, :] + tl.max_contiguous(tl.multiple_of(within, 8), 8)[:, None]
        if kind < heads + kv_heads:
            tl.store(keys + place, first, live)
            tl.store(keys + place + half, second, live)
        else:
            tl.store(values + place, first, live)
            tl.store(values + place + half, second, live)


def qkv(layer: Layer, step: StepBuffers) -> None:
    """Set `queries` of all rows, and write the rows' keys and values to their places in the layer's pages.

    Rows of padding write nothing to pages: their page 0 belongs to a sequence.
    """
    spec, tables = layer.spec, step.tables
    rows = len(step.positions)
    tiles = choose_tiling(rows, 64)
    # The largest power of two that divides the keys' rows: no tile may be of keys and of something else.
    whole = spec.kv_heads * spec.head_dim & -(spec.kv_heads * spec.head_dim)
    tiles = replace(tiles, outputs=min(tiles.outputs, whole))
    # The norm for the experts comes later: until then `normed_hidden` is free.
    norm_rows(step.normed_hidden, step.hidden, layer.attention_norm, spec.norm_eps)
    qkv_kernel[tiles.grid(spec.qkv, rows)](
        step.queries,
        tables.keys[layer.index],
        tables.values[layer.index],
        step.normed_hidden,
        layer.qkv_weight,
        layer.qkv_bias,
        layer.rotary,
        step.positions,
        step.slots,
        tables.pages,
        rows,
        tables.pages.shape[1],
        layer.rotary.shape[1],
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        width=spec.hidden,
        page_tokens=PAGE_TOKENS,
        outputs=tiles.outputs,
        tokens=tiles.tokens,
        depth=min(tiles.depth, triton.next_power_of_2(spec.hidden)),
        interpreted=INTERPRETED,
        **launch_options(tiles.warps, tiles.stages),
    )
