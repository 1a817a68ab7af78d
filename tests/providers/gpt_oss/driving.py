"""Drives a scheduler step by step over the scripted runner, and checks every step against the laws of the engine."""

from collections.abc import Iterable, Iterator, Sequence

from providers.inference.gpt_oss.engine.prefix import PrefixNode, RadixTree
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.engine.scheduler import Scheduler
from providers.inference.gpt_oss.engine.sequence import EngineRequest, TokenSequence
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner, TokenScript

STOP = 7
GREEDY = RowSampling(temperature=0)


def echo(tokens: Sequence[int]) -> int:
    """A script of few tokens, so that many sequences share prefixes, which still depends on every token so far."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return STOP if value % 23 == 0 else value % 3


def alone(script: TokenScript, request: EngineRequest, limit: int) -> list[int]:
    """Return the output of a request that runs without any other."""
    tokens = list(request.ids)
    max_length = limit if request.max_tokens is None else min(limit, len(tokens) + request.max_tokens)
    while len(tokens) < max_length:
        tokens.append(script(tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.ids) :]


def nodes(tree: RadixTree) -> Iterator[PrefixNode]:
    pending = list(tree.roots.values())
    while pending:
        node = pending.pop()
        yield node
        pending += node.children.values()


def check_tree(tree: RadixTree, holders: Iterable[PrefixNode]) -> set[int]:
    """Assert that locks are exactly the holders', counts are right and no page is stored twice; return the tree's
    pages."""
    locks: dict[PrefixNode, int] = {}
    for holder in holders:
        step: PrefixNode | None = holder
        while step is not None:
            locks[step] = locks.get(step, 0) + 1
            step = step.parent
    tree_pages: list[int] = []
    evictable = 0
    for node in nodes(tree):
        assert node.lock_count == locks.get(node, 0)
        assert node.children or node.lock_count or node.pages, "an empty root remains"
        tree_pages += node.pages
        evictable += 0 if node.lock_count else len(node.pages)
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key.startswith(key)
            assert child.pages
    assert len(tree_pages) == len(set(tree_pages)) == tree.page_count
    assert evictable == tree.evictable_pages
    return set(tree_pages)


class Driver:
    """Adds sequences and computes their steps. Every `step` checks every law that can be checked from outside."""

    def __init__(self, shape: RunnerShape, *, step_tokens: int, script: TokenScript = echo) -> None:
        self.runner = ScriptedRunner(script, shape)
        self.scheduler = Scheduler(self.runner, step_tokens)
        self.step_tokens = step_tokens
        self.live: dict[TokenSequence, None] = {}

    def add(self, request: EngineRequest) -> TokenSequence:
        sequence = TokenSequence(request, self.scheduler.limit)
        self.scheduler.add(sequence)
        self.live[sequence] = None
        return sequence

    def remove(self, sequence: TokenSequence) -> None:
        self.scheduler.remove(sequence)
        self.live.pop(sequence, None)
        self.check()

    def step(self) -> list[TokenSequence]:
        """Compute one step; return the sequences that had a row in it."""
        step = self.scheduler.plan()
        if step is None:
            for slot in self.scheduler.take_closed_slots():
                self.runner.close(slot)
            return []
        self.check()
        assert 0 < step.plan.token_count <= self.step_tokens
        for slot in step.closed_slots:
            self.runner.close(slot)
        for sequence in step.opened_sequences:
            prompt, generated = sequence.tokens[: sequence.prompt_tokens], sequence.tokens[sequence.prompt_tokens :]
            self.runner.open(sequence.slot, sequence.request.sampling, prompt, generated)
        sampled = self.runner.step(step.plan, {})
        self.scheduler.complete_step(step)
        for row, sequence in zip(step.plan.rows, step.sequences, strict=True):
            if row.needs_sample:
                sequence.append_sampled(sampled[row.slot])
                if sequence.finish_reason is not None:
                    self.scheduler.remove(sequence)
                    del self.live[sequence]
        self.check()
        return step.sequences

    def run(self, most_steps: int = 10_000) -> None:
        """Step until no sequence remains; every request must come to its end."""
        for _ in range(most_steps):
            if not self.live:
                self.step()
                return
            assert self.step(), "nothing moves"
        raise AssertionError(f"{len(self.live)} requests did not end")

    def check(self) -> None:
        scheduler, size = self.scheduler, self.runner.page_tokens
        running = [sequence for sequence in self.live if sequence.slot >= 0]
        assert (
            len({sequence.slot for sequence in running}) == len(running) == scheduler.running_count <= self.runner.slots
        )
        tree_pages = check_tree(scheduler.tree, [sequence.node for sequence in running if sequence.node is not None])
        owned: list[int] = []
        for sequence in running:
            assert sequence.node is not None
            assert sequence.computed_tokens <= len(sequence.pages) * size
            assert set(sequence.pages[: sequence.shared_pages]) <= tree_pages
            owned += sequence.pages[sequence.shared_pages :]
        assert len(owned) == len(set(owned))
        assert not tree_pages & set(owned), "a page has two owners"
        assert scheduler.pool.free_count + len(tree_pages) + len(owned) == self.runner.page_count, (
            "pages are not conserved"
        )
