"""Scheduler: which tokens of which sequences are computed next. Policy only: it knows neither torch nor threads.

Every sequence that decodes gets its row in every step; what is left of the step's tokens goes to prompts, in chunks.
Tenants take turns by what they were served so far, a tenant's sequences by rank: arrival, moved by priority. When pages
run out, unlocked prefixes are forgotten first; then the youngest sequence of the tenant that runs most is paused. Its
pages go into the prefix tree, so that resuming it finds them again if nobody needed them meanwhile.
"""

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from apis.errors import ConfigError
from providers.inference.gpt_oss.engine.pages import PagePool
from providers.inference.gpt_oss.engine.prefix import RadixTree
from providers.inference.gpt_oss.engine.runner import Plan, Row, Runner
from providers.inference.gpt_oss.engine.sequence import NO_RANK, Rank, TokenSequence

PRIORITY_ARRIVALS = 64
LEAST_CHUNK_TOKENS = 64

Entry = tuple[Rank, TokenSequence]


@dataclass(slots=True)
class Tenant:
    """`served` counts computed tokens; lists are in order of rank. Dropped when it has nothing here any more."""

    served: int
    waiting: list[Entry] = field(default_factory=list[Entry])
    running: dict[TokenSequence, None] = field(default_factory=dict[TokenSequence, None])


@dataclass(frozen=True, slots=True)
class Step:
    """What the runner is to do: close slots, open sequences, compute the plan, whose rows are these sequences'."""

    closed: list[int]
    opened: list[TokenSequence]
    plan: Plan
    sequences: list[TokenSequence]


@dataclass(slots=True)
class Counts:
    """Since the start: tokens that were computed, prompt tokens that were reused instead, sequences paused."""

    steps: int = 0
    rows: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    pauses: int = 0


