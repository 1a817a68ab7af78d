"""BackgroundWorkers: the runs of background responses that this process has claimed, bounded and drainable."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from apis.batches.spare_capacity import SpareCapacity
from apis.errors import StackError
from apis.fair_share import ONE_TENANT, FairShare, Place, Tenants
from apis.storage.kv_store import Op, Put
from apis.storage.records import encode_record
from providers.common.jobs import MAX_UNRETURNED, Claim, Job, JobQueue, LeasedJobs
from providers.common.state.worker_signs import WorkerSign
from providers.responses.background.deferred import DeferredRuns
from providers.responses.background.ranks import QueueLimits
from providers.responses.background.runs import MAX_LOST_WORKERS, ClaimedRun, ResponseRef, RunRecord, Runs
from providers.responses.background.worker_registry import WorkerRegistry

_log = logging.getLogger(__name__)
_MAX_COUNTED_RUNS = 1000
"""Limit of a tenant's running runs where none is configured and there is one tenant."""
_CLOSE_TIMEOUT_S = 0.4
"""Seconds that cancelled runs have to release their leases."""

_WORKERS_LOST_MESSAGE: Final = (
    f"{MAX_LOST_WORKERS} servers that made this response stopped before it was done. It is not tried again."
)
_WORKERS_SILENT_MESSAGE: Final = (
    f"{MAX_UNRETURNED} times, the server that made this response was too slow or could not reach its store. It is not "
    "tried again."
)


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


