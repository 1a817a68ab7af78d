"""Stepper: computes steps for tokens of many sequences with any launch functions, and returns logits and tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from providers.inference.gpt_oss.checkpoint.checkpoint import open_checkpoint
from providers.inference.gpt_oss.triton_backend.kernels.buffers import (
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
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights, load_weights
from tests.support.models.kernel_references import REFERENCE, fill_input

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """Tokens of a slot's sequence after the `start` that are computed. A token of -1 is the one sampled last."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass
class Stepper:
    """Drives steps by hand. Pages are allocated scattered; memory is full of NaN."""

    weights: Weights
    tables: Tables
    kernels: Kernels
    alone_rows: int
    pages: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def step(self, runs: Sequence[Asked], *, padding: int = 0) -> StepBuffers:
        """Compute all of it in one step, those of one token first, with `padding` rows of padding after those."""
        ordered = sorted(runs, key=lambda run: len(run.tokens) > 1)
        singles = sum(len(run.tokens) == 1 for run in ordered) + padding
        rows: list[tuple[int, int, int]] = []
        samples: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        for run in ordered:
            if len(run.tokens) > 1:
                rows += [(0, -1, -1)] * (singles - len(rows))
                tiles += query_tiles(len(rows), len(run.tokens), run.slot, run.start)
            self._grow(run.slot, run.start + len(run.tokens))
            rows += [(run.slot, run.start + place, token) for place, token in enumerate(run.tokens)]
            samples.append(len(rows) - 1)
        rows += [(0, -1, -1)] * (singles - len(rows))
        step = make_step(self.weights.spec, self.tables, len(rows), len(samples) + padding, singles)
        for name, value in zip(("slots", "positions", "tokens"), zip(*rows, strict=True), strict=True):
            fill_input(step, name, value)
        fill_input(step, "tiles", tiles)
        fill_input(step, "sample_rows", samples)
        poison(step)
        launch_step(self.weights, step, self.kernels, ungrouped_rows=self.alone_rows)
        return step

    def logits(self, runs: Sequence[Asked], *, padding: int = 0) -> Tensor:
        step = self.step(runs, padding=padding)
        self.kernels.unembed(self.weights.ends, step)
        return step.logits[: len(runs)].clone()

    def sampled(self, runs: Sequence[Asked], *, padding: int = 0) -> Mapping[int, int]:
        """Return the chosen tokens by slot."""
        step = self.step(runs, padding=padding)
        self.kernels.sample(self.weights.ends, step)
        ordered = sorted(runs, key=lambda run: len(run.tokens) > 1)
        return {run.slot: token for run, token in zip(ordered, tensor_to_list(step.sampled_tokens), strict=False)}

    def _grow(self, slot: int, tokens: int) -> None:
        slot_pages = self.pages.setdefault(slot, [])
        used = sum(len(allocated) for allocated in self.pages.values())
        while len(slot_pages) * PAGE_TOKENS < tokens:
            # 7 has no factor in common with the page counts used here, so this visits every page once.
            slot_pages.append(used * 7 % self.tables.keys.shape[1])
            used += 1
            self.tables.pages[slot, len(slot_pages) - 1] = slot_pages[-1]


def poison(step: StepBuffers) -> None:
    """Fill the step's outputs with NaN."""
    for name in ("hidden", "normed_hidden", "queries", "attention_output", "shares", "inner", "logits", "partials"):
        getattr(step, name).fill_(torch.nan)
    for name in ("chosen_experts", "order", "starts", "sampled_tokens"):
        getattr(step, name).fill_(1_000_003)


def stepper(
    folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels = REFERENCE, alone_rows: int = MAX_UNGROUPED_ROWS
) -> Stepper:
    """Return a Stepper for a checkpoint, with 8 slots of 1,024 tokens."""
    torch.set_num_threads(1)
    weights = load_weights(open_checkpoint(folder), CPU, dtype)
    tables = make_tables(
        weights.spec, TableSizes(slots=8, context_tokens=1024, pages=8 * 64 + 1, dtype=dtype, device=CPU)
    )
    tables.keys.fill_(torch.nan)
    tables.values.fill_(torch.nan)
    return Stepper(weights, tables, kernels, alone_rows)
