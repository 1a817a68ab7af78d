"""TritonRunner: a Runner whose steps are the Triton kernels, the next one launched while the engine processes the last.

Where every sequence of a plan only goes on, the next step is launched at once, before its tokens are known on the host:
they are read on the device, where sampling stored them. The next plan then finds its rows under way; a row that it does
not have, as the sequence ended, was computed for nothing. A sequence that repeats earlier text (see `prompt_lookup`)
gets drafts instead, each a row of its own; a step returns its accepted drafts and one token more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch

from providers.inference.gpt_oss.checkpoint.checkpoint import ModelCheckpoint, Progress
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow, SampledRun
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken
from providers.inference.gpt_oss.settings import BackendSettings
from providers.inference.gpt_oss.sizing.fit import Precision, weight_bytes
from providers.inference.gpt_oss.sizing.kv_memory import KvRequest, kv_pages
from providers.inference.gpt_oss.torch_backend.machine import free_bytes
from providers.inference.gpt_oss.torch_backend.runner import DTYPES
from providers.inference.gpt_oss.torch_backend.sampler import GREEDY_BELOW, Sampler
from providers.inference.gpt_oss.triton_backend.batch import SlotTokens, StepShapes
from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, TableSizes, make_tables
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON, Kernels
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights, load_weights
from providers.inference.gpt_oss.triton_backend.pages import BlockTables
from providers.inference.gpt_oss.triton_backend.prompt_lookup import MAX_DRAFTS, PromptLookup, step_costs
from providers.inference.gpt_oss.triton_backend.steps import PendingTokens, StepLauncher

MAX_DRAFTING_ROWS: Final = 4
"""Sequences of a step up to which tokens are drafted: a larger step is too dear to lengthen."""


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """`step_tokens` bounds the tokens of a plan. `launch_ahead` launches steps before the engine plans them,
    `use_drafts` lets sequences that repeat themselves return several tokens a step; neither changes any token."""

    kv_request: KvRequest
    step_tokens: int = 2048
    launch_ahead: bool = True
    use_drafts: bool = True


@dataclass(slots=True)
class _SlotState:
    """A sequence. `last_token` was sampled for position `next_position`, -1 where none was. `computed_tokens` stand at
    `computed_start` and after, computed though the engine has not planned them yet."""

    sampling: RowSampling
    is_plain: bool
    lookup: PromptLookup | None
    last_token: int = -1
    next_position: int = -1
    computed_tokens: Sequence[int] = ()
    computed_start: int = 0


@dataclass(slots=True)
class _StepInFlight:
    """A step that runs or has ended. `slot_tokens` are those whose tokens `pending` has, in its order."""

    slot_tokens: Sequence[SlotTokens]
    pending: PendingTokens
    sampled_tokens: Mapping[int, SampledToken] = field(default_factory=dict[int, SampledToken])


def load_triton_runner(
    checkpoint: ModelCheckpoint,
    device: torch.device,
    settings: BackendSettings,
    progress: Callable[[Progress], None] | None = None,
) -> "TritonRunner":
    """Load, repack and compile, after `find_triton_obstacle` and the probe have passed. Raises ConfigError as they
    do."""
    torch_settings = settings.torch
    kv_request = KvRequest(torch_settings.slots, torch_settings.context_tokens, torch_settings.kv_memory_gib)
    spec, itemsize = checkpoint.spec, DTYPES[torch_settings.dtype].itemsize
    remaining_bytes = free_bytes(device) - weight_bytes(spec, Precision(itemsize, experts_packed=True))
    kv_pages(
        spec, kv_request, spec.kv_bytes(itemsize) * PAGE_TOKENS, PAGE_TOKENS, remaining_bytes
    )  # else the error comes after minutes
    with torch.inference_mode():
        weights = load_weights(
            checkpoint, device, DTYPES[torch_settings.dtype], progress, certified_head=settings.certified_head
        )
    return TritonRunner(weights, TritonSettings(kv_request, settings.step_tokens))


class TritonRunner:
    """Implements Runner. One thread at a time may call it. On a CPU kernels must be interpreted, or be references."""

    page_tokens = PAGE_TOKENS

    def __init__(self, weights: Weights, settings: TritonSettings, kernels: Kernels = TRITON) -> None:
        """Compile and capture all that steps need: seconds, or minutes the first time on a machine.

        Raises ConfigError when the memory for keys and values holds no useful context.
        """
        spec, embedding = weights.spec, weights.ends.embedding
        self._device, dtype = embedding.device, embedding.dtype
        self.settings = settings
        self.slots = settings.kv_request.slots
        self.vocabulary_size = spec.vocabulary
        self.certified_head = weights.ends.int8_unembedding is not None
        page_bytes = spec.kv_bytes(dtype.itemsize) * PAGE_TOKENS
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator's cache after loading would count as used
        free = free_bytes(self._device)
        self.page_count, self.context_tokens = kv_pages(spec, settings.kv_request, page_bytes, PAGE_TOKENS, free)
        pages = self.page_count + self.slots
        self.kv_bytes = pages * page_bytes
        self._slots: dict[int, _SlotState] = {}
        self._step_ahead: _StepInFlight | None = None
        self._sampler = Sampler(spec.vocabulary, self._device)
        self.shapes = StepShapes(self.slots, settings.step_tokens)
        self._step_costs = step_costs(spec, MAX_DRAFTING_ROWS + MAX_DRAFTS)
        with torch.inference_mode(), self._on_device():
            self.tables = make_tables(spec, TableSizes(self.slots, self.context_tokens, pages, dtype, self._device))
            self._block_tables = BlockTables(self.tables.pages, self.page_count)
            self.steps = StepLauncher(weights, self.tables, self.shapes, kernels)
            if self._device.type == "cuda":
                self.steps.warm_up(self.shapes.all_shapes())

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        plain = _is_plain(sampling)
        lookup = PromptLookup([*prompt, *generated]) if plain and self.settings.use_drafts else None
        self._slots[slot] = _SlotState(sampling, plain, lookup)
        self._block_tables.open(slot)
        self._sampler.open(slot, sampling, prompt, generated)
        with torch.inference_mode():
            self.tables.temperatures[slot].fill_(sampling.temperature)
            self.tables.seeds[slot].fill_((sampling.seed + 2**63) % 2**64 - 2**63)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._sampler.close(slot)

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        """Raises FloatingPointError when a sampled row's logits are not numbers."""
        with torch.inference_mode(), self._on_device():
            return self._run_step(plan.rows, masks)

    def _run_step(self, rows: Sequence[PlanRow], masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        in_flight, self._step_ahead = self._step_ahead, None
        starts_in_flight = {line.slot: line.start for line in in_flight.slot_tokens} if in_flight else {}
        continued_slots: set[int] = set()
        lines: list[SlotTokens] = []
        for row in rows:
            self._update_slot(row)
            if starts_in_flight.get(row.slot) == row.start and self._is_continuation(row) and row.slot not in masks:
                continued_slots.add(row.slot)
            elif (line := self._build_slot_tokens(row, masks, len(rows))) is not None:
                lines.append(line)
        launched = self._launch(lines, masks) if lines else None
        if self.settings.launch_ahead:
            self._step_ahead = self._launch_next_step(rows, masks, lines)
        sampled_tokens = self._collect_tokens(in_flight, continued_slots) if in_flight and continued_slots else {}
        if launched is not None:
            sampled_tokens |= self._collect_tokens(launched, {line.slot for line in lines})
        return sampled_tokens

    def _update_slot(self, row: PlanRow) -> None:
        """Update the slot's block table, penalties and lookup from a row, before it is computed."""
        state = self._slots[row.slot]
        self._block_tables.grow(row.slot, row.pages)
        self._sampler.count(row.slot, row.start, row.tokens)
        if state.lookup is not None:
            state.lookup.extend(row.start, row.tokens)

    def _is_continuation(self, row: PlanRow) -> bool:
        """Return whether the row is the token that was sampled last, to be followed by the next."""
        state = self._slots[row.slot]
        return row.needs_sample and row.start == state.next_position and list(row.tokens) == [state.last_token]

    def _build_slot_tokens(self, row: PlanRow, masks: Mapping[int, bytes], rows: int) -> SlotTokens | None:
        """Return the tokens of a row to compute, with drafts after them where they pay; None if all are computed."""
        state = self._slots[row.slot]
        start, tokens = row.start, list(row.tokens)
        if start == state.computed_start:
            computed_count = 0
            while (
                computed_count < min(len(state.computed_tokens), len(tokens) - row.needs_sample)
                and state.computed_tokens[computed_count] == tokens[computed_count]
            ):
                computed_count += 1
            state.computed_tokens = state.computed_tokens[computed_count:]
            state.computed_start += computed_count
            start, tokens = start + computed_count, tokens[computed_count:]
        if not tokens:
            return None
        if not row.needs_sample or not state.is_plain or row.slot in masks:
            return SlotTokens(row.slot, start, tokens, int(row.needs_sample), needs_logits=row.needs_sample)
        drafts = self._propose_drafts(state, start, rows) if len(tokens) == 1 else ()
        if drafts:
            self._block_tables.reserve_position(row.slot, start + len(drafts))
        return SlotTokens(row.slot, start, [*tokens, *drafts], 1 + len(drafts))

    def _propose_drafts(self, state: _SlotState, start: int, rows: int) -> Sequence[int]:
        if state.lookup is None or rows > MAX_DRAFTING_ROWS:
            return ()
        count = min(state.lookup.best_draft_count(self._step_costs, rows), self.context_tokens - start - 1)
        return state.lookup.propose_drafts(count)

    def _launch(self, slot_tokens: Sequence[SlotTokens], masks: Mapping[int, bytes]) -> _StepInFlight:
        self._block_tables.write_tables()
        batch = self.shapes.build_batch(slot_tokens)
        pending = self.steps.launch(batch)
        logit_slots = [(line.slot, line.start + len(line.tokens)) for line in slot_tokens if line.needs_logits]
        plain = [line for line in slot_tokens if line.sample_count and not line.needs_logits]
        if not logit_slots:
            return _StepInFlight(plain, pending)
        return _StepInFlight(plain, pending, self._sampler.sample(self.steps.logits(batch), logit_slots, masks))

    def _launch_next_step(
        self, rows: Sequence[PlanRow], masks: Mapping[int, bytes], slot_tokens: Sequence[SlotTokens]
    ) -> _StepInFlight | None:
        """Launch the step after this one, of all its rows. Returns None where a row must wait for its token, or has
        drafts, or where a prompt goes on: it is better computed together with the other rows' tokens."""
        if any(line.sample_count > 1 for line in slot_tokens):
            return None
        ahead: list[SlotTokens] = []
        for row in rows:
            state, position = self._slots[row.slot], row.start + len(row.tokens)
            if (
                not row.needs_sample
                or not state.is_plain
                or row.slot in masks
                or self._propose_drafts(state, position, len(rows))
            ):
                return None
            if position < self.context_tokens:
                self._block_tables.reserve_position(row.slot, position)
                ahead.append(SlotTokens(row.slot, position, (-1,), 1))
        return self._launch(ahead, {}) if ahead else None

    def _collect_tokens(self, flight: _StepInFlight, slots: set[int]) -> dict[int, SampledToken]:
        """Return the tokens of a step's `slots`, when it has ended."""
        collected = dict(flight.sampled_tokens)
        ids = flight.pending.wait()
        at = 0
        for line in flight.slot_tokens:
            line_ids = ids[at : at + line.sample_count]
            at += line.sample_count
            if line.slot in slots:
                collected[line.slot] = self._accept_drafts(line, line_ids)
        return collected

    def _accept_drafts(self, slot_tokens: SlotTokens, sampled_ids: Sequence[int]) -> SampledToken:
        state = self._slots[slot_tokens.slot]
        drafts = slot_tokens.tokens[len(slot_tokens.tokens) - slot_tokens.sample_count + 1 :]
        accepted_count = 0
        while accepted_count < len(drafts) and drafts[accepted_count] == sampled_ids[accepted_count]:
            accepted_count += 1
        if min(sampled_ids[: accepted_count + 1]) < 0:
            raise FloatingPointError("the model's logits are not finite")
        first = slot_tokens.start + len(slot_tokens.tokens) - len(drafts)
        state.last_token, state.next_position = sampled_ids[accepted_count], first + accepted_count
        if drafts:
            assert state.lookup is not None
            state.lookup.record_drafts(len(drafts), accepted_count)
            state.computed_tokens, state.computed_start = sampled_ids[:accepted_count], first
        return (
            SampledRun(
                sampled_ids[0], following_tokens=[SampledToken(token) for token in sampled_ids[1 : accepted_count + 1]]
            )
            if accepted_count
            else SampledToken(sampled_ids[0])
        )

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _is_plain(sampling: RowSampling) -> bool:
    """Return whether the kernel can sample it: by temperature alone."""
    filters = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    filtered = filters and sampling.temperature >= GREEDY_BELOW  # they always leave the best
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return not (filtered or sampling.logit_bias or sampling.logprobs is not None) and penalties == (0.0, 0.0, 1.0)
