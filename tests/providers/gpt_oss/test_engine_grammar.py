"""Generation held to a grammar: masks, forced tokens, ends, and grammars that break."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress

import pytest

from apis.errors import InvalidRequest, UpstreamError
from providers.inference.gpt_oss.engine.engine import Engine
from providers.inference.gpt_oss.engine.runner import Plan
from providers.inference.gpt_oss.engine.sampling import SampledToken
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from providers.inference.harmony.matcher import GrammarMatcher
from tests.providers.gpt_oss.driving import GREEDY, STOP
from tests.providers.gpt_oss.engines import GatedRunner, ask, forever, gather, ids_of, running
from tests.providers.harmony.turns import chat_request, custom, encode, matcher
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner


class Grammar:
    """A Matcher over a few words: after each token, those that may follow; one alone is forced."""

    def __init__(self, follows: Mapping[int, Sequence[int]], first: Sequence[int]) -> None:
        self._follows = follows
        self._next = first
        self.masks = 0

    @property
    def is_done(self) -> bool:
        return not self._next

    def mask(self) -> bytes:
        self.masks += 1
        mask = bytearray(32)
        for token in self._next:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)

    def accept(self, token: int) -> bool:
        if token not in self._next:
            return False
        self._next = self._follows.get(token, ())
        return True

    def forced_tokens(self) -> Sequence[int]:
        forced: list[int] = []
        following = self._next
        while len(following) == 1 and len(forced) < 20:
            forced += following
            following = self._follows.get(forced[-1], ())
        return forced


def constrained(ids: Sequence[int], grammar: Grammar, stop_ids: Sequence[int] = (STOP,)) -> EngineRequest:
    return EngineRequest(ids, GREEDY, stop_ids=stop_ids, matcher=grammar)


async def test_a_grammar_holds_the_tokens_and_what_it_forces_costs_no_step() -> None:
    runner = GatedRunner(lambda tokens: 50)
    grammar = Grammar({20: [21], 21: [22], 22: [23, 24], 23: [25], 25: [STOP]}, first=[20])
    async with running(runner) as engine:
        steps = await gather(engine, constrained([1, 2, 3], grammar))
    assert ids_of(steps) == [20, 21, 22, 23, 25, STOP]
    assert steps[-1].finish_reason == "stop"
    assert [len(row.tokens) for plan in runner.plans for row in plan.rows] == [6]


async def test_forced_tokens_in_the_middle_are_computed_in_one_row() -> None:
    runner = GatedRunner(lambda tokens: 50)
    grammar = Grammar({20: [22], 22: [23], 23: [24], 24: [30, 31], 30: [STOP]}, first=[20, 21])
    async with running(runner) as engine:
        other = asyncio.create_task(gather(engine, ask([4, 4], 30)))
        steps = await gather(engine, constrained([1, 2, 3], grammar))
        assert ids_of(await other) == [50] * 30
    assert ids_of(steps) == [20, 22, 23, 24, 30, STOP]


async def test_a_grammar_that_ends_is_a_stop_and_the_length_cuts_what_is_forced() -> None:
    runner = ScriptedRunner(lambda tokens: 50, RunnerShape(context_tokens=8))
    async with running(runner) as engine:
        ended = await gather(engine, constrained([1], Grammar({20: [22]}, first=[20, 21]), ()))
        cut = await gather(engine, constrained([1], Grammar({20: [20]}, first=[20]), ()))
    assert (ids_of(ended), ended[-1].finish_reason) == ([20, 22], "stop")
    assert (ids_of(cut), cut[-1].finish_reason) == ([20] * 7, "length")


async def test_a_grammar_that_grows_too_complex_says_so_itself() -> None:
    class Heavy(Grammar):
        def mask(self) -> bytes:
            raise UpstreamError("too complex")

    async with running(ScriptedRunner(forever)) as engine:
        with pytest.raises(UpstreamError, match="too complex"):
            await gather(engine, constrained([1, 2], Heavy({}, first=[20, 21])))


async def test_forced_tokens_are_no_part_of_the_cached_prompt() -> None:
    follows = {token: [token + 1] for token in range(20, 40)} | {40: [50, 51]}
    async with running(ScriptedRunner(lambda tokens: 50, RunnerShape(page_tokens=4))) as engine:
        for cached in (0, 6):
            steps = await gather(engine, constrained([1] * 6, Grammar(follows, first=[20]), (50,)))
            assert ids_of(steps) == [*range(20, 41), 50]
            assert steps[-1].cached_tokens == cached


class NativePanic(BaseException):
    """An error of a library's native code, which is no Exception."""


