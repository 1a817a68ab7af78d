"""Workers: the part that this process has in the background responses of all, bounded, and given up on a drain."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress

from pydantic import BaseModel, ConfigDict, Field

from apis.errors import StackError
from providers.responses.background.runs import Claimed, Ref, Runs

_log = logging.getLogger(__name__)
_LOOK_AT_MOST = 1000
_LEAVE_S = 0.4


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
    def longest_s(self) -> float:
        """More than a response can take from its first moment to its end, with a worker lost on the way."""
        return self.queue_timeout_s + self.timeout_s + 10 * self.lease_s


class Workers:
    """Claims what waits and what others left, and has `play` bring each to its end."""

    def __init__(self, runs: Runs, play: Callable[[Claimed], Awaitable[None]], config: BackgroundConfig) -> None:
        self._runs = runs
        self._play = play
        self._config = config
        self._woken = asyncio.Event()
        self._tasks: dict[Ref, asyncio.Task[None]] = {}
        self._coming: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self.draining = False
        """Once true, what comes to the end of a step is left to others."""

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    @asynccontextmanager
    async def room(self, tenant: str) -> AsyncGenerator[bool]:
        """Whether one more of the tenant's can begin here at once, kept for it within the context; else it waits."""
        limit = self._config.max_tenant_running
        others_wait = await self._runs.some_wait(tenant)
        running = await self._runs.count(tenant, limit)
        # from here to the reservation nobody else in this process comes between
        here = sum(ref.tenant == tenant for ref in self._tasks)
        is_room = not (self.draining or others_wait or self._is_full)
        is_room = is_room and max(running, here) + self._coming[tenant] < limit
        with self._kept_for(tenant) if is_room else nullcontext():
            yield is_room

    @contextmanager
    def _kept_for(self, tenant: str) -> Generator[None]:
        """Nobody else gets the room of one that is about to begin."""
        self._coming[tenant] += 1
        try:
            yield
        finally:
            self._coming[tenant] -= 1
            if not self._coming[tenant]:
                del self._coming[tenant]

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) + self._coming.total() >= self._config.max_running

    def wake(self) -> None:
        """Something waits."""
        self._woken.set()

    def begin(self, claimed: Claimed) -> None:
        """Play a run that is claimed."""
        task = asyncio.create_task(self._run(claimed))
        self._tasks[claimed.ref] = task

    def stop(self, ref: Ref) -> None:
        """Leave a run, if it is played here."""
        task = self._tasks.get(ref)
        if task is not None:
            task.cancel()

    async def drain(self) -> None:
        """Claim nothing more, and return when nothing is played any more."""
        self.draining = True
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    async def close(self) -> None:
        """Leave all runs, so that others can go on with them at once."""
        self.draining = True
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_S)

    async def _watch(self) -> None:
        poll_s, swept_at = self._config.poll_s, 0.0
        while not self.draining:
            self._woken.clear()
            try:
                await self._claim_waiting()
                if time.monotonic() - swept_at > self._config.lease_s / 4:
                    swept_at = time.monotonic()
                    await self._claim_left()
            except StackError as exc:
                _log.warning("background responses wait: %s", exc.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await self._woken.wait()

    async def _claim_waiting(self) -> None:
        running: dict[str, int] = {}
        if self._is_full:
            return
        for key, ref in await self._runs.waiting(_LOOK_AT_MOST):
            if self._is_full or self.draining:
                return
            if ref.tenant not in running:
                running[ref.tenant] = await self._runs.count(ref.tenant, self._config.max_tenant_running)
            if running[ref.tenant] >= self._config.max_tenant_running:
                continue
            with self._kept_for(ref.tenant):
                if claimed := await self._runs.claim(ref, key):
                    running[ref.tenant] += 1
                    self.begin(claimed)

    async def _claim_left(self) -> None:
        """What was left is taken beyond all bounds: it has begun, and somebody waits for it."""
        for ref in await self._runs.left():
            if not self.draining and ref not in self._tasks and (claimed := await self._runs.claim(ref)):
                self.begin(claimed)

    async def _run(self, claimed: Claimed) -> None:
        try:
            await self._play(claimed)
        except StackError as exc:
            _log.warning("a background response was left to another worker: %s", exc.message)
        finally:
            if self._tasks.get(claimed.ref) is asyncio.current_task():
                del self._tasks[claimed.ref]
            self._woken.set()
