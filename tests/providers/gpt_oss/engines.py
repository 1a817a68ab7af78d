"""Engines to test with: a runner that can be stopped before a step or made to fail, and helpers that submit and
wait."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

from providers.inference.gpt_oss.engine.engine import Engine, EngineSettings, EngineStep
from providers.inference.gpt_oss.engine.runner import Plan
from providers.inference.gpt_oss.engine.sampling import SampledToken
from providers.inference.gpt_oss.engine.sequence import EngineRequest
from tests.providers.gpt_oss.driving import GREEDY, STOP
from tests.support.models.scripted_runner import RunnerShape, ScriptedRunner, TokenScript

WAIT_S = 10.0


class GatedRunner(ScriptedRunner):
    """Steps one at a time once `gated` is set: each then waits for a `let` and says so by `at_gate`."""

    def __init__(self, script: TokenScript, shape: RunnerShape | None = None) -> None:
        super().__init__(script, shape)
        self.gated = False
        self.at_gate = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.plans: list[Plan] = []
        self.failing: Callable[[Plan], bool] = lambda plan: False

    def step(self, plan: Plan, masks: Mapping[int, bytes]) -> Mapping[int, SampledToken]:
        if self.gated:
            self.at_gate.release()
            assert self.let.acquire(timeout=WAIT_S)
        self.plans.append(plan)
        if self.failing(plan):
            self._memory.clear()
            raise RuntimeError("the device is lost")
        return super().step(plan, masks)


@asynccontextmanager
async def running(runner: ScriptedRunner, settings: EngineSettings | None = None) -> AsyncGenerator[Engine]:
    engine = Engine(runner, settings or EngineSettings(step_tokens=64))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def ask(ids: Sequence[int], max_tokens: int | None = None, tenant: str = "") -> EngineRequest:
    return EngineRequest(ids, GREEDY, max_tokens=max_tokens, stop_ids=(STOP,), tenant=tenant)


async def gather(engine: Engine, request: EngineRequest) -> list[EngineStep]:
    async with asyncio.timeout(WAIT_S), aclosing(engine.submit(request)) as steps:
        return [step async for step in steps]


def ids_of(steps: Sequence[EngineStep]) -> list[int]:
    return [token for step in steps for token in step.ids]


async def acquired(semaphore: threading.Semaphore) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=WAIT_S)


def forever(tokens: Sequence[int]) -> int:
    return 1


def never_stops() -> TokenScript:
    """Long sequences are compared whole by the scripted runner, so their script at least is to be short."""
    return lambda tokens: len(tokens) % 5