class Scheduler:
    """`plan` a step, have it computed, `absorb` it; in between `add` and `remove` sequences as they come and go."""

    def __init__(self, runner: Runner, step_tokens: int) -> None:
        """`step_tokens` bounds the tokens of a step. Raises ConfigError when that is less than the runner's slots."""
        if step_tokens < runner.slots:
            raise ConfigError(f"step_tokens is {step_tokens}; it must be at least the number of slots, {runner.slots}.")
        self.counts = Counts()
        self.limit = min(runner.context_tokens, runner.page_count * runner.page_tokens)
        self._page_tokens = runner.page_tokens
        self._page_count = runner.page_count
        self._slot_count = runner.slots
        self._step_tokens = step_tokens
        self._tenants: dict[str, Tenant] = {}
        self._arrivals = 0
        self.reset()

    def reset(self) -> None:
        """No page's content is trusted any more: whatever runs waits again, and is computed anew. Closes every slot."""
        tenants, self._tenants = self._tenants, {}
        self.pool = PagePool(self._page_count)
        self.tree = RadixTree(self._page_tokens)
        self._slots = list(range(self._slot_count - 1, -1, -1))
        self._closed = list(range(self._slot_count))
        self._prefilling: dict[TokenSequence, None] = {}
        self._decoding: dict[TokenSequence, None] = {}
        self._opened: list[TokenSequence] = []
        self._starved = False
        self.waiting = 0
        for tenant in tenants.values():
            for sequence in [*tenant.running, *(waiting for _, waiting in tenant.waiting)]:
                sequence.rest()
                self._wait(sequence)

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def pages_free(self) -> int:
        """Pages that could be had without pausing anyone: free ones, and those of unlocked prefixes."""
        return self.pool.free + self.tree.evictable

    def add(self, sequence: TokenSequence) -> None:
        """It waits for its turn; one that was here before gets its old rank. It must have room to grow."""
        assert len(sequence.tokens) < sequence.limit <= self.limit
        if sequence.rank == NO_RANK:
            self._arrivals += 1
            sequence.rank = (self._arrivals + sequence.request.priority * PRIORITY_ARRIVALS, self._arrivals)
        self._wait(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """It is finished or not wanted now: its pages and its slot are free at once. Safe for one that is not here."""
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            return
        entry = (sequence.rank, sequence)
        if sequence in tenant.running:
            self._keep_prefix(sequence)
            self._leave(sequence)
        elif entry in tenant.waiting[(at := bisect_left(tenant.waiting, entry)) : at + 1]:
            del tenant.waiting[at]
            self.waiting -= 1
        if not tenant.running and not tenant.waiting:
            del self._tenants[sequence.request.tenant]

    def take_closed(self) -> list[int]:
        """The slots that were left since the last time."""
        closed, self._closed = self._closed, []
        return closed

    def plan(self) -> Step | None:
        """The next step; None when there is nothing to do until somebody is added."""
        if self._starved or not self._slots:
            self._make_room()
        for sequence in list(self._decoding):
            if len(sequence.tokens) > len(sequence.pages) * self._page_tokens and sequence.slot >= 0:
                self._grow(sequence)
        given: dict[TokenSequence, int] = {}
        spare = self._step_tokens - len(self._decoding)
        for sequence in self._decoding:
            tokens = min(sequence.remaining, 1 + spare)
            spare -= tokens - 1
            self._give(given, sequence, tokens)
        if len(self._decoding) < self.running + self.waiting:
            self._give_prompts(given, spare)
        if not given:
            return None
        return self._step(given)

    def absorb(self, step: Step) -> None:
        """The step was computed."""
        for row, sequence in zip(step.plan.rows, step.sequences, strict=True):
            sequence.computed += len(row.tokens)
            if row.samples and sequence in self._prefilling:
                del self._prefilling[sequence]
                self._decoding[sequence] = None
                self._share_prefix(sequence)

    def _step(self, given: dict[TokenSequence, int]) -> Step:
        # Rows of one token first: runners compute those together.
        sequences = [each for each, tokens in given.items() if tokens == 1]
        if len(sequences) < len(given):
            sequences += [each for each, tokens in given.items() if tokens > 1]
        rows: list[Row] = []
        for each in sequences:
            start, end = each.computed, each.computed + given[each]
            rows.append(Row(each.slot, start, each.tokens[start:end], each.pages, end == len(each.tokens)))
        opened, self._opened = self._opened, []
        self.counts.steps += 1
        self.counts.rows += len(rows)
        self.counts.computed_tokens += sum(given.values())
        return Step(self.take_closed(), opened, Plan(rows), sequences)

    # --- who gets how many tokens ------------------------------------------------------------------------------------

    def _give(self, given: dict[TokenSequence, int], sequence: TokenSequence, tokens: int) -> None:
        given[sequence] = given.get(sequence, 0) + tokens
        self._tenants[sequence.request.tenant].served += tokens

    def _give_prompts(self, given: dict[TokenSequence, int], spare: int) -> None:
        """Each in turn gets up to half of what is left, so that a short prompt need not wait for a long one to end."""
        queues: dict[str, list[Entry]] = {}
        for sequence in self._prefilling:
            insort(queues.setdefault(sequence.request.tenant, []), (sequence.rank, sequence))
        admitting = bool(self._slots)
        chunks: list[TokenSequence] = []
        while spare > 0 and (sequence := self._pick(queues, admitting=admitting)):
            if sequence.slot >= 0:
                queues[sequence.request.tenant].pop(0)
            elif not self._admit(sequence):
                admitting = False
                continue
            admitting = admitting and bool(self._slots)
            tokens = min(sequence.remaining, max(spare // 2, min(spare, LEAST_CHUNK_TOKENS)))
            self._give(given, sequence, tokens)
            spare -= tokens
            chunks.append(sequence)
        for sequence in chunks:
            more = min(sequence.remaining - given[sequence], spare)
            if more > 0:
                self._give(given, sequence, more)
                spare -= more

    def _pick(self, queues: dict[str, list[Entry]], *, admitting: bool) -> TokenSequence | None:
        """The first by rank of the tenant that was served least."""
        best: tuple[int, Entry] | None = None
        for name, tenant in self._tenants.items():
            heads = queues.get(name, [])[:1] + (tenant.waiting[:1] if admitting else [])
            if heads and (best is None or (tenant.served, min(heads)) < best):
                best = (tenant.served, min(heads))
        return None if best is None else best[1][1]

    def _admit(self, sequence: TokenSequence) -> bool:
        """Give it a slot and pages for all that is known of it, if others keep a page each to grow into."""
        size = self._page_tokens
        # The last token is computed always: its logits are what the first choice is made from.
        node, pages = self.tree.match(sequence.request.salt, sequence.tokens[:-1])
        tenant = self._tenants[sequence.request.tenant]
        wanted = -(-len(sequence.tokens) // size) - len(pages)
        if wanted + self.running > self.pages_free:
            self.tree.unlock(node)
            self._starved = not tenant.running
            return False
        sequence.node, sequence.shared, sequence.computed = node, len(pages), len(pages) * size
        sequence.pages = pages + self._take(wanted)
        sequence.slot = self._slots.pop()
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
            self.counts.hit_tokens += sequence.cached
        tenant.waiting.remove((sequence.rank, sequence))
        self.waiting -= 1
        tenant.running[sequence] = None
        self._prefilling[sequence] = None
        self._opened.append(sequence)
        return True

    # --- who leaves, and with what -----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """When the tenant whose turn it is has nothing running and cannot begin, one of the largest makes way."""
        self._starved = False
        needy = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if needy:
            least = min(needy, key=lambda tenant: (tenant.served, tenant.waiting[0]))
            largest = max(self._tenants.values(), key=lambda tenant: len(tenant.running))
            if not least.running and len(largest.running) > 1 and least.served < largest.served:
                self._pause(max(largest.running, key=_rank))

    def _grow(self, sequence: TokenSequence) -> None:
        """Pages for all its tokens, or a pause: its own, when it is the one to make way."""
        wanted = -(-len(sequence.tokens) // self._page_tokens) - len(sequence.pages)
        while wanted > self.pages_free:
            youngest = [max(tenant.running, key=_rank) for tenant in self._tenants.values() if tenant.running]
            victim = max(youngest, key=lambda each: (len(self._tenants[each.request.tenant].running), each.rank))
            self._pause(victim)
            if victim is sequence:
                return
        sequence.pages += self._take(wanted)

    def _take(self, pages: int) -> list[int]:
        if pages > self.pool.free:
            self.pool.give(self.tree.evict(pages - self.pool.free))
        return self.pool.take(pages)

    def _pause(self, sequence: TokenSequence) -> None:
        self.counts.pauses += 1
        self._keep_prefix(sequence)
        self._leave(sequence)
        self._wait(sequence)

    def _wait(self, sequence: TokenSequence) -> None:
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            # Whoever comes anew, or again, is served from now on: not for the time it was away.
            served = min((each.served for each in self._tenants.values()), default=0)
            tenant = self._tenants[sequence.request.tenant] = Tenant(served)
        insort(tenant.waiting, (sequence.rank, sequence))
        self.waiting += 1

    def _leave(self, sequence: TokenSequence) -> None:
        """Out of its slot; its pages are somebody else's by now."""
        self._slots.append(sequence.slot)
        self._closed.append(sequence.slot)
        del self._tenants[sequence.request.tenant].running[sequence]
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)
        sequence.rest()

    def _share_prefix(self, sequence: TokenSequence) -> None:
        """Let others start from its whole pages while it runs; not if another was first, as its pages stay its own."""
        first, whole = sequence.shared, sequence.computed // self._page_tokens
        assert sequence.node is not None
        tokens = self._tokens_of(sequence, first, whole)
        if first < whole and not self.tree.knows(sequence.node, tokens[: self._page_tokens]):
            sequence.node, _ = self.tree.insert(sequence.node, tokens, sequence.pages[first:whole])
            sequence.shared = whole

    def _keep_prefix(self, sequence: TokenSequence) -> None:
        """Hand its whole pages to the tree, where they can be found until others need them; free the rest."""
        first, whole = sequence.shared, sequence.computed // self._page_tokens
        assert sequence.node is not None
        node, known = sequence.node, 0
        if first < whole:
            tokens = self._tokens_of(sequence, first, whole)
            node, known = self.tree.insert(node, tokens, sequence.pages[first:whole])
        self.tree.unlock(node)
        self.pool.give(sequence.pages[first : first + known])
        self.pool.give(sequence.pages[whole:])

    def _tokens_of(self, sequence: TokenSequence, first_page: int, end_page: int) -> "array[int]":
        return sequence.tokens[first_page * self._page_tokens : end_page * self._page_tokens]


def _rank(sequence: TokenSequence) -> Rank:
    return sequence.rank
