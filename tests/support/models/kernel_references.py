"""The kernels of gpt-oss in plain torch, each with the arguments of its launch function: what kernels must compute."""

# as the kernels, which have no types:
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from providers.inference.gpt_oss.checkpoint.checkpoint import PackedExperts
from providers.inference.gpt_oss.checkpoint.mxfp4 import unpack
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.torch_backend.attention import rotate
from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    MAX_DECODE_ROWS,
    PAGE_TOKENS,
    StepBuffers,
    Tables,
    tensor_to_list,
)
from providers.inference.gpt_oss.triton_backend.kernels.layout import (
    BIT_POSITIONS,
    SCALE_SHIFT,
    TILE_DEPTH,
    TILE_ROWS,
    TiledExperts,
)
from providers.inference.gpt_oss.triton_backend.kernels.noise import BLOCK_TOKENS
from providers.inference.gpt_oss.triton_backend.kernels.sample import GREEDY_BELOW
from providers.inference.gpt_oss.triton_backend.kernels.step import Kernels
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights, Layer

SERIES_BELOW: Final = 2.0**-8
MAX_UNIFORM: Final = 1 - 2.0**-24
_WORD_MASK: Final = 2**32 - 1
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEYS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def fill_input(step: StepBuffers, name: str, values: Sequence[object]) -> None:
    """Write an input's first values; the rest is padding. Blocks until the device has them."""
    target: Tensor = getattr(step, name)
    target.fill_(0 if name in ("tiles", "slots") else -1)
    if values:
        target[: len(values)] = torch.tensor(values, dtype=torch.int32, device=target.device)


