"""Scheduler: chooses the tokens that the next step computes. Policy only: it knows neither torch nor threads.

Every sequence that decodes gets its row in every step; the rest of the step's token budget goes to prompts, in chunks.
Tenants take turns by the number of tokens served so far, a tenant's sequences by rank: arrival, moved by priority. When
pages run out, unlocked prefixes are evicted first; then the youngest sequence of the tenant that runs most is paused.
Its pages go into the prefix tree, so that resuming it matches them again if they were not evicted meanwhile.
"""

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from apis.errors import ConfigError
from providers.inference.gpt_oss.engine.pages import PagePool
from providers.inference.gpt_oss.engine.prefix import RadixTree
from providers.inference.gpt_oss.engine.runner import Plan, PlanRow, Runner
from providers.inference.gpt_oss.engine.sequence import NO_RANK, Rank, TokenSequence

PRIORITY_ARRIVALS = 64
MIN_CHUNK_TOKENS = 64

QueueEntry = tuple[Rank, TokenSequence]


@dataclass(slots=True)
class Tenant:
    """`served_tokens` counts computed tokens; `waiting_entries` are in order of rank. Removed when it has no
    sequence."""

    served_tokens: int
    waiting_entries: list[QueueEntry] = field(default_factory=list[QueueEntry])
    running_sequences: dict[TokenSequence, None] = field(default_factory=dict[TokenSequence, None])


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Work for the runner: slots to close, sequences to open, and a plan whose rows belong to `sequences`, in order."""

    closed_slots: list[int]
    opened_sequences: list[TokenSequence]
    plan: Plan
    sequences: list[TokenSequence]


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start: computed tokens, prompt tokens reused from prefixes instead (`hit_tokens`), sequences
    paused."""

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    pauses: int = 0


