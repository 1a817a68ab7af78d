"""TritonRunner: a Runner whose steps are our own kernels, the next one launched while the engine takes in the last.

Where every sequence of a plan only goes on, the step behind it is launched at once, before anyone knows its tokens:
they are read on the device, where sampling left them. The next plan then finds its rows under way; a row that it does
not have, as the sequence ended, was computed for nothing. A sequence that repeats what it has had (see `lookup`) is
given guesses instead, each a row of its own, and gets as many tokens at once as were right, and one more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch

from providers.inference.gpt_oss.backend import BackendSettings
from providers.inference.gpt_oss.checkpoint.checkpoint import Checkpoint, Progress
from providers.inference.gpt_oss.engine.runner import Plan, Row, Run
from providers.inference.gpt_oss.engine.sampling import RowSampling, Sampled
from providers.inference.gpt_oss.sizing.fit import Precision, weight_bytes
from providers.inference.gpt_oss.sizing.kv_memory import Wanted, page_room
from providers.inference.gpt_oss.torch_backend.machine import free_bytes
from providers.inference.gpt_oss.torch_backend.runner import DTYPES
from providers.inference.gpt_oss.torch_backend.sampler import GREEDY_BELOW, Sampler
from providers.inference.gpt_oss.triton_backend.batch import Line, Shapes
from providers.inference.gpt_oss.triton_backend.kernels.buffers import PAGE_TOKENS, Room, make_tables
from providers.inference.gpt_oss.triton_backend.kernels.step import TRITON, Kernels
from providers.inference.gpt_oss.triton_backend.kernels.weights import Weights, load_weights
from providers.inference.gpt_oss.triton_backend.pages import BlockTables
from providers.inference.gpt_oss.triton_backend.prompt_lookup import MOST_DRAFTS, Lookup, step_costs
from providers.inference.gpt_oss.triton_backend.steps import Pending, Steps

GUESSED_ROWS: Final = 4
"""Guesses are made in steps of so many sequences at most: beyond it a step is too dear to lengthen."""


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """`step_tokens` is the most that a plan has. `ahead` launches steps before they are asked for, `guesses` lets
    sequences that repeat themselves make several tokens a step; neither changes any token."""

    room: Wanted
    step_tokens: int = 2048
    ahead: bool = True
    guesses: bool = True


@dataclass(slots=True)
class _Slot:
    """A sequence. `last` was sampled for position `next`, -1 where none was. `known` tokens stand at `known_at` and
    behind, computed though the engine has not asked for them yet."""

    sampling: RowSampling
    plain: bool
    lookup: Lookup | None
    last: int = -1
    next: int = -1
    known: Sequence[int] = ()
    known_at: int = 0


@dataclass(slots=True)
class _Flight:
    """A step under way, or done. `lines` are those whose tokens `pending` has, in its order."""

    lines: Sequence[Line]
    pending: Pending
    chosen: Mapping[int, Sampled] = field(default_factory=dict[int, Sampled])


def load_triton_runner(
    checkpoint: Checkpoint,
    device: torch.device,
    settings: BackendSettings,
    progress: Callable[[Progress], None] | None = None,
) -> "TritonRunner":
    """Load, repack and compile, where the backend's checks found nothing wrong. Raises ConfigError as they do."""
    asked = settings.torch
    room = Wanted(asked.slots, asked.context_tokens, asked.kv_memory_gib)
    spec, itemsize = checkpoint.spec, DTYPES[asked.dtype].itemsize
    left = free_bytes(device) - weight_bytes(spec, Precision(itemsize, packed=True))
    page_room(spec, room, spec.kv_bytes(itemsize) * PAGE_TOKENS, PAGE_TOKENS, left)  # or it is said after minutes
    with torch.inference_mode():
        weights = load_weights(checkpoint, device, DTYPES[asked.dtype], progress, certified=settings.certified_head)
    return TritonRunner(weights, TritonSettings(room, settings.step_tokens))


