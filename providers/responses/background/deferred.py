"""DeferredRuns: background responses with a completion window, executed in the room that all other work leaves.

A run waits for the place that a line of a batch would wait for, and only then is one claimed: the tenant's run with the
earliest deadline. So an admitted place never holds a run that another worker could begin. `LeasedJobs` runs what is
claimed here, and does not look for it: it claims for a place that is free at once, and these places are waited for.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from apis.batches.spare_capacity import SpareCapacity
from apis.errors import StackError
from apis.ticks import wait_for_tick
from providers.common.supervision import supervise
from providers.responses.background.runs import ClaimedRun, Runs

_log = logging.getLogger(__name__)
_MAX_WAITERS: Final = 32
"""Places of one tenant that this process waits for or uses at a time."""


class DeferredRuns:
    """The runs with a completion window that this process begins. `start_run` starts the task that executes a claimed
    one.

    At most half of `tenant_limit`, the number of a tenant's runs in all processes, begins this way: the rest stays free
    for runs without a window.
    """

    def __init__(
        self,
        runs: Runs,
        start_run: Callable[[ClaimedRun], "asyncio.Task[None]"],
        *,
        tenant_limit: int,
        poll_s: float,
    ) -> None:
        self._runs = runs
        self._start_run = start_run
        self._tenant_limit = max(1, tenant_limit // 2)
        self._poll_s = poll_s
        self._wakeup = asyncio.Event()
        self._waiters: dict[str, set[asyncio.Task[None]]] = {}
        self._claims: set[asyncio.Task[asyncio.Task[None] | None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    def start(self, capacity: SpareCapacity) -> None:
        self._watcher = supervise("the watcher of deferred background responses", lambda: self._watch(capacity))

    def wake(self) -> None:
        """Look for waiting runs now instead of after the poll interval."""
        self._wakeup.set()

    async def stop(self, timeout_s: float | None = None) -> None:
        """Wait for no more places, and return when the claims that are under way have ended. Runs that have begun go
        on."""
        tasks = [task for waiters in self._waiters.values() for task in waiters]
        tasks += [self._watcher] if self._watcher is not None else []
        for task in tasks:
            task.cancel()
        if tasks or self._claims:
            await asyncio.wait([*tasks, *self._claims], timeout=timeout_s)

    async def _watch(self, capacity: SpareCapacity) -> None:
        while True:
            self._wakeup.clear()
            try:
                for tenant, waiting in await self._runs.count_deferred(_MAX_WAITERS):
                    self._wait_for_places(tenant, waiting, capacity)
            except StackError as exc:
                _log.warning("background responses with a completion window wait: %s", exc.message)
            await wait_for_tick(self._wakeup, self._poll_s)

    def _wait_for_places(self, tenant: str, waiting: int, capacity: SpareCapacity) -> None:
        waiters = self._waiters.setdefault(tenant, set())
        for _ in range(min(waiting, _MAX_WAITERS - len(waiters))):
            task = asyncio.create_task(self._run_one(tenant, capacity))
            waiters.add(task)
            task.add_done_callback(lambda ended: self._remove_waiter(tenant, ended))

    def _remove_waiter(self, tenant: str, task: "asyncio.Task[None]") -> None:
        waiters = self._waiters[tenant]
        waiters.discard(task)
        if not waiters:
            del self._waiters[tenant]

    async def _run_one(self, tenant: str, capacity: SpareCapacity) -> None:
        async with capacity.admit(tenant):
            # a claim that is cancelled may have happened, and then no worker would execute the run
            claim = asyncio.create_task(self._claim(tenant))
            self._claims.add(claim)
            claim.add_done_callback(self._claims.discard)
            running = await asyncio.shield(claim)
            if running is not None:
                await asyncio.wait({running})
                self._wakeup.set()

    async def _claim(self, tenant: str) -> "asyncio.Task[None] | None":
        """Claim and start a run; None if there is none, or the tenant has enough that run."""
        try:
            if await self._runs.count_running(tenant, self._tenant_limit) >= self._tenant_limit:
                return None
            claimed = await self._runs.claim_deferred(tenant)
        except StackError as exc:
            _log.warning("a background response with a completion window waits: %s", exc.message)
            return None
        return None if claimed is None else self._start_run(claimed)