async def test_a_grammar_that_breaks_costs_its_own_request_alone() -> None:
    class Broken(Grammar):
        def accept(self, token: int) -> bool:
            raise NativePanic

    runner = ScriptedRunner(lambda tokens: 50)
    async with running(runner) as engine:
        other = asyncio.create_task(gather(engine, ask([4, 4], 30)))
        with pytest.raises(UpstreamError, match="failed at this request"):
            await gather(engine, constrained([1, 2], Broken({}, first=[20, 21])))
        with pytest.raises(UpstreamError, match="failed at this request"):
            await gather(engine, constrained([1, 2], Broken({}, first=[20])))
        assert ids_of(await other) == [50] * 30
        assert engine.metrics().failures == 0
        assert engine.metrics().pages_free == runner.page_count


class PacedRunner(ScriptedRunner):
    """Takes 5 ms for each step, as a small model does."""

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        time.sleep(0.005)
        return super().step(plan, masks)


def spell(tokens: Sequence[int]) -> int:
    """Play the head of a call of `shell` after the prompt [9], then "abab" for ever; other prompts get 50 for ever."""
    at = len(tokens) - 1
    return 50 if tokens[0] != 9 else CALL_HEAD[at] if at < len(CALL_HEAD) else AB[at % 2]


CALL_HEAD = encode("<|channel|>commentary to=functions.shell<|message|>")
AB = encode("a") + encode("b")
DEAR_GRAMMARS = [
    'start: (("a"|"b")? ("a"|"b")?){1,1000}',
    'start: (("a"|"b")? ("a"|"b")?){1,140}',
    'start: (("a"|"b"|"ab"|"ba"|"aba")? ("a"|"b"|"bab")?){1,600}',
    "start: /(.*a.{1000}){50}/",
]


@pytest.mark.parametrize("definition", DEAR_GRAMMARS)
async def test_a_dear_grammar_does_not_slow_the_other_sequences(definition: str) -> None:
    """The cost of a grammar that runs is bounded by items, and no neighbour waits for it."""
    tools = chat_request(tools=[custom("shell", "lark", definition)])
    matchers: list[GrammarMatcher] = []
    with suppress(InvalidRequest):
        matchers += [await asyncio.to_thread(matcher, tools) for _ in range(2)]

    async def run_dear_sequence(engine: Engine, dear: GrammarMatcher) -> None:
        with suppress(UpstreamError):
            await gather(engine, EngineRequest([9], GREEDY, max_tokens=60, matcher=dear))

    async with running(PacedRunner(spell)) as engine:
        dear_tasks = [asyncio.create_task(run_dear_sequence(engine, dear)) for dear in matchers]
        gap_s, last = 0.0, time.monotonic()
        async with asyncio.timeout(20), aclosing(engine.submit(ask([4, 4], 80))) as steps:
            async for _ in steps:
                now = time.monotonic()
                gap_s, last = max(gap_s, now - last), now
        for task in dear_tasks:
            await task
    assert gap_s < 1.0, f"the longest gap was {gap_s * 1000:.0f} ms"


def test_masks_that_stay_slow_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slow masks in a row end a request; a quick one between them starts the count again."""
    clock = {"now": 0.0, "mask_s": 0.06}

    def thread_time() -> float:
        clock["now"] += clock["mask_s"]
        return clock["now"]

    monkeypatch.setattr("providers.inference.harmony.matcher.time.thread_time", thread_time)
    slow = matcher(chat_request(tools=[custom("shell", "lark", 'start: "a" "b"')]))
    slow.mask()
    slow.mask()
    clock["mask_s"] = 0.01
    slow.mask()
    clock["mask_s"] = 0.06
    slow.mask()
    slow.mask()
    with pytest.raises(UpstreamError, match="too complex"):
        slow.mask()