class BackgroundWorkers(JobQueue[ResponseRef, RunRecord]):
    """Claims waiting and orphaned runs, and executes each in a task of its own.

    A free place goes to the waiting tenant that has the fewest runs in all processes. Orphaned runs are claimed beyond
    all limits: they have begun, and their clients wait.
    """

    title = "background responses"
    max_lost_workers = MAX_LOST_WORKERS
    renews_leases = False
    """The journal of a run does, and the end of a run is written on the version of its lease."""

    def __init__(
        self,
        runs: Runs,
        execute: Callable[[ClaimedRun, StackError | None], Awaitable[None]],
        config: BackgroundConfig,
        tenants: Tenants = ONE_TENANT,
        registry: WorkerRegistry | None = None,
    ) -> None:
        """`execute` is `RunExecutor.execute`. `registry` is where this process reports itself, if anywhere."""
        tenant_limit = config.find_tenant_limit(tenants)
        places = FairShare(
            self.title, config.max_running, tenant_places=tenant_limit, several_tenants=tenants.are_several
        )
        super().__init__(runs.kv, RunRecord, places, retry_s=config.lease_s)
        self.tenant_limit = self._tenant_limit = tenant_limit
        self._registry = registry
        self._runs = runs
        self._execute = execute
        self._config = config
        self._jobs = LeasedJobs(self, runs.sign, config.poll_s)
        self._last_try: ResponseRef | None = None
        self._suspects: set[ResponseRef] = set()
        self._capacity: SpareCapacity | None = None
        self._deferred = DeferredRuns(
            runs,
            lambda claimed: self.start_run(claimed, None),
            tenant_limit=tenant_limit,
            poll_s=4 * config.poll_s,  # they have hours, and those of this process wake it
        )
        self._swept_at = 0.0
        self.on_look: Callable[[], Awaitable[None]] | None = None
        """Called at each look for runs, for other work that is looked for in the store."""
        self._waiting_count = 0

    def start(self) -> None:
        self._jobs.start()

    async def try_reserve_place(self, tenant: str) -> Place | None:
        """Return a place if one more run of the tenant can start here now, for `start_run`."""
        others_wait = await self._runs.has_waiting(tenant)
        running = await self.count_running(tenant)
        # no await from here on: another task could take the place
        if self._jobs.is_stopping or others_wait or max(running, self.places.used_by(tenant)) >= self.tenant_limit:
            return None
        return self.places.try_acquire(tenant)

    def wake(self) -> None:
        """Look for waiting runs now instead of after the poll interval."""
        self._jobs.wake()
        self._deferred.wake()

    def start_deferred(self, capacity: SpareCapacity) -> None:
        """Begin runs with a completion window, too, as `capacity` admits them."""
        self._capacity = capacity
        capacity.isolate_from(self._suspects)
        self._deferred.start(capacity)

    def start_run(self, claimed_run: ClaimedRun, place: Place | None) -> "asyncio.Task[None]":
        """Execute a claimed run in a task, which releases its place in the end."""
        return self._jobs.start_job(claimed_run, place)

    async def stop_runs(self, refs: Sequence[ResponseRef]) -> None:
        """Cancel these runs, if this process executes them. Each hands its lease back, or ends."""
        await self._jobs.cancel([ref.lease_key for ref in refs], 0)

    async def stop_all(self) -> None:
        """Cancel all runs, also one that is just claimed."""
        await self._stop_claiming()
        refs = [claim.subject for claim in self._jobs.claims]
        if refs:
            _log.info("%d background responses stop here, and go on with the next start where they can", len(refs))
        await self.stop_runs(refs)

    def metrics(self) -> BackgroundMetrics:
        return BackgroundMetrics(len(self._jobs.claims), self._waiting_count)

    def begin_drain(self) -> None:
        """Claim no more runs."""
        self._jobs.is_stopping = True

    async def drain(self) -> None:
        """Claim no more runs, and return when the last one has ended."""
        await self._stop_claiming()
        await self._jobs.drain()

    async def _stop_claiming(self) -> None:
        self.begin_drain()
        await self._deferred.stop()
        await self._jobs.stop_claiming()

    async def close(self) -> None:
        """Cancel all runs, so that other workers can resume them at once."""
        self.begin_drain()
        await self._deferred.stop(_CLOSE_TIMEOUT_S)
        await self._jobs.close(_CLOSE_TIMEOUT_S)
        if self._registry is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._registry.remove()

    async def list_waiting(self) -> AsyncGenerator[Job[ResponseRef]]:
        lease_s = self._config.lease_s
        if self.on_look is not None:
            await self.on_look()
        if self._registry is not None:
            await self._registry.report(len(self._jobs.claims))
        for key, ref in await self._runs.list_waiting(self._config.max_running):
            yield Job(ref.tenant, ref, ref.lease_key, lease_s, key)
        if time.monotonic() - self._swept_at > lease_s / 4:
            self._swept_at = time.monotonic()
            for ref in await self._runs.list_orphaned():
                yield Job(ref.tenant, ref, ref.lease_key, lease_s, needs_place=False)
            self._waiting_count = len(await self._runs.list_waiting(self._config.max_waiting))

    async def count_running(self, tenant: str) -> int:
        """Return the number of the tenant's runs in all processes, up to its limit."""
        return await self._runs.count_running(tenant, self._tenant_limit)

    async def claim(self, job: Job[ResponseRef], sign: WorkerSign) -> ClaimedRun | None:
        """Claim a run, unless it has lost workers and may take other work down with it: one that has one worker left to
        lose where another such run is executed here, and any while a line of a batch is executed alone."""
        ref = job.subject
        max_lost = MAX_LOST_WORKERS - (2 if any(each.subject == self._last_try for each in self._jobs.claims) else 1)
        if self._capacity is not None and self._capacity.is_running_alone:
            max_lost = 0
        self._suspects.add(ref)  # before it is claimed: no line begins alone meanwhile
        claimed, has_lost = None, False
        try:
            claimed = await self._runs.claim(ref, job.key, max_lost=max_lost)
            has_lost = claimed is not None and len(claimed.run.workers) > 1
        finally:
            if not has_lost:
                self._suspects.discard(ref)
        if claimed is not None and len(claimed.run.workers) == MAX_LOST_WORKERS:
            self._last_try = ref
        return claimed

    async def build_record_ops(self, claim: Claim[ResponseRef, RunRecord]) -> list[Op]:
        """Return the operation that stores the record of a run, which is there as long as its lease is held."""
        return [Put(claim.subject.run_key, encode_record(claim.record), self._runs.retention_s)]

    async def run(self, claim: Claim[ResponseRef, RunRecord]) -> None:
        assert isinstance(claim, ClaimedRun)
        await self._execute(claim, None)

    async def fail(self, claim: Claim[ResponseRef, RunRecord], lost_workers: int) -> None:
        assert isinstance(claim, ClaimedRun)
        await self._execute(claim, StackError(_WORKERS_LOST_MESSAGE if lost_workers else _WORKERS_SILENT_MESSAGE))

    def on_end(self, claim: Claim[ResponseRef, RunRecord]) -> None:
        self._suspects.discard(claim.subject)
