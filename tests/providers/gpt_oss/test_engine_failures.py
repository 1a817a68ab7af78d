"""An engine whose runner fails, and the end of an engine: only the failed step's requests fail, and no reader waits for
ever."""

import asyncio
import threading
from contextlib import suppress

import pytest

from apis.errors import UpstreamError
from providers.inference.gpt_oss.engine import engine as engine_module
from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings
from tests.providers.gpt_oss.driving import alone, echo
from tests.providers.gpt_oss.engines import WAIT_S, GatedRunner, acquired, ask, forever, gather, ids_of, running
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner
from tests.support.waiting import until


async def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    runner = GatedRunner(echo, RunnerShape(slots=2, page_tokens=4))
    poison = 5
    runner.failing = lambda plan: any(poison in row.tokens for row in plan.rows)
    async with running(runner) as engine:
        poisoned = asyncio.create_task(gather(engine, ask([1, 1, poison])))
        with pytest.raises(UpstreamError, match="The engine failed"):
            await poisoned
        request = ask([1, 2, 0, 1, 2])
        assert ids_of(await gather(engine, request)) == alone(echo, request, 4096)
        metrics = engine.metrics()
    assert (metrics.failures, metrics.pages_free) == (1, metrics.pages)


async def test_sequences_outside_the_failed_step_are_computed_again() -> None:
    runner = GatedRunner(echo, RunnerShape(slots=8, page_tokens=4))
    poison = 5
    runner.failing = lambda plan: any(poison in row.tokens for row in plan.rows)
    runner.gated = True
    requests = [ask([index % 3, 1, index // 3] * 3, 30) for index in range(12)]
    async with running(runner) as engine:
        first = asyncio.create_task(gather(engine, ask([poison])))
        await acquired(runner.at_gate)
        others = [asyncio.create_task(gather(engine, each)) for each in requests]
        await asyncio.sleep(0)
        runner.gated = False
        runner.let.release()
        with pytest.raises(UpstreamError):
            await first
        for each, task in zip(requests, others, strict=True):
            assert ids_of(await task) == alone(echo, each, 4096)


async def test_after_a_failure_no_page_is_trusted() -> None:
    runner = GatedRunner(echo, RunnerShape(page_tokens=4))
    poison = 5
    runner.failing = lambda plan: any(poison in row.tokens for row in plan.rows)
    async with running(runner) as engine:
        before = await gather(engine, ask([1, 2, 0, 1, 2, 2], 4))
        with pytest.raises(UpstreamError):
            await gather(engine, ask([poison]))
        after = await gather(engine, ask([1, 2, 0, 1, 2, 2], 4))
        assert ids_of(after) == ids_of(before)
        assert after[-1].cached_tokens == 0


async def test_an_engine_that_keeps_failing_refuses_and_tries_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "REFUSE_S", 0.2)
    runner = GatedRunner(forever)
    runner.failing = lambda plan: True
    async with running(runner) as engine:
        for _ in range(engine_module.MAX_FAILURES):
            with pytest.raises(UpstreamError, match="failed at this request"):
                await gather(engine, ask([1], 3))
        with pytest.raises(UpstreamError, match="keeps failing") as refused:
            await gather(engine, ask([1], 3))
        assert refused.value.retry_after_s == 1
        runner.failing = lambda plan: False

        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(UpstreamError):
                    assert ids_of(await gather(engine, ask([1], 3))) == [1, 1, 1]
                    return
                await asyncio.sleep(0.01)


async def test_a_runner_that_fails_even_at_closing_its_slots_is_left_in_peace() -> None:
    class Dead(ScriptedRunner):
        closed = 0

        def close(self, slot: int) -> None:
            self.closed += 1
            raise RuntimeError("the device is lost")

    runner = Dead(forever)
    async with running(runner) as engine:
        with pytest.raises(UpstreamError, match="failed at this request"):
            await gather(engine, ask([1], 3))
        with pytest.raises(UpstreamError, match="failed at this request"):
            await gather(engine, ask([1], 3))
        assert runner.closed <= 4


async def test_closing_ends_the_thread_and_every_stream() -> None:
    runner = ScriptedRunner(forever, RunnerShape(slots=2, context_tokens=10**6, page_count=10**5))
    engine = Engine(runner, EngineSettings(step_tokens=64))
    await engine.start()
    tasks = [asyncio.create_task(gather(engine, ask([index]))) for index in range(5)]
    await until(lambda: engine.metrics().running == 2)
    async with asyncio.timeout(1):
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, UpstreamError) for each in results)
    assert not [each for each in threading.enumerate() if each.name == "gpt-oss engine"]
    with pytest.raises(UpstreamError, match="stopped"):
        await gather(engine, ask([1]))


async def test_closing_does_not_wait_for_ever_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLOSE_TIMEOUT_S", 0.05)
    runner = GatedRunner(forever)
    runner.gated = True
    engine = Engine(runner, EngineSettings())
    await engine.start()
    task = asyncio.create_task(gather(engine, ask([1])))
    await acquired(runner.at_gate)
    async with asyncio.timeout(1):
        await engine.close()
        with pytest.raises(UpstreamError, match="stopped"):
            await task
    (thread,) = [each for each in threading.enumerate() if each.name == "gpt-oss engine"]
    runner.let.release()
    await asyncio.to_thread(thread.join, WAIT_S)
