"""The scheduler's laws, in random and in small scenarios: nothing is lost, no sequence starves, batched equals
alone."""

import random

import pytest

from apis.errors import ConfigError
from providers.inference.gpt_oss.engine.scheduler import Scheduler
from providers.inference.gpt_oss.engine.sequence import EngineRequest, TokenSequence
from tests.providers.gpt_oss.driving import GREEDY, STOP, Driver, alone, echo
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner

STORIES = 40
STORIES_EACH = 25


def request(ids: list[int], *, max_tokens: int | None = None, tenant: str = "", priority: int = 0) -> EngineRequest:
    return EngineRequest(ids, GREEDY, max_tokens=max_tokens, stop_ids=(STOP,), tenant=tenant, priority=priority)


def never_ends(tokens: object) -> int:
    return 1


class Story:
    """Arrivals, departures, pauses, resumes and failures at random times, in an engine of a random shape."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        slots = chance.choice([1, 2, 3, 8])
        self.shape = RunnerShape(
            page_tokens=chance.choice([1, 2, 4, 16]),
            page_count=chance.choice([3, 6, 12, 40, 200]),
            slots=slots,
            context_tokens=chance.choice([30, 100]),
        )
        self.driver = Driver(self.shape, step_tokens=chance.choice([slots, slots + 1, slots + 7, 64, 512]))
        self.expected: dict[TokenSequence, list[int]] = {}

    def arrive(self) -> None:
        chance, limit = self.chance, self.driver.scheduler.limit
        length = chance.randint(1, limit - 1)
        common = ([1, 2, 0, 1, 1, 2, 0, 0, 2] * 12)[: chance.randint(0, length)]
        ids = (common + [chance.randint(0, 2) for _ in range(length)])[:length]
        engine_request = EngineRequest(
            ids,
            GREEDY,
            max_tokens=chance.choice([None, 1, 5, 30]),
            stop_ids=(STOP,),
            tenant=chance.choice("abc"),
            priority=chance.randint(-2, 2),
            salt=chance.choice([None, None, "salt"]),
        )
        self.expected[self.driver.add(engine_request)] = alone(echo, engine_request, limit)

    def run(self, arrivals: int) -> None:
        chance, driver = self.chance, self.driver
        while arrivals or driver.live:
            if arrivals and chance.random() < 0.4:
                arrivals -= 1
                self.arrive()
            if driver.live and chance.random() < 0.05:
                sequence = chance.choice(list(driver.live))
                driver.remove(sequence)
                del self.expected[sequence]
            if driver.live and chance.random() < 0.05:
                running = chance.choice(list(driver.live))
                driver.scheduler.remove(running)
                driver.scheduler.add(running)
            if chance.random() < 0.01:
                driver.scheduler.reset()
            assert driver.step() or not driver.live


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.long] if first >= STORIES * STORIES_EACH // 2 else [])
        for first in range(0, STORIES * STORIES_EACH, STORIES_EACH)
    ],
)
def test_in_any_story_all_get_what_they_would_alone_and_nothing_is_lost(first: int) -> None:
    for seed in range(first, first + STORIES_EACH):
        story = Story(seed)
        story.run(arrivals=story.chance.randint(1, 25))
        for sequence, answer in story.expected.items():
            assert list(sequence.tokens[sequence.prompt_tokens :]) == answer, f"seed {seed}"
            assert sequence.finish_reason == ("stop" if answer[-1] == STOP else "length")
        story.driver.step()
        assert story.driver.scheduler.pages_free == story.shape.page_count


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=64), step_tokens=64)
    ids = [1, 2, 0, 1, 1, 2, 0, 0, 2, 1]
    first = driver.add(request(ids, max_tokens=6))
    driver.run()
    again = driver.add(request(ids, max_tokens=2))
    longer = driver.add(request([*first.tokens, 1, 2], max_tokens=2))
    driver.run()
    assert (first.cached_tokens, again.cached_tokens, longer.cached_tokens) == (0, 8, 12)
    assert driver.scheduler.counts.hit_tokens == 20


def test_of_a_prompt_of_whole_pages_the_last_token_is_computed_again() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=64), step_tokens=64)
    for cached in (0, 4):
        sequence = driver.add(request([1, 2, 0, 1, 1, 2, 0, 0], max_tokens=1))
        driver.run()
        assert sequence.cached_tokens == cached


def test_a_prefix_is_found_while_the_one_who_computed_it_still_runs() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=64), step_tokens=64, script=never_ends)
    driver.add(request([1] * 20, max_tokens=40))
    driver.step()
    late = driver.add(request([1] * 20, max_tokens=1))
    driver.step()
    assert late.cached_tokens == 16


def test_decoding_goes_on_in_every_step_while_a_long_prompt_is_computed() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=1024), step_tokens=16, script=never_ends)
    streams = [driver.add(request([index], max_tokens=400)) for index in range(4)]
    driver.step()
    driver.add(request([2] * 400, max_tokens=1))
    for _ in range(30):
        assert set(streams) <= set(driver.step())


def test_a_short_prompt_does_not_wait_for_a_long_one_to_end() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=1024), step_tokens=256, script=never_ends)
    long = driver.add(request([2] * 3000, max_tokens=1))
    driver.step()
    short = driver.add(request([1] * 50, max_tokens=1))
    driver.step()
    assert short.finish_reason == "length"
    assert long.computed_tokens == 256 + 206


def test_one_request_is_not_starved_by_another_tenants_thousand() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=400, slots=8), step_tokens=64, script=never_ends)
    for _ in range(1000):
        driver.add(request([1, 2, 3] * 10, max_tokens=100, tenant="many"))
    for _ in range(50):
        driver.step()
    one = driver.add(request([3] * 100, max_tokens=20, tenant="one"))
    steps = 0
    while one.finish_reason is None:
        driver.step()
        steps += 1
    assert steps < 30


def test_tenants_get_equal_shares_of_what_is_computed() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=4000, slots=8), step_tokens=32, script=never_ends)
    sizes = {"small": 10, "large": 200}
    for name, size in sizes.items():
        for index in range(100):
            driver.add(request([index % 3, index // 3] * size, max_tokens=4, tenant=name))
    computed = dict.fromkeys(sizes, 0)
    for _ in range(150):
        before = {each: each.computed_tokens for each in driver.live if each.slot >= 0}
        for each in driver.step():
            if each in driver.live:
                start = before.get(each, (each.cached_tokens or 0))
                computed[each.request.tenant] += each.computed_tokens - start
    assert 0.7 < computed["small"] / computed["large"] < 1.4


def test_a_late_tenant_has_no_claim_for_the_time_it_was_away() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=4000, slots=4), step_tokens=16, script=never_ends)
    for index in range(100):
        driver.add(request([index % 3, index // 3] * 20, max_tokens=4, tenant="early"))
    for _ in range(60):
        driver.step()
    for index in range(100):
        driver.add(request([3 + index % 3, index // 3] * 20, max_tokens=4, tenant="late"))
    for _ in range(60):
        driver.step()
    remaining = [sum(each.request.tenant == name for each in driver.live) for name in ("early", "late")]
    ended_early = 100 - remaining[0]
    ended_late = 100 - remaining[1]
    assert ended_late < 0.7 * ended_early


def test_a_tenants_priority_orders_its_own_requests_and_starves_none() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=64, slots=1), step_tokens=64)
    driver.add(request([1], max_tokens=3))
    driver.step()
    late = driver.add(request([2], max_tokens=1, priority=1))
    urgent = [driver.add(request([3, index], max_tokens=1)) for index in range(100)]
    order: list[TokenSequence] = []
    while driver.live:
        order += [each for each in driver.step() if each.finish_reason is not None]
    assert urgent[0] in order[:2]
    assert 10 < order.index(late) < 90


def test_when_pages_run_out_the_youngest_waits_and_loses_nothing() -> None:
    driver = Driver(RunnerShape(page_tokens=4, page_count=12, slots=4, context_tokens=40), step_tokens=64)
    requests = [request([index, 1, index], max_tokens=36) for index in range(4)]
    sequences = [driver.add(each) for each in requests]
    driver.run()
    assert driver.scheduler.counts.pauses > 0
    for each, sequence in zip(requests, sequences, strict=True):
        assert list(sequence.tokens[3:]) == alone(echo, each, 40)


def test_a_step_must_hold_a_token_of_every_slot() -> None:
    with pytest.raises(ConfigError, match=r"step_tokens is 7; it must be at least the number of slots, 8\."):
        Scheduler(ScriptedRunner(echo, RunnerShape(slots=8)), 7)
