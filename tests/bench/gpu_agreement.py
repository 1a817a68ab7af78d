"""A comparison of each kernel with its reference, at the model's shapes, on the device where both run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    MAX_DECODE_ROWS,
    PAGE_TOKENS,
    StepBuffers,
    TableSizes,
    make_tables,
)
from providers.inference.gpt_oss.triton_backend.kernels.step import Kernels, launch_step
from providers.inference.gpt_oss.triton_backend.kernels.weights import Layer, Weights
from tests.bench.gpu_measures import ENDS, Row, decoding, prompting
from tests.bench.gpu_parts import failed
from tests.support.models.kernel_references import REFERENCE, tensors_by_name

LAYERS: Final = 2
CACHED: Final = 700
BOUND: Final = 4e-3
"""The largest ratio of the difference's norm to the reference's, in bfloat16, that the kernels' files permit."""

ALIKE: Final = 0.97
"""The share of whole numbers (experts, tokens) that must be equal: the others' scores may be equal but for rounding."""

MADE: Final = {
    "embed": ("hidden",),
    "qkv": ("queries", "keys", "values"),
    "attend_decode": ("attention_output",),
    "attend_prefill": ("attention_output",),
    "project_out": ("hidden", "normed_hidden", "chosen_experts", "shares"),
    "route": ("order", "starts"),
    "experts_up": ("inner",),
    "experts_down": ("hidden",),
    "grouped_up": ("inner",),
    "grouped_down": ("hidden",),
    "unembed": ("logits",),
    "sample": ("sampled_tokens",),
}


NEW: Final = {
    "qkv": ("queries",),
    "attend_decode": ("attention_output",),
    "attend_prefill": ("attention_output",),
    "project_out": ("normed_hidden", "shares"),
    "experts_up": ("inner",),
    "grouped_up": ("inner",),
    "unembed": ("logits",),
}
"""The tensors that a launch function writes and does not read before."""


@dataclass
class Worst:
    """The worst of all launches of a function in a step: floats' largest error, integers' smallest share of equals."""

    error: float = 0.0
    equal: float = 1.0
    failed: dict[str, str] | None = None


