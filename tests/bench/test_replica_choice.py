"""Prints the share of possible prefix hits that chains find over three replicas, and the time of the slowest request.

The choice of a replica is the product's. The engines are simulated, in virtual time: they batch, compute prompts and
cache prefixes as the gpt-oss engine on an H200 does (README.md). `pytest -s -m bench`. STACK_SEEDS says how many
draws each figure is the mean of (4 by default).
"""

import asyncio
import logging
import os
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import pytest

from apis.chat import ChatRequest
from apis.deltas import Delta, TextDelta
from apis.errors import UpstreamError
from apis.sink import Sink
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.chat_completions.replicas import ReplicaPolicy, Upstreams
from tests.support.virtual_time import run_in_virtual_time

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
SEEDS = int(os.environ.get("STACK_SEEDS", "4"))
STEPS: Final = ((1, 2.0), (2, 2.65), (4, 2.9), (8, 3.6), (16, 4.3), (32, 4.9), (64, 5.75), (128, 7.8))
"""Sequences that generate together, and the milliseconds of one token of each."""
PROMPT_TOKENS_PER_S: Final = 50_000
STEP_TOKENS: Final = 2048
"""Tokens of prompts that are computed in one step."""
SHARED_TOKENS: Final = 1000
"""The beginning that all chains share; each chain has 4,000 tokens of its own after it."""
OWN_TOKENS: Final = 4000
CHAINS: Final = 3
TURNS: Final = 5
SLOWNESS: Final = 4.0
Scenario = Literal["equal", "slow", "killed", "joins"]


def step_s(batch: int) -> float:
    at = bisect_left([size for size, _ in STEPS], max(1, batch))
    size, milliseconds = STEPS[min(at, len(STEPS) - 1)]
    if size > batch and at:
        below, less = STEPS[at - 1]
        milliseconds = less + (milliseconds - less) * (batch - below) / (size - below)
    return milliseconds / 1000


@dataclass(eq=False)
class Job:
    """A request in an engine: the tokens that are left to compute and to generate."""

    prompt: int
    output: int
    has_begun: "asyncio.Future[None]"
    has_ended: "asyncio.Future[None]"


@dataclass(frozen=True)
class Turn:
    """One turn of a chain: the tokens of its prompt and output, and those of the prompt that were computed before."""

    chain: str
    prompt: int
    output: int
    computed_before: int


@dataclass
class Figures:
    """The figures of one run: prefix tokens of later turns, and the seconds of each request."""

    hits: int = 0
    possible: int = 0
    failed: int = 0
    latencies_s: list[float] = field(default_factory=list[float])


class Engine:
    """A simulated engine, in the place of a `ChatCompletions`."""

    def __init__(self, number: int, slowness: float, turns: dict[str, Turn], figures: Figures) -> None:
        self.base_url = f"http://replica-{number}:8000/v1"
        self.is_dead = False
        self._slowness = slowness
        self._turns = turns
        self._figures = figures
        self._cached: dict[str, int] = {}
        self._jobs: list[Job] = []
        self._work = asyncio.Event()
        self.task = asyncio.create_task(self._generate())

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        if self.is_dead:
            raise UpstreamUnavailable("The server is down.")
        turn = self._turns[str(request.prompt_cache_key)]
        hits = max(self._cached.get(turn.chain, 0), SHARED_TOKENS if self._cached else 0)
        if turn.computed_before:
            self._figures.hits += hits
            self._figures.possible += turn.computed_before
        loop = asyncio.get_running_loop()
        job = Job(turn.prompt - hits, turn.output, loop.create_future(), loop.create_future())
        self._jobs.append(job)
        self._work.set()
        await job.has_begun
        await sink.put((TextDelta("x"),))
        await job.has_ended
        self._cached[turn.chain] = turn.prompt + turn.output

    def kill(self) -> None:
        self.is_dead = True
        self._cached.clear()
        for job in self._jobs:
            future = job.has_ended if job.has_begun.done() else job.has_begun
            future.set_exception(UpstreamUnavailable("The server has ended."))
        self._jobs.clear()

    async def _generate(self) -> None:
        while True:
            if not self._jobs:
                self._work.clear()
                await self._work.wait()
            jobs, prompts = self._jobs[:], 0
            for job in jobs:
                computed = min(job.prompt, STEP_TOKENS - prompts)
                job.prompt -= computed
                prompts += computed
            ready = [job for job in jobs if not job.prompt]
            await asyncio.sleep(self._slowness * (step_s(len(ready)) + prompts / PROMPT_TOKENS_PER_S))
            for job in ready:
                if job not in self._jobs:
                    continue
                job.output -= 1
                if not job.has_begun.done():
                    job.has_begun.set_result(None)
                if not job.output:
                    job.has_ended.set_result(None)
                    self._jobs.remove(job)