class TritonRunner:
    """Implements Runner. One thread at a time may call it. On a CPU kernels must be interpreted, or be references."""

    page_tokens = PAGE_TOKENS

    def __init__(self, weights: Weights, settings: TritonSettings, kernels: Kernels = TRITON) -> None:
        """Compiles and captures all that steps need: seconds, or minutes the first time on a machine.

        Raises ConfigError when the memory for keys and values holds no useful context.
        """
        spec, embedding = weights.spec, weights.ends.embedding
        self._device, dtype = embedding.device, embedding.dtype
        self.settings = settings
        self.slots = settings.room.slots
        self.vocabulary_size = spec.vocabulary
        self.certified_head = weights.ends.narrow is not None
        page_bytes = spec.kv_bytes(dtype.itemsize) * PAGE_TOKENS
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # loading left much of it, which would count as taken
        free = free_bytes(self._device)
        self.page_count, self.context_tokens = page_room(spec, settings.room, page_bytes, PAGE_TOKENS, free)
        pages = self.page_count + self.slots
        self.kv_bytes = pages * page_bytes
        self._slots: dict[int, _Slot] = {}
        self._ahead: _Flight | None = None
        self._sampler = Sampler(spec.vocabulary, self._device)
        self.shapes = Shapes(self.slots, settings.step_tokens)
        self._costs = step_costs(spec, GUESSED_ROWS + MOST_DRAFTS)
        with torch.inference_mode(), self._on_device():
            self.tables = make_tables(spec, Room(self.slots, self.context_tokens, pages, dtype, self._device))
            self._blocks = BlockTables(self.tables.pages, self.page_count)
            self.steps = Steps(weights, self.tables, self.shapes, kernels)
            if self._device.type == "cuda":
                self.steps.warm_up(self.shapes.all())

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        plain = _is_plain(sampling)
        lookup = Lookup([*prompt, *generated]) if plain and self.settings.guesses else None
        self._slots[slot] = _Slot(sampling, plain, lookup)
        self._blocks.open(slot)
        self._sampler.open(slot, sampling, prompt, generated)
        with torch.inference_mode():
            self.tables.temperatures[slot].fill_(sampling.temperature)
            self.tables.seeds[slot].fill_((sampling.seed + 2**63) % 2**64 - 2**63)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._sampler.close(slot)

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, Sampled]:
        """Raises FloatingPointError when a sampled row's logits are not numbers."""
        with torch.inference_mode(), self._on_device():
            return self._step(plan.rows, masks)

    def _step(self, rows: Sequence[Row], masks: Mapping[int, bytes]) -> Mapping[int, Sampled]:
        flown, self._ahead = self._ahead, None
        under_way = {line.slot: line.start for line in flown.lines} if flown else {}
        taken: set[int] = set()
        lines: list[Line] = []
        for row in rows:
            self._learn(row)
            if under_way.get(row.slot) == row.start and self._goes_on(row) and row.slot not in masks:
                taken.add(row.slot)
            elif (line := self._line(row, masks, len(rows))) is not None:
                lines.append(line)
        flight = self._launch(lines, masks) if lines else None
        if self.settings.ahead:
            self._ahead = self._launch_ahead(rows, masks, lines)
        found = self._finish(flown, taken) if flown and taken else {}
        if flight is not None:
            found |= self._finish(flight, {line.slot for line in lines})
        return found

    def _learn(self, row: Row) -> None:
        """What a row tells of its sequence, before it is computed."""
        state = self._slots[row.slot]
        self._blocks.grow(row.slot, row.pages)
        self._sampler.count(row.slot, row.start, row.tokens)
        if state.lookup is not None:
            state.lookup.extend(row.start, row.tokens)

    def _goes_on(self, row: Row) -> bool:
        """Whether the row is the token that was sampled last, to be followed by the next."""
        state = self._slots[row.slot]
        return row.samples and row.start == state.next and list(row.tokens) == [state.last]

    def _line(self, row: Row, masks: Mapping[int, bytes], rows: int) -> Line | None:
        """What is to compute of a row, with guesses behind it where they are worth it; None if nothing is."""
        state = self._slots[row.slot]
        start, tokens = row.start, list(row.tokens)
        if start == state.known_at:
            known = 0
            while known < min(len(state.known), len(tokens) - row.samples) and state.known[known] == tokens[known]:
                known += 1
            state.known, state.known_at = state.known[known:], state.known_at + known
            start, tokens = start + known, tokens[known:]
        if not tokens:
            return None
        if not row.samples or not state.plain or row.slot in masks:
            return Line(row.slot, start, tokens, int(row.samples), asks=row.samples)
        drafts = self._drafts(state, start, rows) if len(tokens) == 1 else ()
        if drafts:
            self._blocks.reach(row.slot, start + len(drafts))
        return Line(row.slot, start, [*tokens, *drafts], 1 + len(drafts))

    def _drafts(self, state: _Slot, start: int, rows: int) -> Sequence[int]:
        if state.lookup is None or rows > GUESSED_ROWS:
            return ()
        count = min(state.lookup.worth(self._costs, rows), self.context_tokens - start - 1)
        return state.lookup.drafts(count)

    def _launch(self, lines: Sequence[Line], masks: Mapping[int, bytes]) -> _Flight:
        self._blocks.flush()
        batch = self.shapes.batch(lines)
        pending = self.steps.launch(batch)
        asking = [(line.slot, line.start + len(line.tokens)) for line in lines if line.asks]
        plain = [line for line in lines if line.sampled and not line.asks]
        if not asking:
            return _Flight(plain, pending)
        return _Flight(plain, pending, self._sampler.sample(self.steps.logits(batch), asking, masks))

    def _launch_ahead(self, rows: Sequence[Row], masks: Mapping[int, bytes], lines: Sequence[Line]) -> _Flight | None:
        """The step behind this one, of all its rows; None where one of them must wait for its token, or would rather
        guess, or where a prompt goes on: that is better computed together with the others' tokens."""
        if any(line.sampled > 1 for line in lines):
            return None
        ahead: list[Line] = []
        for row in rows:
            state, position = self._slots[row.slot], row.start + len(row.tokens)
            if not row.samples or not state.plain or row.slot in masks or self._drafts(state, position, len(rows)):
                return None
            if position < self.context_tokens:
                self._blocks.reach(row.slot, position)
                ahead.append(Line(row.slot, position, (-1,), 1))
        return self._launch(ahead, {}) if ahead else None

    def _finish(self, flight: _Flight, slots: set[int]) -> dict[int, Sampled]:
        """The tokens of a step's `slots`, when it has ended."""
        found = dict(flight.chosen)
        ids = flight.pending.wait()
        at = 0
        for line in flight.lines:
            made = ids[at : at + line.sampled]
            at += line.sampled
            if line.slot in slots:
                found[line.slot] = self._absorb(line, made)
        return found

    def _absorb(self, line: Line, made: Sequence[int]) -> Sampled:
        state = self._slots[line.slot]
        drafts = line.tokens[len(line.tokens) - line.sampled + 1 :]
        right = 0
        while right < len(drafts) and drafts[right] == made[right]:
            right += 1
        if min(made[: right + 1]) < 0:
            raise FloatingPointError("the model's logits are not finite")
        first = line.start + len(line.tokens) - len(drafts)
        state.last, state.next = made[right], first + right
        if drafts:
            assert state.lookup is not None
            state.lookup.learn(len(drafts), right)
            state.known, state.known_at = made[:right], first
        return Run(made[0], more=[Sampled(token) for token in made[1 : right + 1]]) if right else Sampled(made[0])

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _is_plain(sampling: RowSampling) -> bool:
    """Whether the kernel samples it: by temperature alone."""
    filters = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    filtered = filters and sampling.temperature >= GREEDY_BELOW  # they always leave the best
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return not (filtered or sampling.logit_bias or sampling.logprobs is not None) and penalties == (0.0, 0.0, 1.0)
