"""TorchRunner: a Runner in plain torch, on a CPU or a GPU. A reference that is quick enough for small models."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from apis.errors import ConfigError
from providers.common.machine import usable_cores
from providers.inference.gpt_oss.checkpoint.checkpoint import ModelCheckpoint, Progress, open_checkpoint
from providers.inference.gpt_oss.checkpoint.spec import LayerKind
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.sizing.fit import Precision, assess_fit
from providers.inference.gpt_oss.sizing.kv_memory import KvRequest, kv_pages
from providers.inference.gpt_oss.torch_backend.attention import (
    PAGE_TOKENS,
    AttentionGroup,
    AttentionGrouping,
    AttentionPlan,
    PageMemory,
    TokenSpan,
)
from providers.inference.gpt_oss.torch_backend.machine import free_bytes, measure_device
from providers.inference.gpt_oss.torch_backend.model import Placement, TorchBatch, TorchModel
from providers.inference.gpt_oss.torch_backend.sampler import Sampler

DtypeName = Literal["bfloat16", "float32", "float64"]

DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
MIN_MEASURED_BYTES: Final = 2**30
"""A checkpoint of fewer bytes runs anywhere, and is not worth a measurement."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """`device` auto takes a GPU where there is one. `threads` None leaves one core to the event loop.

    `kv_memory_gib` None takes the need of `slots` sequences of `context_tokens`, or else most of the free memory;
    `context_tokens` None takes the model's own, or as much of it as there is memory for. `run_anyway` overrides the
    refusal of a machine that is too small or too slow.
    """

    device: str = "auto"
    dtype: DtypeName = "bfloat16"
    threads: int | None = None
    slots: int = 32
    context_tokens: int | None = None
    kv_memory_gib: float | None = None
    scratch_mib: int = 128
    run_anyway: bool = False


def load_runner(
    path: str | Path, settings: TorchSettings, progress: Callable[[Progress], None] | None = None
) -> "TorchRunner":
    """Open, check and load a checkpoint. Sets the process's torch threads.

    Raises ConfigError: for a damaged checkpoint (naming file and tensor), a device that does not exist, a machine that
    is too small or too slow for the model, or too little memory for the context (saying what to lower).
    """
    torch.set_num_threads(settings.threads or max(1, usable_cores() - 1))
    device = find_device(settings.device)
    checkpoint = open_checkpoint(path)
    if not settings.run_anyway:
        _check_fit(checkpoint, device, DTYPES[settings.dtype])
    with torch.inference_mode():
        model = TorchModel(checkpoint, Placement(device, DTYPES[settings.dtype]), progress)
        return TorchRunner(model, settings)


class TorchRunner:
    """Implements Runner. One thread at a time may call it."""

    page_tokens = PAGE_TOKENS

    def __init__(self, model: TorchModel, settings: TorchSettings) -> None:
        """Raises ConfigError when the memory for keys and values holds no useful context."""
        self._model = model
        self._device, dtype = model.placement.device, model.placement.dtype
        self.slots = settings.slots
        self.vocabulary_size = model.spec.vocabulary
        kv_request = KvRequest(settings.slots, settings.context_tokens, settings.kv_memory_gib)
        page_bytes = model.spec.kv_bytes(dtype.itemsize) * PAGE_TOKENS
        free = free_bytes(self._device)
        self.page_count, self.context_tokens = kv_pages(model.spec, kv_request, page_bytes, PAGE_TOKENS, free)
        self.memory = PageMemory(model.spec, self.page_count, dtype, self._device)
        self.kv_bytes = self.memory.keys.nbytes + self.memory.values.nbytes
        self._grouping = AttentionGrouping(model.spec, dtype.itemsize, settings.scratch_mib * 2**20)
        self._sampler = Sampler(model.spec.vocabulary, self._device)
        self._tables = torch.zeros(
            settings.slots, -(-self.context_tokens // PAGE_TOKENS), dtype=torch.int64, device=self._device
        )
        self._listed_page_counts = [0] * settings.slots

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._listed_page_counts[slot] = 0
        self._sampler.open(slot, sampling, prompt, generated)

    def close(self, slot: int) -> None:
        self._sampler.close(slot)

    @torch.inference_mode()
    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        """Raises FloatingPointError when a sampled row's logits are not numbers."""
        logits = self._model.forward(self._build_batch(plan.rows), self.memory)
        for row in plan.rows:
            self._sampler.count(row.slot, row.start, row.tokens)
        sampled = [(row.slot, row.start + len(row.tokens)) for row in plan.rows if row.needs_sample]
        return self._sampler.sample(logits, sampled, masks) if sampled else {}

    def _build_batch(self, rows: Sequence[PlanRow]) -> TorchBatch:
        tokens, slots, positions, last = array("q"), array("q"), array("q"), array("q")
        new_pages: list[int] = []
        for row in rows:
            count = len(row.tokens)
            end = row.start + count
            self._update_block_table(row)
            tokens.extend(iter(row.tokens))  # an array extends no array of another width
            slots.extend([row.slot] * count)
            positions.extend(range(row.start, end))
            new_pages.extend(row.pages[-(-row.start // PAGE_TOKENS) : -(-end // PAGE_TOKENS)])
            if row.needs_sample:
                last.append(len(tokens) - 1)
        if new_pages:
            self.memory.clear_pages(torch.tensor(new_pages, device=self._device))
        ids, row_slots, at = torch.stack(
            [torch.frombuffer(column, dtype=torch.int64) for column in (tokens, slots, positions)]
        ).to(self._device)
        kv_offsets = self._tables[row_slots, at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        sampled = torch.tensor(last, dtype=torch.int64, device=self._device)
        return TorchBatch(ids, at, kv_offsets, sampled, self._plan_attention(rows, row_slots, at))

    def _update_block_table(self, row: PlanRow) -> None:
        """Bring the slot's block table up to date."""
        listed, count = self._listed_page_counts[row.slot], len(row.pages)
        if count <= listed:
            return
        if listed == 0:
            # Columns that are not the row's are read too, with a weight of zero: they must be its own pages.
            self._tables[row.slot].fill_(row.pages[0])
        self._tables[row.slot, listed:count] = torch.tensor(row.pages[listed:count], device=self._device)
        self._listed_page_counts[row.slot] = count

    def _plan_attention(
        self, rows: Sequence[PlanRow], slots: Tensor, positions: Tensor
    ) -> dict[LayerKind, AttentionPlan]:
        singles = next((index for index, row in enumerate(rows) if len(row.tokens) > 1), len(rows))
        spans: list[TokenSpan] = []
        first = singles
        for row in rows[singles:]:
            spans.append(TokenSpan(first, first + len(row.tokens), row.start, self._tables[row.slot]))
            first += len(row.tokens)
        longest = max((row.start for row in rows[:singles]), default=0) // PAGE_TOKENS + 1
        tables = self._tables[:, :longest].index_select(0, slots[:singles])
        kinds: tuple[tuple[LayerKind, int | None], ...] = (
            ("full_attention", None),
            ("sliding_attention", self._model.spec.window),
        )
        plans: dict[LayerKind, AttentionPlan] = {}
        for kind, window in kinds:
            groups: list[AttentionGroup] = (
                list(self._grouping.group_single_tokens(tables, positions[:singles], window)) if singles else []
            )
            for span in spans:
                groups.extend(self._grouping.group_span(span, window))
            plans[kind] = AttentionPlan(window, groups)
        return plans


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is not one that torch knows. Use auto, cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not supported. Use auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs. Use auto or cpu."
        )
    return device


def _check_fit(checkpoint: ModelCheckpoint, device: torch.device, dtype: torch.dtype) -> None:
    if sum(tensor.nbytes for tensor in checkpoint.stored_tensors.values()) < MIN_MEASURED_BYTES:
        return
    report = assess_fit(
        checkpoint.spec, Precision(dtype.itemsize, checkpoint.experts_packed), measure_device(device, dtype)
    )
    if report.refusal is not None:
        raise ConfigError(f"{checkpoint.folder}: {report.refusal}")