def agreement(weights: Weights, kernels: Kernels, rows: Sequence[int], prompts: Sequence[int]) -> list[Row]:
    """A row for each launch function and step; `ok` says that it is its reference. Each begins with what references
    made, so that one that is wrong is found alone. The last row of a step is all of it by kernels alone."""
    cut = replace(weights, layers=weights.layers[:LAYERS])
    spec = replace(weights.spec, layers=weights.spec.layers[:LAYERS])
    slots, context = max(rows), max((CACHED, *prompts))
    pages = max(slots * (CACHED // PAGE_TOKENS + 1), context // PAGE_TOKENS + 1)
    embedding = weights.ends.embedding
    tables = make_tables(spec, TableSizes(slots, context + 1, pages, embedding.dtype, embedding.device))
    tables.temperatures.copy_(torch.arange(slots) % 2)
    tables.seeds.copy_(torch.arange(slots) - slots // 2)
    table: list[Row] = []
    for step, name in [
        *((decoding(cut, tables, count, CACHED), f"{count} rows") for count in rows),
        *((prompting(cut, tables, count), f"a prompt of {count}") for count in prompts),
    ]:
        tables.keys.normal_()
        tables.values.normal_()
        table += [{"step": name} | row for row in _one_by_one(cut, step, kernels)]
        table.append({"step": name, "kernel": "all"} | _whole(cut, step, kernels))
    return table


def _one_by_one(weights: Weights, step: StepBuffers, kernels: Kernels) -> list[Row]:
    results: dict[str, Worst] = {}

    def comparison(name: str) -> Callable[[Any, StepBuffers], None]:
        return lambda inputs, step: _compare(results.setdefault(name, Worst()), name, kernels, (inputs, step))

    both = Kernels(**{field.name: comparison(field.name) for field in fields(Kernels)})
    launch_step(weights, step, both)
    for name in ENDS[1:]:
        getattr(both, name)(weights.ends, step)
    return [{"kernel": name, **_judged(each)} for name, each in results.items()]


def _judged(worst: Worst) -> Row:
    if worst.failed is not None:
        return {"ok": False, **worst.failed}
    return {"ok": worst.error <= BOUND and worst.equal >= ALIKE, "error": worst.error, "equal": worst.equal}


def _compare(worst: Worst, name: str, kernels: Kernels, value: tuple[Any, StepBuffers]) -> None:
    """Run the reference on the step and the kernel on a copy, in which the tensors that it only writes begin as NaN."""
    layer, step = value
    copy = replace(
        step,
        tables=replace(step.tables, **{key: each.clone() for key, each in tensors_by_name(step.tables).items()}),
        **{key: each.clone() for key, each in tensors_by_name(step).items()},
    )
    getattr(REFERENCE, name)(layer, step)
    places = _places(layer, step) if name == "qkv" else _no_places(step)
    written: dict[str, Tensor] = {"keys": places, "values": places}
    for output in NEW.get(name, ()):
        _of(copy, output).fill_(torch.nan)
    try:
        getattr(kernels, name)(layer, copy)
        for output in MADE[name]:
            actual, expected = _of(copy, output), _of(step, output)
            where = written.get(output)
            _note(worst, actual if where is None else actual[where], expected if where is None else expected[where])
        for memory, where in written.items():
            assert torch.equal(_of(copy, memory)[~where], _of(step, memory)[~where]), f"{memory} of others were changed"
        assert not copy.arrivals.any(), "its counters are not zero again"
        if (
            name == "project_out"
            and len(step.positions) <= MAX_DECODE_ROWS
            and torch.equal(copy.chosen_experts, step.chosen_experts)
        ):
            assert torch.equal(copy.order, step.order), "pairs are not in order"
            assert torch.equal(copy.starts, step.starts), "experts begin elsewhere"
    except Exception as exc:  # noqa: BLE001 - the other kernels are to be tried as well
        worst.failed = failed(exc)


def _places(layer: Layer, step: StepBuffers) -> Tensor:
    """Return a mask of the keys and values of the step's rows. A number that is written may equal the one before it."""
    places = _no_places(step)
    rows = (step.positions >= 0).nonzero().squeeze(-1)
    at = step.positions[rows]
    pages = step.tables.pages[step.slots[rows].long(), at // PAGE_TOKENS].long()
    places[layer.index][pages, :, at % PAGE_TOKENS] = True
    return places


def _no_places(step: StepBuffers) -> Tensor:
    return torch.zeros_like(step.tables.keys, dtype=torch.bool)


def _of(step: StepBuffers, output: str) -> Tensor:
    return getattr(step.tables if output in ("keys", "values") else step, output)


def _note(worst: Worst, actual: Tensor, expected: Tensor) -> None:
    if actual.is_floating_point():
        worst.error = max(worst.error, float(_errors(actual.flatten(), expected.flatten())))
    else:
        worst.equal = min(worst.equal, float((actual == expected).float().mean()))


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the difference's norm over the expected one's, along the last axis; infinite where it is NaN."""
    wide = expected.float()
    ratio = (actual.float() - wide).square().sum(-1) / wide.square().sum(-1).clamp(min=1e-30)
    return ratio.sqrt().nan_to_num(nan=torch.inf)


def _whole(weights: Weights, step: StepBuffers, kernels: Kernels) -> Row:
    """Compare a whole step by the median error of its rows of logits: a few rows may choose another expert."""
    logits: list[Tensor] = []
    try:
        for each in (kernels, REFERENCE):
            launch_step(weights, step, each)
            each.unembed(weights.ends, step)
            logits.append(step.logits.clone())
    except Exception as exc:  # noqa: BLE001 - as above
        return {"ok": False, **failed(exc)}
    ours, theirs = logits
    error = float(_errors(ours, theirs).median())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return {"ok": error <= 5 * BOUND, "error": error, "equal": same}
