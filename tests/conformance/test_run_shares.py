"""Background runs of several tenants on each store: workers of two processes serve the tenants in turn."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from apis.errors import StackError
from apis.fair_share import Tenants
from apis.storage.kv_store import Put
from providers.responses.background.ranks import QueueLimits, Rank
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs, StoredRequest
from providers.responses.background.workers import BackgroundConfig, BackgroundWorkers
from providers.responses.events.ids import ResponseIds
from tests.conformance.kv_store import Backend

REQUEST = StoredRequest(msgspec.Raw(b"{}"), msgspec.Raw(b"[]"), 0, 1)
SEVERAL = Tenants(frozenset({"loud", "quiet"}))
BOUND_S = 20


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


class Fleet:
    """Workers of several processes over one store, which execute a run until the test lets it end."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ends: dict[ResponseRef, asyncio.Event] = {}
        self.workers: list[BackgroundWorkers] = []
        self._changed = asyncio.Condition()

    async def open(self, backend: Backend, config: BackgroundConfig) -> Runs:
        runs = Runs(await backend.open(), QueueLimits(100, 100), lease_s=10, retention_s=100)
        self.workers.append(BackgroundWorkers(runs, self._execute, config, SEVERAL))
        return runs

    async def _execute(self, claimed: ClaimedRun, _: StackError | None) -> None:
        self.ends[claimed.ref] = asyncio.Event()
        self.began.append(claimed.ref.tenant)
        async with self._changed:
            self._changed.notify_all()
        await self.ends[claimed.ref].wait()
        await claimed.lease.release(claimed.lease.end_ops()[1:])

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(holds)

    def end_oldest(self) -> None:
        next(event for event in self.ends.values() if not event.is_set()).set()

    async def close(self) -> None:
        for event in self.ends.values():
            event.set()
        for workers in self.workers:
            await workers.close()


async def wait_in_queue(runs: Runs, tenant: str, rank: int) -> ResponseRef:
    ref = ResponseRef(tenant, ResponseIds().response_id)
    log = Put(f"{tenant}/event/{ref.id}/00000000", b"x y\n")
    await runs.add(ref, Rank(rank), REQUEST, [log], is_portable=True, start_now=False)
    return ref


async def test_waiting_runs_are_served_in_turn_by_tenant_at_any_rank(backend: Backend) -> None:
    """A rank orders the runs of its tenant, and a flood by one tenant delays another by one run."""
    fleet = Fleet()
    runs = await fleet.open(backend, BackgroundConfig(max_running=1, max_tenant_running=1, poll_s=0.05))
    for _ in range(5):
        await wait_in_queue(runs, "loud", 0)
    late, soon = await wait_in_queue(runs, "quiet", 9), await wait_in_queue(runs, "quiet", 5)
    fleet.workers[0].start()
    for count in range(1, 8):
        await fleet.until(lambda count=count: len(fleet.began) == count)
        fleet.end_oldest()
    await fleet.close()
    assert fleet.began == ["loud", "quiet", "loud", "quiet", "loud", "loud", "loud"]
    assert list(fleet.ends).index(soon) < list(fleet.ends).index(late)


async def test_a_tenants_flood_leaves_places_of_each_process_for_another_tenant(backend: Backend) -> None:
    """By default a tenant runs at most a quarter of one process's runs, counted over all processes."""
    fleet = Fleet()
    config = BackgroundConfig(max_running=8, poll_s=0.05)
    one, other = await fleet.open(backend, config), await fleet.open(backend, config)
    for runs in (one, other):
        for _ in range(6):
            await wait_in_queue(runs, "loud", 0)
    for workers in fleet.workers:
        workers.start()
    await fleet.until(lambda: len(fleet.began) >= 2)
    for runs in (one, other):
        await wait_in_queue(runs, "quiet", 9)
    await fleet.until(lambda: fleet.began.count("quiet") == 2)
    running, begun = await one.count_running("loud", 100), fleet.began.count("loud")
    await fleet.close()
    assert running <= 4  # two processes may count at the same moment
    assert begun <= 4
