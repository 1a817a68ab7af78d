"""BackgroundWorkers: the runs of background responses that this process has claimed, bounded and drainable."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from apis.batches.spare_capacity import SpareCapacity
from apis.errors import StackError
from apis.fair_share import ONE_TENANT, FairShare, Place, Tenants
from apis.ticks import wait_for_tick
from providers.common.supervision import supervise
from providers.responses.background.deferred import DeferredRuns
from providers.responses.background.ranks import QueueLimits
from providers.responses.background.runs import MAX_LOST_WORKERS, ClaimedRun, ResponseRef, Runs
from providers.responses.background.worker_registry import WorkerRegistry

_log = logging.getLogger(__name__)
_MAX_COUNTED_RUNS = 1000
"""Limit of a tenant's running runs where none is configured and there is one tenant."""
_CLOSE_TIMEOUT_S = 0.4
"""Seconds that cancelled runs have to release their leases."""


class BackgroundConfig(BaseModel):
    """Limits of background responses: `max_running` at a time in this process, `max_tenant_running` of one tenant in
    all processes, by default a quarter of `max_running` where there are several tenants; `max_waiting` of a tenant may
    wait, each for `queue_timeout_s`, and `max_deferred` with a completion window, each until its end; the places of
    those are `batches.max_running`. A response may take `timeout_s`. A
    process that does not renew a lease within `lease_s` loses the run to another one. Events can be read for
    `event_retention_s` after the latest end that their response can have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_running: int = Field(default=64, ge=1)
    max_tenant_running: int | None = Field(default=None, ge=1)
    max_waiting: int = Field(default=100, ge=1)
    max_deferred: int = Field(default=1000, ge=1, le=10_000)
    queue_timeout_s: float = Field(default=600, gt=0)
    timeout_s: float = Field(default=3600, gt=0)
    lease_s: float = Field(default=10, gt=0, le=60)
    poll_s: float = Field(default=0.5, gt=0, le=10)
    event_retention_s: float = Field(default=3600, gt=0)

    def find_tenant_limit(self, tenants: Tenants) -> int:
        """Return the number of one tenant's runs that may run at a time in all processes."""
        if self.max_tenant_running is not None:
            return self.max_tenant_running
        return max(1, self.max_running // 4) if tenants.are_several else _MAX_COUNTED_RUNS

    @property
    def queue_limits(self) -> QueueLimits:
        """The limits of one tenant's queues."""
        return QueueLimits(self.max_waiting, self.queue_timeout_s, self.max_deferred)

    @property
    def max_duration_s(self) -> float:
        """Longer than a response can take in seconds, waiting and the loss of a worker included."""
        return self.queue_timeout_s + self.timeout_s + 10 * self.lease_s

    @property
    def event_ttl_s(self) -> float:
        """Seconds that an event stays in the log."""
        return self.queue_timeout_s + self.timeout_s + self.event_retention_s


@dataclass(frozen=True, slots=True)
class BackgroundMetrics:
    """Background responses: those that this process runs, and those of the whole store that wait, as of the last look,
    which is at most a quarter of a lease old; of one tenant at most `max_waiting` are counted."""

    background_running: int
    background_waiting: int


class BackgroundWorkers:
    """Claims waiting and orphaned runs, and executes each in a task of its own.

    A free place goes to the waiting tenant that has the fewest runs in all processes; among equals, to the one that
    this process served the longest time ago.
    """

    def __init__(
        self,
        runs: Runs,
        execute: Callable[[ClaimedRun], Awaitable[None]],
        config: BackgroundConfig,
        tenants: Tenants = ONE_TENANT,
        registry: WorkerRegistry | None = None,
    ) -> None:
        """`registry` is where this process reports itself, if anywhere."""
        self._registry = registry
        self._runs = runs
        self._execute = execute
        self._config = config
        self._wakeup = asyncio.Event()
        self._tasks: dict[ResponseRef, asyncio.Task[None]] = {}
        self._tenant_limit = config.find_tenant_limit(tenants)
        self._places = FairShare(
            "background responses",
            config.max_running,
            tenant_places=self._tenant_limit,
            several_tenants=tenants.are_several,
        )
        self._last_turns: dict[str, int] = {}
        self._last_try: ResponseRef | None = None
        self._suspects: set[ResponseRef] = set()
        self._capacity: SpareCapacity | None = None
        self._claiming = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._deferred = DeferredRuns(
            runs,
            lambda claimed: self.start_run(claimed, None),
            tenant_limit=self._tenant_limit,
            poll_s=4 * config.poll_s,  # they have hours, and those of this process wake it
        )
        self._waiting_count = 0
        self.is_draining = False
        """Once true, no more runs are claimed."""

    def start(self) -> None:
        self._watcher = supervise("the watcher of background responses", self._watch)

    async def try_reserve_place(self, tenant: str) -> Place | None:
        """Return a place if one more run of the tenant can start here now, for `start_run`."""
        others_wait = await self._runs.has_waiting(tenant)
        running = await self._runs.count_running(tenant, self._tenant_limit)
        # no await from here on: another task could take the place
        if self.is_draining or others_wait or max(running, self._places.used_by(tenant)) >= self._tenant_limit:
            return None
        return self._places.try_acquire(tenant)

    def wake(self) -> None:
        """Look for waiting runs now instead of after the poll interval."""
        self._wakeup.set()
        self._deferred.wake()

    def start_deferred(self, capacity: SpareCapacity) -> None:
        """Begin runs with a completion window, too, as `capacity` admits them."""
        self._capacity = capacity
        capacity.isolate_from(self._suspects)
        self._deferred.start(capacity)

    def start_run(self, claimed_run: ClaimedRun, place: Place | None) -> "asyncio.Task[None]":
        """Execute a claimed run in a task, which releases its place in the end."""
        task = asyncio.create_task(self._run_claimed(claimed_run))
        self._tasks[claimed_run.ref] = task
        task.add_done_callback(lambda ended: self._end_run(claimed_run.ref, ended, place))
        return task

    def _end_run(self, ref: ResponseRef, task: "asyncio.Task[None]", place: Place | None) -> None:
        """Forget a run that has ended here: also one whose task was cancelled before its first step."""
        if self._tasks.get(ref) is task:
            del self._tasks[ref]
            self._suspects.discard(ref)
        if place is not None:
            place.release()
        self._wakeup.set()

    def stop_run(self, ref: ResponseRef) -> None:
        """Cancel a run, if this process executes it."""
        task = self._tasks.get(ref)
        if task is not None:
            task.cancel()

    async def stop_all(self) -> None:
        """Cancel all runs, also one that is just claimed. Each hands its lease back, or ends."""
        await self._stop_claiming()
        await asyncio.sleep(0)  # a run that is cancelled before its first step would hand nothing back
        if self._tasks:
            _log.info(
                "%d background responses stop here, and go on with the next start where they can", len(self._tasks)
            )
        for ref in [*self._tasks]:
            self.stop_run(ref)

    def metrics(self) -> BackgroundMetrics:
        return BackgroundMetrics(len(self._tasks), self._waiting_count)

    async def drain(self) -> None:
        """Claim no more runs, and return when the last one has ended."""
        await self._stop_claiming()
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    async def _stop_claiming(self) -> None:
        self.is_draining = True
        self._wakeup.set()
        await self._deferred.stop()
        async with self._claiming:  # a run that was just claimed is started
            if self._watcher is not None:
                self._watcher.cancel()

    async def close(self) -> None:
        """Cancel all runs, so that other workers can resume them at once."""
        self.is_draining = True
        await self._deferred.stop(_CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # a run that is cancelled before its first step would hand nothing back
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
        if self._registry is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._registry.remove()

    async def _watch(self) -> None:
        poll_s, swept_at = self._config.poll_s, 0.0
        while not self.is_draining:
            self._wakeup.clear()
            if self._registry is not None:
                await self._registry.report(len(self._tasks))
            is_sweep_due = time.monotonic() - swept_at > self._config.lease_s / 4
            swept_at = time.monotonic() if is_sweep_due else swept_at
            try:
                async with self._claiming:
                    await self._claim_queued()
                    if is_sweep_due:
                        await self._claim_orphaned()
                if is_sweep_due:
                    self._waiting_count = len(await self._runs.list_waiting(self._config.max_waiting))
            except StackError as exc:
                _log.warning("background responses wait: %s", exc.message)
            await wait_for_tick(self._wakeup, poll_s)

    async def _claim_queued(self) -> None:
        if self._places.used >= self._config.max_running:
            return
        waiting: dict[str, deque[tuple[str, ResponseRef]]] = {}
        for key, ref in await self._runs.list_waiting(self._config.max_running):
            waiting.setdefault(ref.tenant, deque()).append((key, ref))
        running = {tenant: await self._runs.count_running(tenant, self._tenant_limit) for tenant in waiting}
        self._last_turns = {tenant: turn for tenant, turn in self._last_turns.items() if tenant in waiting}
        while waiting and not self.is_draining:
            tenant = min(waiting, key=lambda name: (running[name], self._last_turns.get(name, 0)))
            place = self._places.try_acquire(tenant) if running[tenant] < self._tenant_limit else None
            if place is None or not waiting[tenant]:
                del waiting[tenant]
            elif await self._claim_waiting(*waiting[tenant].popleft(), place):
                running[tenant] += 1
                self._last_turns[tenant] = max(self._last_turns.values(), default=0) + 1

    async def _claim_waiting(self, key: str, ref: ResponseRef, place: Place) -> bool:
        """Start a waiting run; return False, and release the place, if another worker has it."""
        with ExitStack() as claim_stack:
            claim_stack.enter_context(place)
            claimed = await self._claim(ref, key)
            if claimed is not None:
                self.start_run(claimed, place)
                claim_stack.pop_all()
        return claimed is not None

    async def _claim_orphaned(self) -> None:
        """Claim orphaned runs beyond all limits: they have begun, and their clients wait."""
        for ref in await self._runs.list_orphaned():
            if not self.is_draining and ref not in self._tasks and (claimed := await self._claim(ref)):
                self.start_run(claimed, None)

    async def _claim(self, ref: ResponseRef, key: str = "") -> ClaimedRun | None:
        """Claim a run, unless it has lost workers and may take other work down with it: one that has one worker left to
        lose where another such run is executed here, and any while a line of a batch is executed alone."""
        max_lost = MAX_LOST_WORKERS - (2 if self._last_try in self._tasks else 1)
        if self._capacity is not None and self._capacity.is_running_alone:
            max_lost = 0
        self._suspects.add(ref)  # before it is claimed: no line begins alone meanwhile
        claimed, has_lost = None, False
        try:
            claimed = await self._runs.claim(ref, key, max_lost=max_lost)
            has_lost = claimed is not None and len(claimed.run.workers) > 1
        finally:
            if not has_lost:
                self._suspects.discard(ref)
        if claimed is not None and len(claimed.run.workers) == MAX_LOST_WORKERS:
            self._last_try = ref
        return claimed

    async def _run_claimed(self, claimed_run: ClaimedRun) -> None:
        try:
            await self._execute(claimed_run)
        except StackError as exc:
            _log.warning("a background response goes to another worker: %s", exc.message)
