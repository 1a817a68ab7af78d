"""Retries, failover, breaker and budget: with several real servers, and by a clock of the test's own."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from apis.deltas import Delta, Finish, TextDelta, Usage
from apis.errors import InvalidRequest, RateLimited, StackError, UpstreamError
from providers.inference.attempts import CircuitBreaker
from providers.inference.chat_completions.replicas import RetryBudget
from tests.conformance.inference import drain
from tests.providers.inference.remote import chat_request, started
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    RESET,
    Answer,
    UpstreamServer,
    delta_chunk,
    error_answer,
    event,
    head,
    http_chunk,
    stream,
    text_chunks,
)

OK = stream(text_chunks("a"))
OK_DELTAS = [TextDelta("a"), Finish("stop", Usage(11, 7))]
BUSY = error_answer(429, headers={"retry-after": "0"})
BROKEN_LATE: Answer = [head(), http_chunk(event(delta_chunk(content="a"))), CUT]


# --- one server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers",
    [
        [error_answer(500)],
        [error_answer(503), error_answer(502)],
        [[CUT], [RESET]],
        [BUSY],
        [[head(), CUT]],
        [stream([])],
        [stream(["nonsense"])],
        [stream([{"error": {"message": "overloaded", "code": 503}}])],
        [[head(), http_chunk(event(delta_chunk(role="assistant", content=""))), RESET]],
    ],
)
async def test_a_failure_before_the_first_token_is_tried_again(answers: list[Answer]) -> None:
    async with UpstreamServer(*answers, OK) as upstream, started(upstream.base_url) as vllm:
        assert await drain(vllm, chat_request()) == OK_DELTAS
        assert len(upstream.chats) == len(answers) + 1


@pytest.mark.parametrize(
    ("answer", "kind", "times"),
    [
        (error_answer(500), UpstreamError, 3),
        (BUSY, RateLimited, 3),
        (error_answer(429, headers={"retry-after": "9"}), RateLimited, 1),
        (error_answer(400), InvalidRequest, 1),
        (error_answer(401), UpstreamError, 1),
        (BROKEN_LATE, UpstreamError, 1),
    ],
)
async def test_tries_have_an_end(answer: Answer, kind: type[StackError], times: int) -> None:
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        with pytest.raises(kind):
            await drain(vllm, chat_request())
        assert len(upstream.chats) == times


async def test_a_limit_that_is_met_after_the_first_token_is_no_reason_to_begin_again() -> None:
    answer = stream([delta_chunk(content="a"), {"error": {"message": "slow down", "code": 429}}])
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        with pytest.raises(RateLimited):
            await drain(vllm, chat_request())
        assert len(upstream.chats) == 1


async def test_a_server_that_fails_for_all_is_not_asked_thrice_by_all() -> None:
    fields = {"retry_delay_s": 0, "breaker_failures": 100_000}
    async with UpstreamServer(error_answer(500)) as upstream, started(upstream.base_url, **fields) as vllm:
        for _ in range(200):
            with pytest.raises(UpstreamError):
                await drain(vllm, chat_request())
        assert 300 <= len(upstream.chats) < 450


async def test_one_failure_in_five_is_not_noticed() -> None:
    async with (
        UpstreamServer(*([error_answer(500), OK, OK, OK, OK] * 40)) as upstream,
        started(upstream.base_url) as vllm,
    ):
        for _ in range(160):
            assert await drain(vllm, chat_request()) == OK_DELTAS


async def test_a_breaker_keeps_requests_from_a_server_that_fails_and_one_finds_it_well_again() -> None:
    policy = {"max_retries": 0, "breaker_failures": 3, "breaker_window_s": 0.2}
    async with UpstreamServer(error_answer(500)) as upstream, started(upstream.base_url, **policy) as vllm:
        for _ in range(6):
            with pytest.raises(UpstreamError):
                await drain(vllm, chat_request())
        assert len(upstream.chats) == 3
        upstream.then(OK)
        async with asyncio.timeout(5):
            while len(upstream.chats) < 5:
                with suppress(UpstreamError):
                    assert await drain(vllm, chat_request()) == OK_DELTAS
                await asyncio.sleep(0)
        assert await drain(vllm, chat_request()) == OK_DELTAS


# --- several ---------------------------------------------------------------------------------------------------------


async def servers(stack: AsyncExitStack, *answers: Answer) -> list[UpstreamServer]:
    return [await stack.enter_async_context(UpstreamServer(answer)) for answer in answers]


async def test_replicas_take_turns() -> None:
    async with AsyncExitStack() as stack:
        replicas = await servers(stack, OK, OK, OK)
        vllm = await stack.enter_async_context(started([replica.base_url for replica in replicas]))
        for _ in range(6):
            await drain(vllm, chat_request())
        assert [len(replica.chats) for replica in replicas] == [2, 2, 2]


@pytest.mark.parametrize(
    "broken", [error_answer(500), [CUT], [RESET], error_answer(429, headers={"retry-after": "3600"})]
)
async def test_another_replica_answers_at_once_for_one_that_cannot(broken: Answer) -> None:
    async with AsyncExitStack() as stack:
        replicas = await servers(stack, broken, OK)
        urls = [replica.base_url for replica in replicas]
        vllm = await stack.enter_async_context(started(urls, retry_delay_s=60, max_retry_delay_s=60))
        async with asyncio.timeout(5):
            for _ in range(4):
                assert await drain(vllm, chat_request()) == OK_DELTAS


async def test_a_replica_that_is_gone_is_passed_over() -> None:
    async with AsyncExitStack() as stack:
        gone, well = await servers(stack, OK, OK)
        vllm = await stack.enter_async_context(started([gone.base_url, well.base_url]))
        await gone.stop()
        for _ in range(4):
            assert await drain(vllm, chat_request()) == OK_DELTAS
        assert [model.id for model in await vllm.models()] == ["fake-model"]


async def test_checks_find_the_replica_that_is_down() -> None:
    async with AsyncExitStack() as stack:
        down, well = await servers(stack, OK, OK)
        down.routes["/v1/models"] = error_answer(503)
        vllm = await stack.enter_async_context(started([down.base_url, well.base_url], health_interval_s=0.02))
        async with asyncio.timeout(5):
            await down.until_received(3)
        for _ in range(4):
            await drain(vllm, chat_request())
        assert (len(down.chats), len(well.chats)) == (0, 4)


async def test_no_other_replica_is_asked_once_a_token_came() -> None:
    async with AsyncExitStack() as stack:
        dying, well = await servers(stack, BROKEN_LATE, OK)
        vllm = await stack.enter_async_context(started([dying.base_url, well.base_url]))
        deltas: list[Delta] = []

        async def read() -> None:
            async for step in vllm.chat(chat_request()):
                deltas.extend(step)

        with pytest.raises(UpstreamError):
            await read()
        assert deltas == [TextDelta("a")]
        assert well.chats == []


async def test_a_chat_that_is_left_while_it_waits_for_the_next_try_is_over() -> None:
    slow = {"retry_delay_s": 60, "max_retry_delay_s": 60}
    async with UpstreamServer(error_answer(500), [HANG]) as upstream, started(upstream.base_url, **slow) as vllm:
        task = asyncio.create_task(drain(vllm, chat_request()))
        async with asyncio.timeout(5):
            await upstream.until_received(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- by the clock ----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.record_failure()


def test_a_breaker_opens_after_enough_failures_in_its_window_and_for_as_long() -> None:
    clock = Clock()
    breaker = CircuitBreaker(5, 10, clock)
    fail(breaker, 4)
    clock.now += 10.1
    fail(breaker, 4)
    assert breaker.allows_request()
    breaker.record_success()
    fail(breaker, 4)
    assert breaker.allows_request()
    breaker.record_failure()
    assert not breaker.allows_request()
    clock.now += 9.9
    assert not breaker.allows_request()
    clock.now += 0.1
    assert breaker.allows_request()


def test_a_half_open_breaker_lets_one_probe_through() -> None:
    clock = Clock()
    breaker = CircuitBreaker(5, 10, clock)
    earlier = breaker.begin_request()
    fail(breaker, 5)
    clock.now += 10
    assert breaker.begin_request()
    assert not breaker.allows_request()
    breaker.end_request(is_probe=earlier)
    assert not breaker.allows_request()
    breaker.record_failure()
    breaker.end_request(is_probe=True)
    assert not breaker.allows_request()
    clock.now += 10
    breaker.begin_request()
    breaker.end_request(is_probe=True)
    assert breaker.allows_request()
    breaker.begin_request()
    breaker.record_success()
    assert breaker.allows_request()
    assert not breaker.begin_request()


def test_retries_are_few_in_the_long_run() -> None:
    clock = Clock()
    budget = RetryBudget(0.1, clock)
    while budget.withdraw():
        pass
    retries = 0
    for _ in range(10_000):
        budget.deposit()
        retries += budget.withdraw()
    assert 990 <= retries <= 1001
    clock.now += 1
    assert sum(budget.withdraw() for _ in range(50)) in (10, 11)
