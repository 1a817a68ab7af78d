"""ScriptedRunner: plays tokens instead of computing them, and asserts the engine's promises about pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from providers.inference.gpt_oss.engine.runner import Plan, PlanRow
from providers.inference.gpt_oss.engine.sampling import RowSampling, SampledToken

TokenScript = Callable[[Sequence[int]], int]
"""Returns the next token of a sequence, from all tokens so far."""


@dataclass(slots=True)
class _OpenSequence:
    """`written_tokens` positions were computed; -1 until the first row says where the sequence starts."""

    prompt_tokens: int
    tokens: list[int]
    digests: list[int] = field(default_factory=list[int])
    written_tokens: int = -1
    pages: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Page, slot and vocabulary sizes of a runner."""

    page_tokens: int = 16
    page_count: int = 1024
    slots: int = 8
    context_tokens: int = 4096
    vocabulary_size: int = 201_088


class ScriptedRunner:
    """A Runner whose memory holds, for each position, a digest of all tokens up to it.

    A row that reads a page of other tokens, or one not yet written, or one that another slot writes to, fails with an
    AssertionError. Where a mask forbids the script's token, the lowest token that it allows is played.
    """

    def __init__(self, script: TokenScript, shape: RunnerShape | None = None) -> None:
        shape = shape or RunnerShape()
        self.page_tokens = shape.page_tokens
        self.page_count = shape.page_count
        self.slots = shape.slots
        self.context_tokens = shape.context_tokens
        self.vocabulary_size = shape.vocabulary_size
        self._script = script
        self._memory: dict[tuple[int, int], int] = {}
        self._open_sequences: dict[int, _OpenSequence] = {}

    def open(self, slot: int, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        assert 0 <= slot < self.slots
        assert slot not in self._open_sequences, f"slot {slot} is opened twice"
        self._open_sequences[slot] = _OpenSequence(len(prompt), [*prompt, *generated])

    def close(self, slot: int) -> None:
        self._open_sequences.pop(slot, None)

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        assert plan.rows
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        widths = [len(row.tokens) > 1 for row in plan.rows]
        assert widths == sorted(widths), "rows of one token come first"
        writers: dict[int, int] = {}
        for row in plan.rows:
            for page in self._written_pages(row):
                assert writers.setdefault(page, row.slot) == row.slot, f"page {page} has two writers"
        for row in plan.rows:
            self._compute(row)
        return {row.slot: self._sample(row, masks.get(row.slot)) for row in plan.rows if row.needs_sample}

    def _written_pages(self, row: PlanRow) -> Sequence[int]:
        first, last = row.start // self.page_tokens, (row.start + len(row.tokens) - 1) // self.page_tokens
        pages = row.pages[first : last + 1]
        for slot, other in self._open_sequences.items():
            if slot != row.slot and other.written_tokens > 0:
                used = other.pages[: -(-other.written_tokens // self.page_tokens)]
                assert not set(used) & set(pages), f"slot {row.slot} writes to a page that slot {slot} reads"
        return pages

    def _compute(self, row: PlanRow) -> None:
        state = self._open_sequences[row.slot]
        assert row.tokens
        assert row.start == state.written_tokens or state.written_tokens < 0, (
            "a row does not begin where the last one ended"
        )
        assert list(row.pages[: len(state.pages)]) == state.pages, "a block table changed"
        end = row.start + len(row.tokens)
        assert end <= min(len(row.pages) * self.page_tokens, self.context_tokens)
        tokens = state.tokens[row.start : end]
        assert list(row.tokens[: len(tokens)]) == tokens, "a row's tokens are not the sequence's"
        state.tokens += row.tokens[len(tokens) :]
        for position in range(len(state.digests), end):
            previous_digest = state.digests[position - 1] if position else 0
            state.digests.append(hash((previous_digest, state.tokens[position])))
        for position in range(row.start):
            assert self._memory.get(self._cell(row, position)) == state.digests[position], f"{position} is not there"
        for position in range(row.start, end):
            self._memory[self._cell(row, position)] = state.digests[position]
        state.written_tokens, state.pages = end, list(row.pages)

    def _cell(self, row: PlanRow, position: int) -> tuple[int, int]:
        page = row.pages[position // self.page_tokens]
        assert 0 <= page < self.page_count
        return page, position % self.page_tokens

    def _sample(self, row: PlanRow, mask: bytes | None) -> SampledToken:
        token = self._script(self._open_sequences[row.slot].tokens)
        if mask is not None and not mask[token // 8] >> token % 8 & 1:
            token = next(candidate for candidate in range(len(mask) * 8) if mask[candidate // 8] >> candidate % 8 & 1)
        return SampledToken(token, 0.0)


def script_from_answers(scripts: Mapping[tuple[int, ...], Sequence[int]], end_token: int) -> TokenScript:
    """Return a script that continues each prompt with its own tokens, then with `end_token` for ever.

    If several prompts match, the longest counts.
    """
    longest_first = sorted(scripts, key=len, reverse=True)

    def next_token(tokens: Sequence[int]) -> int:
        for prompt in longest_first:
            if tuple(tokens[: len(prompt)]) == prompt:
                played = len(tokens) - len(prompt)
                answer = scripts[prompt]
                return answer[played] if played < len(answer) else end_token
        return end_token

    return next_token
