"""What is measured on the device itself: its ceilings, each kernel, whole steps, and prompts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from providers.inference.gpt_oss.kernels.buffers import (
    ALONE_ROWS,
    PAGE_TOKENS,
    Step,
    fill,
    listed,
    make_step,
    query_tiles,
)
from providers.inference.gpt_oss.kernels.step import REFERENCE, Kernels, launch_step
from providers.inference.gpt_oss.kernels.weights import Weights
from providers.inference.gpt_oss.sampling import RowSampling
from providers.inference.gpt_oss.triton_batch import Line
from providers.inference.gpt_oss.triton_runner import TritonRunner
from tests.bench.gpu_model import Touched

Row = dict[str, Any]
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second of this device, as measured on it."""

    copy: float
    read: float
    products: float


def timed(work: Callable[[], object], device: torch.device, times: int = 1) -> tuple[float, float]:
    """Seconds of one `work`, the median of REPEATS runs of `times` each, and their spread (largest less smallest)."""
    work()
    found: list[float] = []
    for _ in range(REPEATS if device.type == "cuda" else 2):
        wait(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        wait(device)
        found.append((time.perf_counter() - began) / times)
    return statistics.median(found), max(found) - min(found)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work without its launches' cost, where there are graphs."""
    if device.type != "cuda":
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def ceilings(device: torch.device, size: int) -> Ceilings:
    """Copying and summing 8 `size` bytes, and a product of bfloat16 matrices of `size` / 2 ** 17 rows (8 GB: 8192)."""
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    copy_s, _ = timed(lambda: target.copy_(source), device, 3)
    read_s, _ = timed(source.sum, device, 3)
    side = max(64, size >> 17)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product_s, _ = timed(lambda: left @ right, device, 5)
    return Ceilings(2 * source.nbytes / copy_s, source.nbytes / read_s, 2.0 * side**3 / product_s)


def touched(weights: Weights, step: Step, kernels: Kernels, context: int) -> Touched:
    """Run the step once and count the experts that its layers chose."""
    chosen: list[Tensor] = []

    def counted(layer: Any, step: Step) -> None:
        kernels.project_out(layer, step)
        chosen.append(step.chosen.clone())

    launch_step(weights, step, replace(kernels, project_out=counted))
    experts = [len({expert for expert in listed(each.flatten()) if expert >= 0}) for each in chosen]
    return Touched(weights.spec, len(step.positions), context, sum(experts) / len(experts))


def kernel_table(
    runner: TritonRunner, weights: Weights, kernels: Kernels, rows: Sequence[int], top: Ceilings
) -> list[Row]:
    """Microseconds of each launch function, all layers' one behind the other: no weights are in the cache already."""
    device, context = runner.tables.keys.device, min(1024, runner.context_tokens - 1)
    table: list[Row] = []
    for count in rows:
        step = make_step(weights.spec, runner.tables, count, count)
        slots = list(range(count))
        _pages(runner, count, context)
        for name, values in (("slots", slots), ("positions", [context] * count), ("samples", slots)):
            fill(step, name, values)
        fill(step, "tokens", [(7 * slot + 5) % weights.spec.vocabulary for slot in slots])
        found = touched(weights, step, kernels, context)
        hidden = step.hidden.clone()
        unused = "grouped" if count <= ALONE_ROWS else "experts"
        for name, size in found.kernel_bytes().items():
            if name.startswith(unused):
                continue
            launch = getattr(kernels, name)
            ends = name in ("embed", "unembed", "sample")

            def work(launch: Any = launch, ends: bool = ends, step: Step = step) -> None:
                for each in (weights.ends,) if ends else weights.layers:
                    launch(each, step)

            seconds, spread = timed(graphed(work, device), device)
            step.hidden.copy_(hidden)
            each = 1 if ends else len(weights.layers)
            table.append(
                {
                    "kernel": name,
                    "rows": count,
                    "us": 1e6 * seconds / each,
                    "spread_us": 1e6 * spread / each,
                    "GB/s": size * each / seconds / 1e9,
                    "share": size * each / seconds / top.copy,
                }
            )
    return table


def step_table(
    runner: TritonRunner, weights: Weights, kernels: Kernels, asked: Sequence[tuple[int, int]], top: Ceilings
) -> list[Row]:
    """Whole decoding steps, sampling and the way to the host and back included, for pairs (rows, context)."""
    device = runner.tables.keys.device
    table: list[Row] = []
    for rows, context in asked:
        pages = -(-(context + 1) // PAGE_TOKENS)
        if context >= runner.context_tokens or rows > runner.slots or rows * pages > runner.page_count:
            continue
        for slot in range(rows):
            runner.open(slot, RowSampling(temperature=1.0, seed=slot), (), ())
        _pages(runner, rows, context)
        batch = runner.shapes.batch([Line(slot, context, [11 * slot % 997], 1) for slot in range(rows)])
        step = make_step(weights.spec, runner.tables, rows, rows)
        fill(step, "slots", range(rows))
        fill(step, "positions", [context] * rows)
        fill(step, "tokens", [11 * slot % 997 for slot in range(rows)])
        found = touched(weights, step, kernels, context)
        seconds, spread = timed(
            lambda batch=batch: runner.steps.launch(batch), device, 10 if device.type == "cuda" else 1
        )
        limit = max(found.step_bytes / top.copy, found.operations / top.products)
        table.append(
            {
                "rows": rows,
                "context": context,
                "ms": 1e3 * seconds,
                "spread_ms": 1e3 * spread,
                "tokens/s": rows / seconds,
                "experts": found.experts,
                "GB": found.step_bytes / 1e9,
                "limit_tokens/s": rows / limit,
                "share": limit / seconds,
            }
        )
    return table


def prompt_table(runner: TritonRunner, weights: Weights, sizes: Sequence[int], top: Ceilings) -> list[Row]:
    """One sequence's prompt in one step."""
    device = runner.tables.keys.device
    table: list[Row] = []
    for size in sizes:
        if size > min(runner.shapes.spans[-1], runner.context_tokens):
            continue
        runner.open(0, RowSampling(temperature=0.0), (), ())
        _pages(runner, 1, size - 1)
        tokens = [(13 * place) % weights.spec.vocabulary for place in range(size)]
        batch = runner.shapes.batch([Line(0, 0, tokens, 1)])
        seconds, spread = timed(lambda batch=batch: runner.steps.launch(batch), device)
        all_of_it = Touched(weights.spec, size, 0, weights.spec.experts)
        limit = max(all_of_it.step_bytes / top.copy, all_of_it.operations / top.products)
        table.append(
            {
                "tokens": size,
                "ms": 1e3 * seconds,
                "spread_ms": 1e3 * spread,
                "tokens/s": size / seconds,
                "share": limit / seconds,
            }
        )
    return table


def agreement(weights: Weights, runner: TritonRunner, kernels: Kernels) -> list[Row]:
    """Two layers and the unembedding against the references on this device: how far logits are off, relative to their
    norm, and which share of rows has the same best token. Decoding at three sizes, and a prompt."""
    cut = replace(weights, layers=weights.layers[:2])
    table: list[Row] = []
    for singles, span in ((1, 0), (8, 0), (128, 0), (2, 300)):
        rows = min(singles, runner.slots - 1) + span
        step = make_step(weights.spec, runner.tables, rows, rows, rows - span)
        _pages(runner, runner.slots, max(span, 40))
        slots = [*range(rows - span), *[runner.slots - 1] * span]
        fill(step, "slots", slots)
        fill(step, "positions", [*[40] * (rows - span), *range(span)])
        fill(step, "tokens", [(17 * row + 3) % weights.spec.vocabulary for row in range(rows)])
        fill(step, "samples", range(rows))
        if span:
            fill(step, "tiles", query_tiles(rows - span, span, runner.slots - 1, 0))
        logits: list[Tensor] = []
        for each in (kernels, REFERENCE):
            launch_step(cut, step, each)
            each.unembed(cut.ends, step)
            logits.append(step.logits.clone())
        ours, theirs = logits
        table.append(
            {
                "singles": rows - span,
                "span": span,
                "relative_error": float(((ours - theirs).square().sum() / theirs.square().sum()).sqrt()),
                "same_best": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
            }
        )
    return table


def finite(weights: Weights, runner: TritonRunner, kernels: Kernels) -> Mapping[str, float]:
    """The residual stream's spread behind each layer of one step: random weights must not let it grow without end."""
    step = make_step(weights.spec, runner.tables, 1, 1)
    _pages(runner, 1, 0)
    for name, value in (("slots", 0), ("positions", 0), ("tokens", 5)):
        fill(step, name, [value])
    launch_step(weights, step, kernels)
    assert bool(step.hidden.isfinite().all()), "the residual stream is not finite"
    return {"spread_behind_the_last_layer": float(step.hidden.float().std())}


def _pages(runner: TritonRunner, slots: int, context: int) -> None:
    """The first pages of the memory, each slot's its own as far as they last; what is in them is finite."""
    columns = context // PAGE_TOKENS + 1
    numbers = torch.arange(slots * columns, dtype=torch.int32, device=runner.tables.pages.device)
    with torch.inference_mode():
        runner.tables.pages[:slots, :columns] = (numbers % runner.page_count).view(slots, columns)
