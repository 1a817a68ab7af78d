"""The engine's thread and its event loop: streamed steps, abandoned streams, slow readers, and the bounds of
waiting."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from random import Random

import pytest

from apis.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from apis.sink import Sink
from providers.inference.gpt_oss.engine.engine import MAX_UNREAD_TOKENS, EngineSettings, EngineStep
from providers.inference.gpt_oss.engine.sampling import RowSampling
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from tests.providers.gpt_oss.driving import STOP, alone, echo
from tests.providers.gpt_oss.engines import (
    WAIT_S,
    GatedRunner,
    acquired,
    ask,
    forever,
    gather,
    ids_of,
    never_stops,
    running,
)
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner, script_from_answers
from tests.support.waiting import until


async def test_a_request_gets_its_script_and_one_finish() -> None:
    runner = ScriptedRunner(script_from_answers({(1, 2, 3): [4, 5, 6]}, end_token=STOP))
    async with running(runner) as engine:
        steps = await gather(engine, ask([1, 2, 3]))
    assert ids_of(steps) == [4, 5, 6, STOP]
    assert [step.finish_reason for step in steps if step.finish_reason] == ["stop"]
    assert steps[-1].finish_reason == "stop"


@pytest.mark.parametrize(("context_tokens", "max_tokens", "output_count"), [(4096, 3, 3), (10, None, 7), (10, 3000, 7)])
async def test_the_length_ends_at_max_tokens_or_at_the_context(
    context_tokens: int, max_tokens: int | None, output_count: int
) -> None:
    async with running(ScriptedRunner(forever, RunnerShape(context_tokens=context_tokens))) as engine:
        steps = await gather(engine, ask([1, 2, 3], max_tokens))
    assert (len(ids_of(steps)), steps[-1].finish_reason) == (output_count, "length")


async def test_logprobs_go_with_the_tokens_where_they_are_requested() -> None:
    runner = ScriptedRunner(forever)
    async with running(runner) as engine:
        without = await gather(engine, ask([1], 5))
        request = EngineRequest([1], RowSampling(logprobs=0), max_tokens=5)
        steps = await gather(engine, request)
    assert all(not step.logprobs for step in without)
    assert all([each.token for each in step.logprobs] == step.ids for step in steps)


async def test_cached_tokens_are_reported() -> None:
    async with running(ScriptedRunner(forever, RunnerShape(page_tokens=4))) as engine:
        first = await gather(engine, ask([1] * 10, 3))
        again = await gather(engine, ask([1] * 10, 3))
        metrics = engine.metrics()
    assert (first[-1].cached_tokens, again[-1].cached_tokens) == (0, 8)
    assert (metrics.hit_tokens, metrics.generated_tokens, metrics.running) == (8, 6, 0)
    assert metrics.pages_free == metrics.pages


@pytest.mark.parametrize("seed", range(20))
async def test_together_all_get_what_they_would_alone(seed: int) -> None:
    chance = Random(seed)
    shape = RunnerShape(page_tokens=4, page_count=chance.choice([25, 60, 400]), slots=6, context_tokens=90)
    step_tokens = chance.choice([6, 16, 64])
    async with running(ScriptedRunner(echo, shape), EngineSettings(step_tokens=step_tokens)) as engine:

        async def one() -> None:
            ids = [1, 2, 0, 0, 1, 1][: chance.randint(1, 6)] * chance.randint(1, 9)
            request = ask(ids, chance.choice([None, 4, 40]), tenant=chance.choice("ab"))
            leaves_after = chance.choice([None, None, None, chance.randint(1, 20)])
            output: list[int] = []
            async with aclosing(engine.submit(request)) as steps:
                async for step in steps:
                    output += step.ids
                    if leaves_after is not None and len(output) >= leaves_after:
                        break
            expected = alone(echo, request, 90)
            assert output == (expected if leaves_after is None else expected[: len(output)])

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(one() for _ in range(40)))
        await until(lambda: engine.metrics().running == 0)
        assert engine.metrics().pages_free == shape.page_count
        assert engine.metrics().failures == 0


async def test_a_stream_that_is_left_has_no_row_in_the_next_step() -> None:
    runner = GatedRunner(forever)
    runner.gated = True
    async with running(runner) as engine:
        steps = engine.submit(ask([1, 2, 3]))
        first = asyncio.create_task(anext(steps))
        other = asyncio.create_task(gather(engine, ask([9] * 3, 50)))
        while not first.done():
            await acquired(runner.at_gate)
            runner.let.release()
        await acquired(runner.at_gate)
        await steps.aclose()
        done = len(runner.plans)
        runner.gated = False
        runner.let.release()
        await other
        await until(lambda: engine.metrics().running == 0)
        # The step that was under way when it was left still has it; none after that does.
        assert len(runner.plans[done].rows) == 2
        assert len(runner.plans) > done + 40
        assert all(len(plan.rows) == 1 for plan in runner.plans[done + 1 :])
        assert engine.metrics().generated_tokens < 70


async def test_leaving_before_the_first_token_frees_everything() -> None:
    runner = GatedRunner(forever)
    runner.gated = True
    async with running(runner) as engine:
        tasks = [asyncio.create_task(gather(engine, ask([index, 2, 3]))) for index in range(20)]
        await acquired(runner.at_gate)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        runner.gated = False
        runner.let.release()
        await until(lambda: engine.metrics().running == engine.metrics().waiting == 0)
        assert engine.metrics().pages_free == runner.page_count


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that call into the running event loop, as they do."""
    loop = asyncio.get_running_loop()
    calls: list[str] = []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
        calls.append(threading.current_thread().name)
        return call_soon_threadsafe(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return calls


async def test_a_step_reaches_the_event_loop_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    async with running(ScriptedRunner(forever, RunnerShape(slots=8))) as engine:
        await asyncio.gather(*(gather(engine, ask([index], 50)) for index in range(8)))
        assert 0 < calls.count("gpt-oss engine") <= engine.metrics().steps


async def test_an_idle_engine_uses_no_processor_time() -> None:
    async with running(ScriptedRunner(forever)) as engine:
        await gather(engine, ask([1], 20))
        await until(lambda: engine.metrics().running == 0)
        steps, began = engine.metrics().steps, time.process_time()
        await asyncio.sleep(0.3)
        assert engine.metrics().steps == steps
        assert time.process_time() - began < 0.1


class SlowReader(Sink[EngineStep]):
    """Is not ready after its first step until it `may_go_on`."""

    def __init__(self) -> None:
        self.read_count = 0
        self.may_go_on = asyncio.Event()

    def write(self, batch: Sequence[EngineStep]) -> bool:
        self.read_count += sum(len(step.ids) for step in batch)
        return self.may_go_on.is_set()

    async def ready(self) -> None:
        await self.may_go_on.wait()


async def test_a_reader_that_does_not_read_stops_its_sequence_and_no_other() -> None:
    async with running(ScriptedRunner(never_stops(), RunnerShape(slots=1, context_tokens=10_000))) as engine:
        slow = SlowReader()
        reading = asyncio.create_task(engine.stream(ask([1, 2], 3 * MAX_UNREAD_TOKENS), slow))
        await until(lambda: slow.read_count > 0 and engine.metrics().running == 0)
        assert engine.metrics().generated_tokens <= slow.read_count + MAX_UNREAD_TOKENS + 1
        # The only slot is free again.
        assert len(ids_of(await gather(engine, ask([2, 2], 20)))) == 20
        slow.may_go_on.set()
        await asyncio.wait_for(reading, WAIT_S)
        assert slow.read_count == 3 * MAX_UNREAD_TOKENS


async def test_a_blocked_event_loop_does_not_gather_news_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_calls(monkeypatch)
    async with running(ScriptedRunner(never_stops(), RunnerShape(slots=2))) as engine:
        readers = [SlowReader() for _ in range(2)]
        tasks = [asyncio.create_task(engine.stream(ask([index], 3000), reader)) for index, reader in enumerate(readers)]
        await until(lambda: all(reader.read_count for reader in readers))
        read = [reader.read_count for reader in readers]
        calls.clear()
        ends = time.monotonic() + WAIT_S
        while engine.metrics().running and time.monotonic() < ends:
            pass
        assert engine.metrics().running == 0
        assert calls.count("gpt-oss engine") <= 1
        assert engine.metrics().generated_tokens <= sum(read) + 2 * (MAX_UNREAD_TOKENS + 1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_requests_that_can_never_fit_are_refused() -> None:
    async with running(ScriptedRunner(forever, RunnerShape(context_tokens=20))) as engine:
        with pytest.raises(ContextLengthExceeded, match="20 tokens; with room for an answer at most 19 fit"):
            await gather(engine, ask([1] * 20))
        assert len(ids_of(await gather(engine, ask([1] * 19)))) == 1
        with pytest.raises(InvalidRequest, match="empty"):
            await gather(engine, ask([]))


async def test_the_waiting_room_is_bounded_for_all_and_for_each_tenant() -> None:
    runner = GatedRunner(forever, RunnerShape(slots=1))
    runner.gated = True
    settings = EngineSettings(step_tokens=64, max_waiting=3, max_tenant_waiting=2)
    async with running(runner, settings) as engine:
        tasks = [asyncio.create_task(gather(engine, ask([1], 1, tenant="a"))) for _ in range(3)]
        await acquired(runner.at_gate)
        with pytest.raises(Overloaded, match="your requests"):
            await gather(engine, ask([1], 1, tenant="a"))
        tasks.append(asyncio.create_task(gather(engine, ask([1], 1, tenant="b"))))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Too many requests"):
            await gather(engine, ask([1], 1, tenant="c"))
        runner.gated = False
        runner.let.release()
        await asyncio.gather(*tasks)
        assert len(ids_of(await gather(engine, ask([1], 1, tenant="a")))) == 1


async def test_nothing_of_a_finished_request_remains() -> None:
    async with running(ScriptedRunner(forever)) as engine:
        await gather(engine, ask([1, 2, 3], 3))
        await until(lambda: engine.metrics().running == 0)
        await gather(engine, ask([1, 2, 3], 3))

        def count_kept() -> int:
            gc.collect()
            return sum(type(each).__name__ in ("_Stream", "TokenSequence") for each in gc.get_objects())

        await until(lambda: count_kept() <= 1)  # the thread may still be at the end of its step
