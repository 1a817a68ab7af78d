"""Compares a kernel with its reference: random inputs at the shapes' edges, outputs full of NaN."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.checkpoint import PackedExperts
from providers.inference.gpt_oss.checkpoint.mxfp4 import pack
from providers.inference.gpt_oss.checkpoint.spec import ModelSpec
from providers.inference.gpt_oss.torch_backend.attention import rotary_table
from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    PAGE_TOKENS,
    StepBuffers,
    TableSizes,
    make_step,
    make_tables,
    query_tiles,
)
from providers.inference.gpt_oss.triton_backend.kernels.layout import tile_experts
from providers.inference.gpt_oss.triton_backend.kernels.weights import EndWeights, Layer, sum_dtype
from tests.support.models.kernel_references import fill_input, tensors_by_name
from tests.support.models.random_checkpoints import TINY, tiny_spec_with

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
BY_ROW = {"hidden", "normed_hidden", "queries", "attention_output", "chosen_experts", "shares", "inner"}
"""Tensors of StepBuffers whose rows of padding may hold anything."""


@dataclass(frozen=True)
class Case:
    """A layer and the ends of a model, and a step in the middle of its life, all of it random by `seed`."""

    layer: Layer
    ends: EndWeights
    step: StepBuffers


@dataclass(frozen=True)
class Shape:
    """Rows of a step: of each sequence (cached tokens, new tokens), single ones first, and this much padding after the
    singles. `window` None is a full layer."""

    sequences: Sequence[tuple[int, int]] = ((0, 1), (15, 1), (16, 1), (40, 1), (100, 1))
    padding: int = 2
    window: int | None = None
    spec: ModelSpec = TINY
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"


ENDS_SHAPES = {
    "decoding": Shape(),
    "one": Shape(sequences=((15, 1),), padding=0),
    "mixed": Shape(sequences=((0, 1), (16, 1), (3, 7), (17, 20)), padding=1),
    "odd": Shape(sequences=((2, 1),) * 20, spec=tiny_spec_with(hidden=96, vocabulary=333)),
}
"""For the kernels after the layers: a few of every kind of row that can be sampled."""


def make_case(shape: Shape = Shape()) -> Case:
    """Every tensor is filled as if all earlier kernels had run; experts are chosen at random."""
    torch.manual_seed(shape.seed)  # pyright: ignore[reportUnknownMemberType] - typed in part
    device = torch.device(shape.device)
    step = _step(shape, device)
    spec, rows = shape.spec, len(step.positions)
    for name in ("hidden", "normed_hidden", "queries", "attention_output", "inner"):
        getattr(step, name).copy_(torch.randn(getattr(step, name).shape))
    scores = torch.randn(rows, spec.experts)
    best, chosen = scores.topk(spec.experts_per_token)
    choose(step, chosen)
    step.shares.copy_(best.softmax(-1))
    return Case(make_layer(shape), make_ends(shape), step)


def choose(step: StepBuffers, chosen: Tensor) -> None:
    """Set the experts [T, K] of the rows that are not padding; `order` and `starts` follow."""
    live = (step.positions >= 0).unsqueeze(-1).cpu()
    step.chosen_experts.copy_(chosen.masked_fill(~live, -1))
    experts = len(step.starts) - 1
    flat = step.chosen_experts.flatten().where(step.chosen_experts.flatten() >= 0, experts).long()
    step.order.copy_(flat.argsort(stable=True))
    step.starts[1:] = torch.bincount(flat, minlength=experts + 1)[:experts].cumsum(0)


def make_layer(shape: Shape) -> Layer:
    """Return a layer whose numbers keep their magnitude; layer 1 of two, so that a kernel that forgets the index
    fails."""
    spec, wide, device = shape.spec, sum_dtype(shape.dtype), torch.device(shape.device)

    def matrix(*sizes: int) -> Tensor:
        return (torch.randn(sizes) * sizes[-1] ** -0.5).to(device, shape.dtype)

    def vector(*sizes: int) -> Tensor:
        return (torch.randn(sizes) / 10).to(device, shape.dtype)

    def experts(rows: int, depth: int) -> Any:
        blocks, scales = pack(torch.randn(spec.experts, rows, depth) * depth**-0.5)
        return tile_experts(PackedExperts(blocks.to(device), scales.to(device), vector(spec.experts, rows)))

    cosines, sines = rotary_table(spec.rotary, spec.head_dim, 4096)
    return Layer(
        spec=spec,
        index=1,
        window=shape.window,
        rotary=torch.stack((cosines, sines)).to(device),
        attention_norm=(1 + torch.randn(spec.hidden) / 10).to(device, wide),
        qkv_weight=matrix(spec.qkv, spec.hidden),
        qkv_bias=vector(spec.qkv),
        sinks=torch.randn(spec.heads).to(device, wide),
        out_weight=matrix(spec.hidden, spec.heads * spec.head_dim),
        out_bias=vector(spec.hidden),
        mlp_norm=(1 + torch.randn(spec.hidden) / 10).to(device, wide),
        router_weight=matrix(spec.experts, spec.hidden),
        router_bias=vector(spec.experts),
        gate_up=experts(2 * spec.intermediate, spec.hidden),
        down=experts(spec.hidden, spec.intermediate),
    )


def make_ends(shape: Shape) -> EndWeights:
    spec, device = shape.spec, torch.device(shape.device)
    embedding = torch.randn(spec.vocabulary, spec.hidden).to(device, shape.dtype)
    unembedding = (torch.randn(spec.vocabulary, spec.hidden) * spec.hidden**-0.5).to(device, shape.dtype)
    norm = (1 + torch.randn(spec.hidden) / 10).to(device, sum_dtype(shape.dtype))
    return EndWeights(spec, embedding, norm, unembedding)


def _step(shape: Shape, device: torch.device) -> StepBuffers:
    """Return a step of slots in a scattered order, pages too; numbers that a row may not see are NaN."""
    spec = replace(shape.spec, layers=TINY.layers[:2])
    longest = max((cached + new for cached, new in shape.sequences), default=1)
    columns = -(-longest // PAGE_TOKENS)
    slots = len(shape.sequences) + 2
    sizes = TableSizes(slots, longest, slots * columns + 1, shape.dtype, device)
    tables = make_tables(spec, sizes)
    scattered = list(range(sizes.pages))
    Random(shape.seed).shuffle(scattered)
    tables.pages.copy_(torch.tensor(scattered[: slots * columns]).view(slots, columns))
    for memory in (tables.keys, tables.values):
        memory.fill_(torch.nan)
    tables.last_tokens.copy_(torch.randint(0, spec.vocabulary, (slots,)))
    tables.temperatures.copy_(torch.rand(slots) * (torch.arange(slots) % 3 > 0))
    tables.seeds.copy_(torch.randint(-(2**62), 2**62, (slots,)))
    singles = [(slots - 1 - place, *columns) for place, columns in enumerate(shape.sequences) if columns[1] == 1]
    several = [(slots - 1 - place, *columns) for place, columns in enumerate(shape.sequences) if columns[1] > 1]
    rows = [(slot, cached, -1 if slot % 2 else slot) for slot, cached, _ in singles] + [(0, -1, -1)] * shape.padding
    first_span, tiles = len(rows), list[tuple[int, int, int, int]]()
    for slot, cached, new in several:
        tiles += query_tiles(len(rows), new, slot, cached)
        rows += [(slot, cached + place, place % spec.vocabulary) for place in range(new)]
    samples = [row for row in range(len(rows)) if rows[row][1] >= 0 and row % 4 != 2]
    step = make_step(spec, tables, len(rows), len(samples) + shape.padding, first_span)
    for name, column in zip(("slots", "positions", "tokens"), zip(*rows, strict=True), strict=True):
        fill_input(step, name, column)
    fill_input(step, "tiles", tiles)
    fill_input(step, "sample_rows", samples)
    for slot, cached, new in singles + several:
        places = torch.arange(cached + new)
        pages = tables.pages[slot, places // PAGE_TOKENS].long()
        for memory in (tables.keys, tables.values):
            numbers = torch.randn(2, len(places), spec.kv_heads, spec.head_dim).to(memory)
            for layer in range(2):
                memory[layer][pages, :, places.to(device) % PAGE_TOKENS] = numbers[layer]
    return step


def copied(step: StepBuffers) -> StepBuffers:
    """Return a copy of the step elsewhere in memory."""
    tables = replace(step.tables, **{name: each.clone() for name, each in tensors_by_name(step.tables).items()})
    return replace(step, tables=tables, **{name: each.clone() for name, each in tensors_by_name(step).items()})


def assert_same(
    case: Case,
    pair: tuple[Callable[[Any, StepBuffers], None], Callable[[Any, StepBuffers], None]],
    outputs: Sequence[str],
    *,
    poisoned: Sequence[str] = (),
    tolerance: float | None = None,
) -> None:
    """Assert that a kernel and its reference, both run on copies of the case's step, return the same `outputs` (names
    of the tensors of StepBuffers or Tables) and change nothing else. `poisoned` outputs are NaN before: those not also
    inputs."""
    before = copied(case.step)
    for name in poisoned:
        target = tensors_by_name(before)[name]
        target.fill_(torch.nan if target.is_floating_point() else 1_000_003)
    before.partials.fill_(torch.nan)
    bound = TOLERANCES[case.step.hidden.dtype] if tolerance is None else tolerance
    actual, expected = copied(before), copied(before)
    first = case.ends if pair[0].__annotations__.get("ends") else case.layer
    pair[0](first, actual)
    pair[1](first, expected)
    live = before.positions >= 0
    for result, reference, original in ((actual, expected, before), (actual.tables, expected.tables, before.tables)):
        for name, filled in tensors_by_name(result).items():
            of_row = live if name in BY_ROW else before.sample_rows >= 0 if name == "logits" else ...
            value, truth, old = (
                each[of_row] for each in (filled, tensors_by_name(reference)[name], tensors_by_name(original)[name])
            )
            if name not in outputs:
                assert name == "partials" or torch.equal(_bits(value), _bits(old)), f"{name} was changed"
            elif not value.is_floating_point():
                assert torch.equal(value, truth), f"{name} is not what it should be"
            else:
                assert _distance(value, truth) <= bound, f"{name} is off by {_distance(value, truth):.2e}"


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the ratio of the difference's norm to the expected one's; NaN must be NaN in both."""
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    difference = (actual.double() - expected.double()).nan_to_num().square().sum()
    return float((difference / expected.double().nan_to_num().square().sum().clamp(min=1e-60)).sqrt())


def _bits(values: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.element_size()]) if values.is_floating_point() else values
