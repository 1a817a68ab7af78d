"""Workers: the part that this process has in the background responses of all, bounded, and given up on a drain."""

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
_CLOSE_TIMEOUT_S = 0.4


class BackgroundConfig(BaseModel):
    """Background responses: `max_running` at a time in this process, `max_tenant_running` of one tenant in all
    processes; `max_waiting` of a tenant may wait, for `queue_timeout_s`. One may take `timeout_s`. A process that is
    silent for `lease_s` has lost its responses to others. `event_retention_s` after the last moment that a response
    can have, its stream cannot be read any more."""

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
        """More than a response can take from its first moment to its end, with a worker lost on the way."""
        return self.queue_timeout_s + self.timeout_s + 10 * self.lease_s


class BackgroundWorkers:
    """Claims what waits and what others left, and has `play` bring each to its end."""

    def __init__(self, runs: Runs, execute: Callable[[ClaimedRun], Awaitable[None]], config: BackgroundConfig) -> None:
        self._runs = runs
        self._execute = execute
        self._config = config
        self._wakeup = asyncio.Event()
        self._tasks: dict[ResponseRef, asyncio.Task[None]] = {}
        self._reserved_slots: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self.is_draining = False
        """Once true, what comes to the end of a step is left to others."""

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    @asynccontextmanager
    async def reserve_slot(self, tenant: str) -> AsyncGenerator[bool]:
        """Whether one more of the tenant's can begin here at once, kept for it within the context; else it waits."""
        limit = self._config.max_tenant_running
        others_wait = await self._runs.has_waiting(tenant)
        running = await self._runs.count_running(tenant, limit)
        # from here to the reservation nobody else in this process comes between
        here = sum(ref.tenant == tenant for ref in self._tasks)
        is_room = not (self.is_draining or others_wait or self._is_full)
        is_room = is_room and max(running, here) + self._reserved_slots[tenant] < limit
        with self._hold_slot(tenant) if is_room else nullcontext():
            yield is_room

    @contextmanager
    def _hold_slot(self, tenant: str) -> Generator[None]:
        """Nobody else gets the room of one that is about to begin."""
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
        """Something waits."""
        self._wakeup.set()

    def start_run(self, claimed_run: ClaimedRun) -> None:
        """Play a run that is claimed."""
        task = asyncio.create_task(self._run_claimed(claimed_run))
        self._tasks[claimed_run.ref] = task

    def stop_run(self, ref: ResponseRef) -> None:
        """Leave a run, if it is played here."""
        task = self._tasks.get(ref)
        if task is not None:
            task.cancel()

    async def drain(self) -> None:
        """Claim nothing more, and return when nothing is played any more."""
        self.is_draining = True
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    async def close(self) -> None:
        """Leave all runs, so that others can go on with them at once."""
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
        """What was left is taken beyond all bounds: it has begun, and somebody waits for it."""
        for ref in await self._runs.list_orphaned():
            if not self.is_draining and ref not in self._tasks and (claimed := await self._runs.claim(ref)):
                self.start_run(claimed)

    async def _run_claimed(self, claimed_run: ClaimedRun) -> None:
        try:
            await self._execute(claimed_run)
        except StackError as exc:
            _log.warning("a background response was left to another worker: %s", exc.message)
        finally:
            if self._tasks.get(claimed_run.ref) is asyncio.current_task():
                del self._tasks[claimed_run.ref]
            self._wakeup.set()