def tensors_by_name(memory: StepBuffers | Tables) -> dict[str, Tensor]:
    """Return every tensor by its name."""
    named = {field.name: getattr(memory, field.name) for field in fields(memory)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def untile_experts(tiled: TiledExperts) -> PackedExperts:
    """Return the argument of `tile_experts`, bit for bit."""
    count, row_tiles, depth_tiles, _ = tiled.values.shape
    words = tiled.values.view(count, row_tiles, depth_tiles, 4, 8, 4, 2, 2, 2)
    codes = torch.stack([_unpack_code(words, k) for k in range(4)], dim=-1)
    # From experts, tiles, then w g c21 c3 h c0 k ...
    codes = codes.permute(0, 1, 3, 4, 7, 2, 9, 6, 5, 8)
    codes = codes.reshape(count, row_tiles * TILE_ROWS, depth_tiles * TILE_DEPTH)[:, : tiled.rows, : tiled.depth]
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).view(count, tiled.rows, tiled.depth // 32, 16)
    scales = tiled.scales.view(count, row_tiles, depth_tiles, TILE_ROWS, 2).transpose(2, 3)
    scales = scales.reshape(count, row_tiles * TILE_ROWS, depth_tiles * 2)[:, : tiled.rows, : tiled.depth // 32]
    return PackedExperts(blocks, scales - SCALE_SHIFT, tiled.bias)


def _unpack_code(words: Tensor, k: int) -> Tensor:
    code = torch.zeros_like(words, dtype=torch.uint8)
    for bit, place in zip((3, 2, 1, 0), BIT_POSITIONS[k], strict=True):
        code |= (words >> place & 1).to(torch.uint8) << bit
    return code


def expert_matrix(tiled: TiledExperts, expert: int, dtype: torch.dtype) -> Tensor:
    """Return one expert's weights [rows, depth] as numbers, for references."""
    one = slice(expert, expert + 1)
    packed = untile_experts(
        TiledExperts(tiled.values[one], tiled.scales[one], tiled.bias[one], tiled.rows, tiled.depth)
    )
    return unpack(packed.blocks[0], packed.scales[0], dtype)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return noise [R, vocabulary] float32 for rows with `seeds` [R] int64 and `positions` [R], those of the token to
    be chosen."""
    blocks = -(-vocabulary // BLOCK_TOKENS)
    counters = torch.arange(blocks * 32, device=seeds.device).expand(len(seeds), -1)
    places = positions.to(torch.int64).unsqueeze(-1).expand_as(counters)
    words = torch.stack(philox(seeds.unsqueeze(-1), (counters, places)), dim=-1)
    words = words.view(len(seeds), blocks, 32, 4).transpose(2, 3).flatten(1, 3)[:, :vocabulary]
    return -torch.log(exponential(words))


def exponential(words: Tensor) -> Tensor:
    """Return exponentially distributed float32 from words in [0, 2 ** 32); precise where they are small, as the largest
    Gumbel numbers come from the smallest of these."""
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=MAX_UNIFORM)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3)))
    return torch.where(uniform < SERIES_BELOW, series, -torch.log(1 - uniform))


def philox(seed: Tensor, counters: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox-4x32-10 of a 64-bit `seed` and the counter (c0, c1, 0, 0), as four words in int64."""
    c0, c1 = (counter & _WORD_MASK for counter in counters)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _WORD_MASK, seed >> 32 & _WORD_MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_words(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_words(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEYS[0] & _WORD_MASK, k1 + _KEYS[1] & _WORD_MASK
    return c0, c1, c2, c3


def _multiply_words(multiplier: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of words, by halves: 64 bits with a sign do not hold it."""
    low, high = multiplier * (words & 0xFFFF), multiplier * (words >> 16)
    middle = high + (low >> 16)
    return middle >> 16 & _WORD_MASK, (middle & 0xFFFF) << 16 | low & 0xFFFF


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return [T, hidden], normed and weighted in the weight's type, rounded once to the type of `hidden`, which a
    product then takes."""
    wide = hidden.to(weight.dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(hidden.dtype)


def embed_reference(ends: EndWeights, step: StepBuffers) -> None:
    live = step.positions >= 0
    tokens = step.tokens.where(step.tokens >= 0, step.tables.last_tokens[step.slots.long()])[live]
    step.hidden[live] = embedding(tokens, ends.embedding)


def qkv_reference(layer: Layer, step: StepBuffers) -> None:
    spec, wide = layer.spec, layer.sinks.dtype
    normed = rms_norm(step.hidden, layer.attention_norm, spec.norm_eps)
    projected = linear(normed.to(wide), layer.qkv_weight.to(wide), layer.qkv_bias.to(wide))
    projected = projected.view(len(normed), -1, spec.head_dim)
    positions = step.positions.clamp(min=0).long()
    cosines, sines = layer.rotary[:, positions].to(wide).unsqueeze(2)
    turned = rotate(projected[:, : spec.heads + spec.kv_heads], cosines, sines)
    step.queries.copy_(turned[:, : spec.heads])
    live = (step.positions >= 0).nonzero().squeeze(-1)
    at = positions[live]
    pages = step.tables.pages[step.slots[live].long(), at // PAGE_TOKENS].long()
    for memory, new in ((step.tables.keys, turned), (step.tables.values, projected)):
        memory[layer.index][pages, :, at % PAGE_TOKENS] = new[live, -spec.kv_heads :].to(memory.dtype)


def attend_decode_reference(layer: Layer, step: StepBuffers) -> None:
    positions, slots = step.positions[: step.singles], step.slots[: step.singles]
    for row in tensor_to_list((positions >= 0).nonzero().squeeze(-1)):
        one = slice(row, row + 1)
        output = attend_slot(layer, step.tables, int(slots[row]), (step.queries[one], positions[one]))
        step.attention_output[one] = output.to(step.attention_output.dtype)


def attend_slot(layer: Layer, tables: Tables, slot: int, queries_and_positions: tuple[Tensor, Tensor]) -> Tensor:
    """Return the attention of one slot's queries [n, heads, D] at positions [n] over its pages: [n, heads * D], not
    rounded."""
    queries, positions = queries_and_positions
    spec, wide = layer.spec, layer.sinks.dtype
    last = int(positions.max())
    first = 0 if layer.window is None else max(0, int(positions.min()) - layer.window + 1)
    columns = slice(first // PAGE_TOKENS, last // PAGE_TOKENS + 1)
    pages = tables.pages[slot, columns].long()
    keys, values = (
        memory[layer.index][pages].transpose(0, 1).flatten(1, 2).to(wide) for memory in (tables.keys, tables.values)
    )
    places = torch.arange(columns.start * PAGE_TOKENS, columns.stop * PAGE_TOKENS, device=positions.device)
    ages = positions.unsqueeze(-1) - places
    unseen = ages < 0 if layer.window is None else (ages < 0) | (ages >= layer.window)
    values = values.masked_fill(unseen.all(dim=0).unsqueeze(-1), 0)
    grouped = queries.to(wide).view(len(queries), spec.kv_heads, -1, spec.head_dim)
    scores = torch.einsum("nkgd,ksd->nkgs", grouped, keys) * spec.head_dim**-0.5
    scores = scores.masked_fill(unseen.view(len(queries), 1, 1, -1), -torch.inf)
    sinks = layer.sinks.view(spec.kv_heads, -1, 1).expand(len(queries), -1, -1, -1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("nkgs,ksd->nkgd", weights, values).flatten(1)


def attend_prefill_reference(layer: Layer, step: StepBuffers) -> None:
    for tile in step.tiles:
        first, count, slot, start = (int(number) for number in tile)
        if count:
            rows = slice(first, first + count)
            positions: Tensor = step.positions[rows]
            assert int(positions[0]) == start, "a tile says where its first token stands"
            output = attend_slot(layer, step.tables, slot, (step.queries[rows], positions))
            step.attention_output[rows] = output.to(step.attention_output.dtype)


def project_out_reference(layer: Layer, step: StepBuffers) -> None:
    spec, wide = layer.spec, layer.sinks.dtype
    projected = linear(step.attention_output.to(wide), layer.out_weight.to(wide), layer.out_bias.to(wide))
    step.hidden.copy_(step.hidden.to(wide) + projected)
    step.normed_hidden.copy_(rms_norm(step.hidden, layer.mlp_norm, spec.norm_eps))
    scores = linear(step.normed_hidden.to(wide), layer.router_weight.to(wide), layer.router_bias.to(wide))
    ordered, experts = scores.sort(dim=-1, descending=True, stable=True)
    step.shares.copy_(ordered[:, : spec.experts_per_token].softmax(dim=-1))
    live = (step.positions >= 0).unsqueeze(-1)
    step.chosen_experts.copy_(experts[:, : spec.experts_per_token].masked_fill(~live, -1))
    if len(step.positions) <= MAX_DECODE_ROWS:
        route_reference(layer, step)


def experts_up_reference(layer: Layer, step: StepBuffers) -> None:
    inner = step.inner.flatten(0, 1)
    for expert in range(layer.spec.experts):
        pairs = (step.chosen_experts.flatten() == expert).nonzero().squeeze(-1)
        if len(pairs):
            rows = pairs // layer.spec.experts_per_token
            inner[pairs] = expert_inner(layer, expert, step.normed_hidden[rows]).to(inner.dtype)


def expert_inner(layer: Layer, expert: int, inputs: Tensor) -> Tensor:
    """Return one expert's activations [n, intermediate] of `inputs` [n, hidden], not rounded."""
    wide = layer.sinks.dtype
    weight = expert_matrix(layer.gate_up, expert, wide)
    return swiglu(linear(inputs.to(wide), weight, layer.gate_up.bias[expert].to(wide)), layer.spec)


def swiglu(gate_up: Tensor, spec: ModelSpec) -> Tensor:
    """Return [..., I] of [..., 2 * I], whose even columns are gates and whose odd ones are linear."""
    gate = gate_up[..., 0::2].clamp(max=spec.swiglu_limit)
    line = gate_up[..., 1::2].clamp(-spec.swiglu_limit, spec.swiglu_limit)
    return gate * torch.sigmoid(gate * spec.swiglu_alpha) * (line + 1)


def experts_down_reference(layer: Layer, step: StepBuffers) -> None:
    inner = step.inner.flatten(0, 1)
    outputs = torch.zeros(len(inner), layer.spec.hidden, dtype=layer.sinks.dtype, device=inner.device)
    for expert in range(layer.spec.experts):
        pairs = (step.chosen_experts.flatten() == expert).nonzero().squeeze(-1)
        if len(pairs):
            outputs[pairs] = expert_output(layer, expert, inner[pairs])
    add_expert_outputs(step, outputs.view(*step.chosen_experts.shape, -1))


def expert_output(layer: Layer, expert: int, inner: Tensor) -> Tensor:
    """Return one expert's output [n, hidden] of `inner` [n, intermediate], not rounded."""
    wide = layer.sinks.dtype
    return linear(inner.to(wide), expert_matrix(layer.down, expert, wide), layer.down.bias[expert].to(wide))


def add_expert_outputs(step: StepBuffers, outputs: Tensor) -> None:
    """Add [T, K, hidden] to the residual stream of the rows that are not padding."""
    live = step.positions >= 0
    sums = (outputs[live] * step.shares[live].unsqueeze(-1)).sum(dim=1)
    step.hidden[live] = (step.hidden[live].to(sums.dtype) + sums).to(step.hidden.dtype)


def route_reference(layer: Layer, step: StepBuffers) -> None:
    experts = layer.spec.experts
    flat = step.chosen_experts.flatten()
    flat = flat.where(flat >= 0, experts).long()
    step.order.copy_(flat.argsort(stable=True))
    step.starts[0] = 0
    step.starts[1:] = torch.bincount(flat, minlength=experts + 1)[:experts].cumsum(0)


def grouped_up_reference(layer: Layer, step: StepBuffers) -> None:
    inner = step.inner.flatten(0, 1)
    starts = tensor_to_list(step.starts)
    for expert in range(layer.spec.experts):
        pairs = step.order[starts[expert] : starts[expert + 1]].long()
        if len(pairs):
            rows = pairs // layer.spec.experts_per_token
            inner[pairs] = expert_inner(layer, expert, step.normed_hidden[rows]).to(inner.dtype)


def grouped_down_reference(layer: Layer, step: StepBuffers) -> None:
    inner = step.inner.flatten(0, 1)
    outputs = torch.zeros(len(inner), layer.spec.hidden, dtype=layer.sinks.dtype, device=inner.device)
    starts = tensor_to_list(step.starts)
    for expert in range(layer.spec.experts):
        pairs = step.order[starts[expert] : starts[expert + 1]].long()
        if len(pairs):
            outputs[pairs] = expert_output(layer, expert, inner[pairs])
    add_expert_outputs(step, outputs.view(*step.chosen_experts.shape, -1))


def unembed_reference(ends: EndWeights, step: StepBuffers) -> None:
    hidden = step.hidden[step.sample_rows.clamp(min=0).long()]
    normed = rms_norm(hidden, ends.norm, ends.spec.norm_eps)
    wide = ends.norm.dtype
    step.logits.copy_(linear(normed.to(wide), ends.unembedding.to(wide)))


def sample_reference(ends: EndWeights, step: StepBuffers) -> None:
    live = (step.sample_rows >= 0).nonzero().squeeze(-1)
    rows = step.sample_rows[live].long()
    slots = step.slots[rows].long()
    wide = ends.norm.dtype
    normed = rms_norm(step.hidden[rows], ends.norm, ends.spec.norm_eps)
    logits = linear(normed.to(wide), ends.unembedding.to(wide))
    temperatures = step.tables.temperatures[slots].unsqueeze(-1)
    noise = gumbel(step.tables.seeds[slots], step.positions[rows] + 1, ends.spec.vocabulary)
    scores = torch.where(temperatures < GREEDY_BELOW, logits, logits / temperatures + noise)
    best = scores.nan_to_num(nan=-torch.inf).argmax(dim=-1)
    finite = logits.isfinite().all(dim=-1)
    step.sampled_tokens.fill_(-1)
    step.sampled_tokens[live] = best.where(finite, -1).int()
    step.tables.last_tokens[slots] = step.sampled_tokens[live].clamp(min=0)


REFERENCE: Final = Kernels(
    embed=embed_reference,
    qkv=qkv_reference,
    attend_decode=attend_decode_reference,
    attend_prefill=attend_prefill_reference,
    project_out=project_out_reference,
    experts_up=experts_up_reference,
    experts_down=experts_down_reference,
    route=route_reference,
    grouped_up=grouped_up_reference,
    grouped_down=grouped_down_reference,
    unembed=unembed_reference,
    sample=sample_reference,
)
