"""The measurements on the device itself: its ceilings, each kernel, whole steps, and prompts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.triton_backend.batch import SlotTokens
from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
    MAX_DECODE_ROWS,
    MAX_UNGROUPED_ROWS,
    PAGE_TOKENS,
    StepBuffers,
    Tables,
    TableSizes,
    make_step,
    make_tables,
    query_tiles,
    tensor_to_list,
)
from providers.inference.gpt_oss.triton_backend.kernels.step import Kernels, launch_step
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights
from providers.inference.gpt_oss.triton_backend.runner import TritonRunner
from tests.bench.gpu_model import Touched
from tests.bench.gpu_parts import failed
from tests.support.models.kernel_references import fill_input, tensors_by_name

Row = dict[str, Any]
REPEATS = 5
ENDS = ("embed", "unembed", "sample")


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second of this device, as measured on it."""

    copy: float
    read: float
    products: float


@dataclass(frozen=True)
class Stage:
    """A model and memory for made-up sequences, on which launch functions are measured one by one."""

    weights: Weights
    tables: Tables
    kernels: Kernels
    top: Ceilings

    @property
    def device(self) -> torch.device:
        return self.tables.keys.device


def make_stage(weights: Weights, kernels: Kernels, top: Ceilings, slots: int, context: int) -> Stage:
    """With room for `slots` sequences of 1,024 tokens, or one of `context`; what is cached is numbers."""
    embedding = weights.ends.embedding
    pages = max(slots * (1024 // PAGE_TOKENS + 1), context // PAGE_TOKENS + 1)
    tables = make_tables(weights.spec, TableSizes(slots, context + 1, pages, embedding.dtype, embedding.device))
    tables.keys.normal_()
    tables.values.normal_()
    return Stage(weights, tables, kernels, top)


def timed(work: Callable[[], object], device: torch.device, times: int = 1) -> tuple[float, float]:
    """Seconds of one `work`, the median of REPEATS runs of `times` each, and their spread (largest less smallest)."""
    work()
    repeats = REPEATS if device.type == "cuda" else 2
    times_s = [_run_s(work, device, times) / times for _ in range(repeats)]
    return statistics.median(times_s), max(times_s) - min(times_s)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the work as one CUDA graph, without its launches' cost; on a device without graphs, the work itself."""
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
    first, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product_s, _ = timed(lambda: first @ right, device, 5)
    return Ceilings(2 * source.nbytes / copy_s, source.nbytes / read_s, 2.0 * side**3 / product_s)


def decoding(weights: Weights, tables: Tables, rows: int, context: int) -> StepBuffers:
    """A step of `rows` sequences with `context` cached tokens each, all of which are sampled."""
    slots = list(range(rows))
    step = make_step(weights.spec, tables, rows, rows)
    lay_pages(tables, rows, context)
    for name, values in (("slots", slots), ("positions", [context] * rows), ("sample_rows", slots)):
        fill_input(step, name, values)
    fill_input(step, "tokens", [(11 * slot + 5) % weights.spec.vocabulary for slot in slots])
    return step


def prompting(weights: Weights, tables: Tables, tokens: int) -> StepBuffers:
    """A step of one sequence's first `tokens` tokens, of which the last is sampled."""
    step = make_step(weights.spec, tables, tokens, 1, singles=0)
    lay_pages(tables, 1, tokens - 1)
    fill_input(step, "slots", [0] * tokens)
    fill_input(step, "positions", list(range(tokens)))
    fill_input(step, "tokens", [(13 * place) % weights.spec.vocabulary for place in range(tokens)])
    fill_input(step, "sample_rows", [tokens - 1])
    fill_input(step, "tiles", query_tiles(0, tokens, 0, 0))
    return step


def lay_pages(tables: Tables, slots: int, context: int) -> None:
    """The first pages of the memory, each slot's its own as far as they last; what is in them is finite."""
    columns = context // PAGE_TOKENS + 1
    numbers = torch.arange(slots * columns, dtype=torch.int32, device=tables.pages.device)
    tables.pages[:slots, :columns] = (numbers % tables.keys.shape[1]).view(slots, columns)


def spreads(stage: Stage) -> Mapping[str, Any]:
    """The residual stream's spread before each layer of one step: random weights must not let it grow without end."""
    results: list[float] = []

    def spread(layer: Any, step: StepBuffers) -> None:
        results.append(float(step.hidden.float().std(correction=0)))
        stage.kernels.qkv(layer, step)

    step = decoding(stage.weights, stage.tables, 1, 0)
    launch_step(stage.weights, step, replace(stage.kernels, qkv=spread))
    results.append(float(step.hidden.float().std(correction=0)))
    assert bool(step.hidden.isfinite().all()), f"the residual stream is not finite: {results}"
    return {"spread": [round(each, 3) for each in results]}


def touched(weights: Weights, step: StepBuffers, kernels: Kernels, context: int) -> Touched:
    """Run the step once and count the experts that its layers chose."""
    chosen: list[Tensor] = []

    def counted(layer: Any, step: StepBuffers) -> None:
        kernels.project_out(layer, step)
        chosen.append(step.chosen_experts.clone())

    launch_step(weights, step, replace(kernels, project_out=counted))
    experts = sum(map(_different, chosen)) / len(chosen)
    certified = weights.ends.int8_unembedding is not None
    return Touched(weights.spec, len(step.positions), context, experts, prompt=not step.singles, certified=certified)


def kernel_table(stage: Stage, rows: Sequence[int], prompts: Sequence[int]) -> list[Row]:
    """Return each launch function's microseconds. It runs on one layer after the other, so no weights are cached."""
    context = min(1024, stage.tables.pages.shape[1] * PAGE_TOKENS - 1)
    table: list[Row] = []
    for count in rows:
        step = decoding(stage.weights, stage.tables, count, context)
        table += _kernels(stage, step, context)
    for count in prompts:
        table += _kernels(stage, prompting(stage.weights, stage.tables, count), 0)
    return table


def _kernels(stage: Stage, step: StepBuffers, context: int) -> list[Row]:
    """Return the table of one step. Every launch function gets the inputs that it had in the step's last layer."""
    bytes_touched = touched(stage.weights, step, stage.kernels, context)
    bytes_touched = replace(bytes_touched, experts=_different(step.chosen_experts))
    state = {name: each.clone() for name, each in tensors_by_name(step).items() if name != "logits"}
    size, operations = bytes_touched.kernel_bytes(), bytes_touched.kernel_operations()
    table: list[Row] = []
    for name in launched(step):
        for field, each in state.items():
            getattr(step, field).copy_(each)
        row: Row = {"kernel": name, "rows": bytes_touched.rows, "prompt": bytes_touched.prompt}
        try:
            seconds, spread = _launch_s(stage, name, step)
        except Exception as exc:  # noqa: BLE001 - the other kernels' figures are wanted all the same
            table.append(row | failed(exc))
            continue
        read_s, computed_s = size[name] / stage.top.copy, operations.get(name, 0) / stage.top.products
        table.append(
            row
            | {
                "us": 1e6 * seconds,
                "spread_us": 1e6 * spread,
                "GB/s": size[name] / seconds / 1e9,
                "TFLOP/s": operations.get(name, 0) / seconds / 1e12,
                "share": max(read_s, computed_s) / seconds,
            }
        )
    return table


def _launch_s(stage: Stage, name: str, step: StepBuffers) -> tuple[float, float]:
    """Seconds of one launch, and their spread."""
    launch = getattr(stage.kernels, name)
    layers = (stage.weights.ends,) if name in ENDS else stage.weights.layers

    def work() -> None:
        for each in layers:
            launch(each, step)

    times = 10 if stage.device.type == "cuda" else 1
    seconds, spread = timed(graphed(work, stage.device), stage.device, times)
    return seconds / len(layers), spread / len(layers)


def launched(step: StepBuffers) -> list[str]:
    """The launch functions of such a step, in order, as `launch_step` has them."""
    rows = len(step.positions)
    names = ["embed", "qkv"]
    names += ["attend_decode"] if step.singles else []
    names += ["attend_prefill"] if step.singles < rows else []
    names += ["project_out"]
    names += ["route"] if rows > MAX_DECODE_ROWS else []
    names += ["experts_up", "experts_down"] if rows <= MAX_UNGROUPED_ROWS else ["grouped_up", "grouped_down"]
    return [*names, "unembed", "sample"]


def step_table(
    runner: TritonRunner, weights: Weights, kernels: Kernels, sizes: Sequence[tuple[int, int]], top: Ceilings
) -> list[Row]:
    """Whole decoding steps, sampling and the way to the host and back included, for pairs (rows, context)."""
    device = runner.tables.keys.device
    table: list[Row] = []
    for rows, context in sizes:
        pages = -(-(context + 1) // PAGE_TOKENS)
        if context >= runner.context_tokens or rows > runner.slots or rows * pages > runner.page_count:
            continue
        for slot in range(rows):
            runner.open(slot, RowSampling(temperature=1.0, seed=slot), (), ())
        step = decoding(weights, runner.tables, rows, context)
        tokens = tensor_to_list(step.tokens)
        batch = runner.shapes.build_batch([SlotTokens(slot, context, [tokens[slot]], 1) for slot in range(rows)])
        bytes_touched = touched(weights, step, kernels, context)
        times = 10 if device.type == "cuda" else 1
        seconds, spread = timed(lambda batch=batch: runner.steps.launch(batch), device, times)
        limit = bytes_touched.limit_s(top.copy, top.products)
        table.append(
            {
                "rows": rows,
                "context": context,
                "ms": 1e3 * seconds,
                "spread_ms": 1e3 * spread,
                "tokens/s": rows / seconds,
                "experts": bytes_touched.experts,
                "GB": bytes_touched.step_bytes / 1e9,
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
        lay_pages(runner.tables, 1, size - 1)
        tokens = [(13 * place) % weights.spec.vocabulary for place in range(size)]
        batch = runner.shapes.build_batch([SlotTokens(0, 0, tokens, 1)])
        seconds, spread = timed(lambda batch=batch: runner.steps.launch(batch), device)
        certified = weights.ends.int8_unembedding is not None
        all_of_it = Touched(weights.spec, size, 0, weights.spec.experts, prompt=True, certified=certified)
        limit = all_of_it.limit_s(top.copy, top.products)
        table.append(
            {
                "tokens": size,
                "ms": 1e3 * seconds,
                "spread_ms": 1e3 * spread,
                "tokens/s": size / seconds,
                "limit_tokens/s": size / limit,
                "share": limit / seconds,
            }
        )
    return table


def _run_s(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of `times` of it: the device's own, where it has a clock."""
    wait(device)
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(times):
            work()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start


def _different(chosen: Tensor) -> int:
    return len({expert for expert in tensor_to_list(chosen.flatten()) if expert >= 0})