class Nowhere(Sink[Delta]):
    def write(self, batch: Sequence[Delta]) -> bool:
        return True


async def simulate(scenario: Scenario, clients: int, workers: int, seed: int) -> Figures:
    """Let each client go through its chains, on workers by chance; the scenario's event comes after half of all."""
    dice, figures, turns = random.Random(seed), Figures(), dict[str, Turn]()
    engines = [Engine(n, SLOWNESS if scenario == "slow" and not n else 1.0, turns, figures) for n in range(3)]
    first = engines[0]
    first.is_dead = scenario == "joins"
    pools = [Upstreams(cast("Any", engines), ReplicaPolicy(retry_delay_s=0.01)) for _ in range(workers)]
    count, half = 0, clients * CHAINS * TURNS // 2

    def set_health() -> None:
        for pool in pools:
            pool.upstreams[0].record_health(is_healthy=not first.is_dead)
            if not first.is_dead:
                pool.upstreams[0].breaker.record_success()

    def pass_half() -> None:
        if scenario == "killed":
            first.kill()
            asyncio.get_running_loop().call_later(0.05, set_health)
        elif scenario == "joins":
            first.is_dead = False
            set_health()

    async def take_turns(chain: str) -> None:
        nonlocal count
        prompt, computed_before = SHARED_TOKENS + OWN_TOKENS, 0
        for _ in range(TURNS):
            prompt += dice.choice((50, 200, 500))
            turns[chain] = turn = Turn(chain, prompt, dice.randint(40, 250), computed_before)
            count += 1
            if count == half:
                pass_half()
            fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt_cache_key": chain}
            request = ChatRequest.model_validate(fields)
            began_at = asyncio.get_running_loop().time()
            try:
                await dice.choice(pools).stream(request, Nowhere())
            except UpstreamError:  # it had begun where it was killed
                figures.failed += 1
                continue
            figures.latencies_s.append(asyncio.get_running_loop().time() - began_at)
            computed_before = prompt = prompt + turn.output

    async def take_chains(client: int) -> None:
        await asyncio.sleep(dice.uniform(0, 0.2))
        for number in range(CHAINS):
            await take_turns(f"{seed}/{client}/{number}")

    set_health()
    await asyncio.gather(*(take_chains(client) for client in range(clients)))
    for engine in engines:
        engine.task.cancel()
    return figures


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("scenario", ["equal", "slow", "killed", "joins"])
def test_hits_and_the_slowest_request_by_clients(scenario: Scenario, workers: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for clients in (1, 4, 8, 16, 32, 64):
            runs = [run_in_virtual_time(simulate(scenario, clients, workers, seed)) for seed in range(SEEDS)]
            hits = sum(run.hits for run in runs) / max(1, sum(run.possible for run in runs))
            p50, p99 = (statistics.mean(percentile(run.latencies_s, share) for run in runs) for share in (0.5, 0.99))
            slowest = statistics.mean(max(run.latencies_s) for run in runs)
            print(
                f"{scenario}, {workers} workers, {clients} clients: {hits:.1%} of the possible hits; "
                f"{p50:.2f} s p50, {p99:.2f} s p99, {slowest:.2f} s slowest; {sum(run.failed for run in runs)} cut off"
            )
            assert hits > 0.5
    finally:
        logging.disable(logging.NOTSET)
