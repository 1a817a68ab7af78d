"""BackgroundWorkers: the runs of background responses that this process has claimed, bounded and drainable."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress

from pydantic import BaseModel, ConfigDict, Field

from apis.errors import StackError
from providers.responses.background.runs import ClaimedRun, ResponseRef, Runs

_log = logging.getLogger(__name__)
_SCAN_LIMIT = 1000
"""Waiting runs that one look at the queue reads."""
_CLOSE_TIMEOUT_S = 0.4
"""Seconds that cancelled runs have to release their leases."""


class BackgroundConfig(BaseModel):
    """Limits of background responses: `max_running` at a time in this process, `max_tenant_running` of one tenant in
    all processes; `max_waiting` of a tenant may wait, each for `queue_timeout_s`. A response may take `timeout_s`. A
    process that does not renew a lease within `lease_s` loses the run to another one. Events can be read for
    `event_retention_s` after the latest end that their response can have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_running: int = Field(default=64, ge=1)
    max_tenant_running: int = Field(default=64, ge=1)
    max_waiting: int = Field(default=100, ge=1)
    queue_timeout_s: float = Field(default=600, gt=0)
    timeout_s: float = Field(default=3600, gt=0)
    lease_s: float = Field(default=10, gt=0, le=60)
    poll_s: float = Field(default=0.5, gt=0, le=10)
    event_retention_s: float = Field(default=3600, gt=0)

    @property
    def max_duration_s(self) -> float:
        """Longer than a response can take in seconds, waiting and the loss of a worker included."""
        return self.queue_timeout_s + self.timeout_s + 10 * self.lease_s

    @property
    def event_ttl_s(self) -> float:
        """Seconds that an event stays in the log."""
        return self.queue_timeout_s + self.timeout_s + self.event_retention_s


class BackgroundWorkers:
    """Claims waiting and orphaned runs, and executes each in a task of its own."""

    def __init__(self, runs: Runs, execute: Callable[[ClaimedRun], Awaitable[None]], config: BackgroundConfig) -> None:
        self._runs = runs
        self._execute = execute
        self._config = config
        self._wakeup = asyncio.Event()
        self._tasks: dict[ResponseRef, asyncio.Task[None]] = {}
        self._reserved_slots: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self.is_draining = False
        """Once true, no more runs are claimed."""

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    @asynccontextmanager
    async def reserve_slot(self, tenant: str) -> AsyncGenerator[bool]:
        """Yield whether one more run of the tenant can start here now; its slot is reserved within the context."""
        limit = self._config.max_tenant_running
        others_wait = await self._runs.has_waiting(tenant)
        running = await self._runs.count_running(tenant, limit)
        # no await from here to the reservation: another task could take the slot
        running_here = sum(ref.tenant == tenant for ref in self._tasks)
        is_free = not (self.is_draining or others_wait or self._is_full)
        is_free = is_free and max(running, running_here) + self._reserved_slots[tenant] < limit
        with self._hold_slot(tenant) if is_free else nullcontext():
            yield is_free

    @contextmanager
    def _hold_slot(self, tenant: str) -> Generator[None]:
        """Reserve a slot for a run that is about to start."""
        self._reserved_slots[tenant] += 1
        try:
            yield
        finally:
            self._reserved_slots[tenant] -= 1
            if not self._reserved_slots[tenant]:
                del self._reserved_slots[tenant]

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) + self._reserved_slots.total() >= self._config.max_running

    def wake(self) -> None:
        """Look for waiting runs now instead of after the poll interval."""
        self._wakeup.set()

    def start_run(self, claimed_run: ClaimedRun) -> None:
        """Execute a claimed run in a task."""
        task = asyncio.create_task(self._run_claimed(claimed_run))
        self._tasks[claimed_run.ref] = task

    def stop_run(self, ref: ResponseRef) -> None:
        """Cancel a run, if this process executes it."""
        task = self._tasks.get(ref)
        if task is not None:
            task.cancel()

    async def drain(self) -> None:
        """Claim no more runs, and return when the last one has ended."""
        self.is_draining = True
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    async def close(self) -> None:
        """Cancel all runs, so that other workers can resume them at once."""
        self.is_draining = True
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)

    async def _watch(self) -> None:
        poll_s, swept_at = self._config.poll_s, 0.0
        while not self.is_draining:
            self._wakeup.clear()
            try:
                await self._claim_queued()
                if time.monotonic() - swept_at > self._config.lease_s / 4:
                    swept_at = time.monotonic()
                    await self._claim_orphaned()
            except StackError as exc:
                _log.warning("background responses wait: %s", exc.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await self._wakeup.wait()

    async def _claim_queued(self) -> None:
        running: dict[str, int] = {}
        if self._is_full:
            return
        for key, ref in await self._runs.list_waiting(_SCAN_LIMIT):
            if self._is_full or self.is_draining:
                return
            if ref.tenant not in running:
                running[ref.tenant] = await self._runs.count_running(ref.tenant, self._config.max_tenant_running)
            if running[ref.tenant] >= self._config.max_tenant_running:
                continue
            with self._hold_slot(ref.tenant):
                if claimed := await self._runs.claim(ref, key):
                    running[ref.tenant] += 1
                    self.start_run(claimed)

    async def _claim_orphaned(self) -> None:
        """Claim orphaned runs beyond all limits: they have begun, and their clients wait."""
        for ref in await self._runs.list_orphaned():
            if not self.is_draining and ref not in self._tasks and (claimed := await self._runs.claim(ref)):
                self.start_run(claimed)

    async def _run_claimed(self, claimed_run: ClaimedRun) -> None:
        try:
            await self._execute(claimed_run)
        except StackError as exc:
            _log.warning("a background response goes to another worker: %s", exc.message)
        finally:
            if self._tasks.get(claimed_run.ref) is asyncio.current_task():
                del self._tasks[claimed_run.ref]
            self._wakeup.set()