class Scheduler:
    """Call `plan`, have the step computed, then `complete_step`; between steps `add` and `remove` sequences."""

    def __init__(self, runner: Runner, step_tokens: int) -> None:
        """`step_tokens` bounds the tokens of a step. Raises ConfigError when that is less than the runner's slots."""
        if step_tokens < runner.slots:
            raise ConfigError(f"step_tokens is {step_tokens}; it must be at least the number of slots, {runner.slots}.")
        self.counts = SchedulerCounts()
        self.limit = min(runner.context_tokens, runner.page_count * runner.page_tokens)
        self._page_tokens = runner.page_tokens
        self._page_count = runner.page_count
        self._slot_count = runner.slots
        self._step_tokens = step_tokens
        self._tenants: dict[str, Tenant] = {}
        self._arrivals = 0
        self.reset()

    def reset(self) -> None:
        """Drop all pages, as their content is not trusted any more. Running sequences wait again and are recomputed.
        Closes every slot."""
        tenants, self._tenants = self._tenants, {}
        self.pool = PagePool(self._page_count)
        self.tree = RadixTree(self._page_tokens)
        self._free_slots = list(range(self._slot_count - 1, -1, -1))
        self._closed_slots = list(range(self._slot_count))
        self._prefill_sequences: dict[TokenSequence, None] = {}
        self._decode_sequences: dict[TokenSequence, None] = {}
        self._opened_sequences: list[TokenSequence] = []
        self._is_starved = False
        self.waiting_count = 0
        for tenant in tenants.values():
            for sequence in [*tenant.running_sequences, *(waiting for _, waiting in tenant.waiting_entries)]:
                sequence.reset()
                self._enqueue(sequence)

    @property
    def running_count(self) -> int:
        return len(self._decode_sequences) + len(self._prefill_sequences)

    @property
    def pages_free(self) -> int:
        """Pages available without a pause: free ones, and those of unlocked prefixes."""
        return self.pool.free_count + self.tree.evictable_pages

    def add(self, sequence: TokenSequence) -> None:
        """Queue the sequence by its rank, which it keeps from an earlier `add`. It must have room to grow."""
        assert len(sequence.tokens) < sequence.limit <= self.limit
        if sequence.rank == NO_RANK:
            self._arrivals += 1
            sequence.rank = (self._arrivals + sequence.request.priority * PRIORITY_ARRIVALS, self._arrivals)
        self._enqueue(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that is finished or throttled and free its pages and slot at once. Safe for one that is not
        here."""
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            return
        entry = (sequence.rank, sequence)
        if sequence in tenant.running_sequences:
            self._store_prefix(sequence)
            self._release_slot(sequence)
        elif entry in tenant.waiting_entries[(at := bisect_left(tenant.waiting_entries, entry)) : at + 1]:
            del tenant.waiting_entries[at]
            self.waiting_count -= 1
        if not tenant.running_sequences and not tenant.waiting_entries:
            del self._tenants[sequence.request.tenant]

    def take_closed_slots(self) -> list[int]:
        """Return the slots that were closed since the last call."""
        closed, self._closed_slots = self._closed_slots, []
        return closed

    def plan(self) -> ScheduledStep | None:
        """Return the next step; None when there is nothing to do until a sequence is added."""
        if self._is_starved or not self._free_slots:
            self._pause_for_starved_tenant()
        for sequence in list(self._decode_sequences):
            if len(sequence.tokens) > len(sequence.pages) * self._page_tokens and sequence.slot >= 0:
                self._grow_pages(sequence)
        token_counts: dict[TokenSequence, int] = {}
        spare = self._step_tokens - len(self._decode_sequences)
        for sequence in self._decode_sequences:
            tokens = min(sequence.remaining_tokens, 1 + spare)
            spare -= tokens - 1
            self._assign_tokens(token_counts, sequence, tokens)
        if len(self._decode_sequences) < self.running_count + self.waiting_count:
            self._assign_prompt_tokens(token_counts, spare)
        if not token_counts:
            return None
        return self._build_step(token_counts)

    def complete_step(self, step: ScheduledStep) -> None:
        """Record that the runner computed the step."""
        for row, sequence in zip(step.plan.rows, step.sequences, strict=True):
            sequence.computed_tokens += len(row.tokens)
            if row.needs_sample and sequence in self._prefill_sequences:
                del self._prefill_sequences[sequence]
                self._decode_sequences[sequence] = None
                self._share_prefix(sequence)

    def _build_step(self, token_counts: dict[TokenSequence, int]) -> ScheduledStep:
        # Rows of one token first: runners compute those together.
        sequences = [sequence for sequence, tokens in token_counts.items() if tokens == 1]
        if len(sequences) < len(token_counts):
            sequences += [sequence for sequence, tokens in token_counts.items() if tokens > 1]
        rows: list[PlanRow] = []
        for sequence in sequences:
            start, end = sequence.computed_tokens, sequence.computed_tokens + token_counts[sequence]
            rows.append(
                PlanRow(sequence.slot, start, sequence.tokens[start:end], sequence.pages, end == len(sequence.tokens))
            )
        opened, self._opened_sequences = self._opened_sequences, []
        self.counts.steps += 1
        self.counts.rows += len(rows)
        self.counts.computed_tokens += sum(token_counts.values())
        return ScheduledStep(self.take_closed_slots(), opened, Plan(rows), sequences)

    # --- token budget ------------------------------------------------------------------------------------------------

    def _assign_tokens(self, token_counts: dict[TokenSequence, int], sequence: TokenSequence, tokens: int) -> None:
        token_counts[sequence] = token_counts.get(sequence, 0) + tokens
        self._tenants[sequence.request.tenant].served_tokens += tokens

    def _assign_prompt_tokens(self, token_counts: dict[TokenSequence, int], token_budget: int) -> None:
        """Assign each sequence up to half of the remaining budget in turn: short prompts need not wait for long
        ones."""
        queues: dict[str, list[QueueEntry]] = {}
        for sequence in self._prefill_sequences:
            insort(queues.setdefault(sequence.request.tenant, []), (sequence.rank, sequence))
        admitting = bool(self._free_slots)
        chunks: list[TokenSequence] = []
        while token_budget > 0 and (sequence := self._pick_sequence(queues, admitting=admitting)):
            if sequence.slot >= 0:
                queues[sequence.request.tenant].pop(0)
            elif not self._admit(sequence):
                admitting = False
                continue
            admitting = admitting and bool(self._free_slots)
            tokens = min(sequence.remaining_tokens, max(token_budget // 2, min(token_budget, MIN_CHUNK_TOKENS)))
            self._assign_tokens(token_counts, sequence, tokens)
            token_budget -= tokens
            chunks.append(sequence)
        for sequence in chunks:
            more = min(sequence.remaining_tokens - token_counts[sequence], token_budget)
            if more > 0:
                self._assign_tokens(token_counts, sequence, more)
                token_budget -= more

    def _pick_sequence(self, queues: dict[str, list[QueueEntry]], *, admitting: bool) -> TokenSequence | None:
        """Return the first sequence by rank of the tenant that was served least."""
        best: tuple[int, QueueEntry] | None = None
        for name, tenant in self._tenants.items():
            heads = queues.get(name, [])[:1] + (tenant.waiting_entries[:1] if admitting else [])
            if heads and (best is None or (tenant.served_tokens, min(heads)) < best):
                best = (tenant.served_tokens, min(heads))
        return None if best is None else best[1][1]

    def _admit(self, sequence: TokenSequence) -> bool:
        """Allocate a slot and pages for all tokens of the sequence, if a page remains for each running sequence to grow
        into."""
        size = self._page_tokens
        # The last token is always computed: the first sampled token needs its logits.
        node, pages = self.tree.match(sequence.request.salt, sequence.tokens[:-1])
        tenant = self._tenants[sequence.request.tenant]
        needed_pages = -(-len(sequence.tokens) // size) - len(pages)
        if needed_pages + self.running_count > self.pages_free:
            self.tree.unlock(node)
            self._is_starved = not tenant.running_sequences
            return False
        sequence.node, sequence.shared_pages, sequence.computed_tokens = node, len(pages), len(pages) * size
        sequence.pages = pages + self._allocate_pages(needed_pages)
        sequence.slot = self._free_slots.pop()
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed_tokens, sequence.prompt_tokens)
            self.counts.hit_tokens += sequence.cached_tokens
        tenant.waiting_entries.remove((sequence.rank, sequence))
        self.waiting_count -= 1
        tenant.running_sequences[sequence] = None
        self._prefill_sequences[sequence] = None
        self._opened_sequences.append(sequence)
        return True

    # --- pausing and releasing ---------------------------------------------------------------------------------------

    def _pause_for_starved_tenant(self) -> None:
        """Pause a sequence of the largest tenant when the tenant whose turn it is runs nothing and cannot begin."""
        self._is_starved = False
        needy = [tenant for tenant in self._tenants.values() if tenant.waiting_entries]
        if needy:
            least = min(needy, key=lambda tenant: (tenant.served_tokens, tenant.waiting_entries[0]))
            largest = max(self._tenants.values(), key=lambda tenant: len(tenant.running_sequences))
            if (
                not least.running_sequences
                and len(largest.running_sequences) > 1
                and least.served_tokens < largest.served_tokens
            ):
                self._pause(max(largest.running_sequences, key=_sequence_rank))

    def _grow_pages(self, sequence: TokenSequence) -> None:
        """Allocate pages for all tokens of the sequence; if none are free, pause the youngest sequences or this one."""
        needed_pages = -(-len(sequence.tokens) // self._page_tokens) - len(sequence.pages)
        while needed_pages > self.pages_free:
            youngest = [
                max(tenant.running_sequences, key=_sequence_rank)
                for tenant in self._tenants.values()
                if tenant.running_sequences
            ]
            victim = max(
                youngest,
                key=lambda running: (len(self._tenants[running.request.tenant].running_sequences), running.rank),
            )
            self._pause(victim)
            if victim is sequence:
                return
        sequence.pages += self._allocate_pages(needed_pages)

    def _allocate_pages(self, count: int) -> list[int]:
        if count > self.pool.free_count:
            self.pool.release(self.tree.evict(count - self.pool.free_count))
        return self.pool.allocate(count)

    def _pause(self, sequence: TokenSequence) -> None:
        self.counts.pauses += 1
        self._store_prefix(sequence)
        self._release_slot(sequence)
        self._enqueue(sequence)

    def _enqueue(self, sequence: TokenSequence) -> None:
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            # A new or returning tenant starts level with the others: it has no claim for the time it was away.
            served = min((other.served_tokens for other in self._tenants.values()), default=0)
            tenant = self._tenants[sequence.request.tenant] = Tenant(served)
        insort(tenant.waiting_entries, (sequence.rank, sequence))
        self.waiting_count += 1

    def _release_slot(self, sequence: TokenSequence) -> None:
        """Take the sequence out of its slot; its pages belong to the tree or the pool already."""
        self._free_slots.append(sequence.slot)
        self._closed_slots.append(sequence.slot)
        del self._tenants[sequence.request.tenant].running_sequences[sequence]
        self._prefill_sequences.pop(sequence, None)
        self._decode_sequences.pop(sequence, None)
        sequence.reset()

    def _share_prefix(self, sequence: TokenSequence) -> None:
        """Insert the running sequence's whole pages into the tree for others. If another did so first, the pages stay
        its own."""
        first, whole = sequence.shared_pages, sequence.computed_tokens // self._page_tokens
        assert sequence.node is not None
        tokens = self._page_range_tokens(sequence, first, whole)
        if first < whole and not self.tree.has_child(sequence.node, tokens[: self._page_tokens]):
            sequence.node, _ = self.tree.insert(sequence.node, tokens, sequence.pages[first:whole])
            sequence.shared_pages = whole

    def _store_prefix(self, sequence: TokenSequence) -> None:
        """Hand the whole pages to the tree, which matches them until they are evicted; free the rest."""
        first, whole = sequence.shared_pages, sequence.computed_tokens // self._page_tokens
        assert sequence.node is not None
        node, stored_pages = sequence.node, 0
        if first < whole:
            tokens = self._page_range_tokens(sequence, first, whole)
            node, stored_pages = self.tree.insert(node, tokens, sequence.pages[first:whole])
        self.tree.unlock(node)
        self.pool.release(sequence.pages[first : first + stored_pages])
        self.pool.release(sequence.pages[whole:])

    def _page_range_tokens(self, sequence: TokenSequence, first_page: int, end_page: int) -> "array[int]":
        return sequence.tokens[first_page * self._page_tokens : end_page * self._page_tokens]


def _sequence_rank(sequence: TokenSequence) -> Rank:
    return sequence.rank
