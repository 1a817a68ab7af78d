"""LeasedJobs: a queue of jobs in a KVStore, which the processes that share the store run, each job in one of them.

A job is a key with a record of the attempts at it, and a lease, which the process that runs it holds and renews. An
attempt is stored before it begins, in the write that acquires the lease, and taken back where its worker leaves the
job in order. A worker that ends with its process takes nothing back. So a job that ends its workers is found out, and
fails alone. A worker that lost its lease and lives is not counted as lost.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack, aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import ClassVar, Final, Generic, Protocol, TypeVar, cast

import msgspec

from apis.errors import RateLimited, StackError, StoreUnavailable
from apis.fair_share import FairShare, Place
from apis.storage.kv_store import Entry, KVStore, Op, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import encode_record
from apis.ticks import wait_for_tick
from providers.common.state.scan import decode_or_skip
from providers.common.state.worker_signs import WorkerSign
from providers.common.supervision import supervise

_log = logging.getLogger(__name__)
MAX_UNRETURNED: Final = 10
"""Attempts at one job that may end out of order, though their workers live."""
_REST_FACTOR: Final = 4
"""A list of jobs is followed by a pause of this many times its duration, so that it takes a fifth of the time."""
_GIVE_BACK_S: Final = 2.5
"""Seconds that a process which ends has to give one job back."""


class ClaimRecord(Protocol):
    """The record of a job, as far as a claim changes it."""

    def begin_attempt(self, worker: str) -> None:
        """Note that the worker runs the job now."""
        ...

    def give_back(self, worker: str) -> None:
        """Note that the worker leaves the job in order."""
        ...


class JobRecord(msgspec.Struct):
    """The attempts at a job, the present one included; `handovers` of them ended in order. `workers` are those that
    have begun it and not given it back, the present one last; one that has begun it twice is named once."""

    attempts: int = 0
    handovers: int = 0
    workers: list[str] = []

    def begin_attempt(self, worker: str) -> None:
        """Count an attempt of the worker. One that claims the job again lives, and has not been lost."""
        self.attempts += 1
        self.workers = [*(each for each in self.workers if each != worker), worker]

    def give_back(self, worker: str) -> None:
        """Take the attempt of the worker back, if it has not been."""
        if worker in self.workers:
            self.handovers += 1
            self.workers = [each for each in self.workers if each != worker]


SubjectT = TypeVar("SubjectT")
RecordT = TypeVar("RecordT", bound=ClaimRecord)


@dataclass(frozen=True, slots=True)
class Job(Generic[SubjectT]):
    """A job that waits: `subject` is the thing that it is about, and `entry` is its record under `key`; None for a job
    that has no record. One that does not `needs_place` is run beyond all limits."""

    tenant: str
    subject: SubjectT
    lease_key: str
    lease_s: float
    key: str = ""
    entry: Entry | None = None
    needs_place: bool = True


@dataclass(frozen=True, slots=True)
class Claim(Generic[SubjectT, RecordT]):
    """A job that this process runs; `version` is that of its record as it was claimed."""

    job: Job[SubjectT]
    record: RecordT
    lease: Lease
    version: int | None

    @property
    def subject(self) -> SubjectT:
        return self.job.subject


class JobQueue(ABC, Generic[SubjectT, RecordT]):
    """The description of one queue: its jobs, and how one is run."""

    title: ClassVar[str]
    """A plural noun for the log."""
    max_lost_workers: ClassVar[int] = 3
    """Workers that one job may cost until it fails."""
    renews_leases: ClassVar[bool] = True
    """False for jobs that renew their leases as they write."""
    tenant_limit: float = math.inf
    """Jobs of one tenant that may run at a time, as `count_running` counts them."""

    def __init__(self, kv: KVStore, record_type: type[RecordT], places: FairShare, retry_s: float) -> None:
        """`places` are the jobs that this process runs at a time. A job that raised a StackError waits `retry_s`."""
        self.kv = kv
        self.places = places
        self.retry_s = retry_s
        self._record_type = record_type

    @abstractmethod
    def list_waiting(self) -> AsyncGenerator[Job[SubjectT]]:
        """Yield jobs that may be run now, each tenant's in its order; those that are leased are left out later."""

    async def count_running(self, tenant: str) -> int:
        """Return the number of the tenant's jobs that run: in this process, unless the queue counts those of all."""
        return self.places.used_by(tenant)

    async def claim(self, job: Job[SubjectT], sign: WorkerSign) -> Claim[SubjectT, RecordT] | None:
        """Claim a job; None if another worker has it, or it must not be claimed now."""
        record = await self.read_record(job)
        if record is None:
            return None
        return await claim_job(self.kv, job, record, sign, self.find_record_life_s(job, record))

    async def read_record(self, job: Job[SubjectT]) -> RecordT | None:
        """Return the record of a job that is to be claimed; None if it must not be claimed now. A damaged record is
        skipped; one of attempts alone counts as one lost worker, and is replaced by the claim."""
        if job.entry is None:
            return None
        record = decode_or_skip(self.kv, job.key, job.entry, self._record_type)
        if record is None and self._record_type is JobRecord:
            return cast(RecordT, JobRecord(1, workers=["unknown"]))
        return record

    def find_record_life_s(self, job: Job[SubjectT], record: RecordT) -> float | None:
        """Return the seconds after which the store may forget the record."""
        return None

    async def build_record_ops(self, claim: Claim[SubjectT, RecordT]) -> list[Op]:
        """Return the operation that stores the record of a claimed job; none for a job that was removed meanwhile, or
        that has no record."""
        job, record = claim.job, claim.record
        entry = None if job.entry is None else await self.kv.get(job.key)
        if entry is None:
            return []
        return [Put(job.key, encode_record(record), self.find_record_life_s(job, record), entry.version)]

    @abstractmethod
    async def run(self, claim: Claim[SubjectT, RecordT]) -> None:
        """Run the job. It releases the lease in the write that ends the job; else the job goes back to the queue.

        Cancelled where this process ends, or the job is taken from it. A StackError says that the job is to be tried
        again; any other exception counts as an attempt that did not end in order.
        """

    async def fail(self, claim: Claim[SubjectT, RecordT], lost_workers: int) -> None:
        """End a job that has cost `lost_workers`; with 0, it was left out of order MAX_UNRETURNED times. The default
        is for jobs that fail never: it is run again."""
        await self.run(claim)

    def on_end(self, claim: Claim[SubjectT, RecordT]) -> None:
        """Take note that the task of a job has ended, also one that was cancelled before its first step."""


class LeaderQueue(JobQueue[None, JobRecord]):
    """A queue of one job, which does its work every `interval_s` and has no end: the process that runs it leads all
    that share the store, and another one follows it within `lease_s`."""

    rest_factor: ClassVar[float] = 0.0
    """The pause after the work is at least this many times as long as the work took."""

    def __init__(self, kv: KVStore, lease_key: str, lease_s: float, interval_s: float) -> None:
        super().__init__(kv, JobRecord, FairShare(self.title, 1), retry_s=lease_s)
        self.lease_key = lease_key
        self._interval_s = interval_s

    @abstractmethod
    async def work(self, lease: Lease) -> None:
        """Do all that is due now. A StackError is logged, and the process leads on. Raises LeaseLost."""

    async def is_needed(self) -> bool:
        """Return False while there is nothing that a leader could do: then there is none."""
        return True

    async def list_waiting(self) -> AsyncGenerator[Job[None]]:
        if await self.is_needed():
            yield Job("", None, self.lease_key, self.retry_s)

    async def read_record(self, job: Job[None]) -> JobRecord:
        return JobRecord()

    async def run(self, claim: Claim[None, JobRecord]) -> None:
        """Work until this process ends, has lost the lease, or no leader is needed."""
        while True:
            began_at = monotonic()
            claim.lease.check()
            try:
                if not await self.is_needed():
                    return
                await self.work(claim.lease)
            except StackError as exc:  # the lease stays, because a part of the work may be under way
                _log.warning("%s wait: %s", self.title, exc.message)
            await asyncio.sleep(max(self._interval_s, self.rest_factor * (monotonic() - began_at)))


class LeasedJobs(Generic[SubjectT, RecordT]):
    """The jobs of one queue that this process runs. A free place goes to the tenant that uses the fewest; among equals,
    to the one that was served the longest time ago."""

    def __init__(self, queue: JobQueue[SubjectT, RecordT], sign: WorkerSign, poll_s: float) -> None:
        """`sign` is that of this process, whose owner starts and closes it."""
        self._queue = queue
        self._kv = queue.kv
        self._places = queue.places
        self._sign = sign
        self._poll_s = poll_s
        self._wakeup = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._last_turns: dict[str, int] = {}
        self._running: dict[str, tuple[asyncio.Task[None], Claim[SubjectT, RecordT]]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._may_have_more = True
        """The end of a job is a reason to look for more: the last look has found one that no process ran, or one was
        given back."""
        self._has_waiting = False
        """The last look has left jobs that wait for a place."""
        self.is_stopping = False
        """Once true, no more jobs are claimed."""

    def start(self) -> None:
        """Begin to look for jobs."""
        self._watcher = supervise(f"the watcher of {self._queue.title}", self._watch)

    def wake(self) -> None:
        """Look for jobs now."""
        self._wakeup.set()

    @property
    def claims(self) -> Sequence[Claim[SubjectT, RecordT]]:
        """The jobs that this process runs."""
        return [claim for _, claim in self._running.values()]

    async def cancel(self, lease_keys: Collection[str], timeout_s: float | None = None) -> None:
        """Take these jobs from this process, if it runs them, and wait until they are given back."""
        await self._cancel([self._running[key][0] for key in lease_keys if key in self._running], timeout_s)

    async def stop_claiming(self) -> None:
        """Claim no more jobs. One that was just claimed is run."""
        self.is_stopping = True
        self._wakeup.set()
        async with self._claiming:
            if self._watcher is not None:
                self._watcher.cancel()

    async def drain(self) -> None:
        """Claim no more jobs, and return when the last one has ended."""
        await self.stop_claiming()
        while self._running:
            await asyncio.wait([task for task, _ in self._running.values()])

    async def close(self, timeout_s: float) -> None:
        """Stop, and give unfinished jobs back, so that another process can claim them at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.stop_claiming()
        watchers = [] if self._watcher is None else [self._watcher]
        await self._cancel([*watchers, *(task for task, _ in self._running.values())], timeout_s)

    async def _cancel(self, tasks: Collection["asyncio.Task[None]"], timeout_s: float | None) -> None:
        if tasks:
            await asyncio.sleep(0)  # a job that is cancelled before its first step would not be given back
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _watch(self) -> None:
        while not self.is_stopping:
            self._wakeup.clear()
            try:
                await self._look()
            except StackError as exc:
                _log.warning("%s wait: %s", self._queue.title, exc.message)
            await wait_for_tick(self._wakeup, self._poll_s)

    def reserve(self, job: Job[SubjectT]) -> Place | None:
        """Return a place for a job that is about to be added, for `start_new`; None if this process has none, or others
        wait for one."""
        if self.is_stopping or self._has_waiting or job.lease_key in self._running:
            return None
        return self._places.try_acquire(job.tenant)

    async def start_new(self, job: Job[SubjectT], record: RecordT, ops: Sequence[Op], place: Place) -> list[int] | None:
        """Write `ops`, which add the job with its record, and claim it in the same write, to be run in the place.
        Return the versions of `ops`; None if one of their conditions did not hold, or the lease of the job is held."""
        with ExitStack() as places:
            places.enter_context(place)
            record.begin_attempt(self._sign.name)
            put = Put(job.key, encode_record(record), self._queue.find_record_life_s(job, record))
            lease = Lease(self._kv, job.lease_key, job.lease_s, holder=self._sign.name)
            versions = await lease.acquire([put if op.key == job.key else op for op in ops], durable=True)
            if versions is None:
                return None
            version = versions[[op.key for op in ops].index(job.key)]
            claim = Claim(replace(job, entry=Entry(put.value, version)), record, lease, version)
            if self.is_stopping:
                await self._give_back(claim, 0)
            else:
                self.start_job(claim, place)
                places.pop_all()
            return versions

    async def _look(self) -> None:
        began_at = monotonic()
        waiting = await self._list_free()
        rest_s = _REST_FACTOR * (monotonic() - began_at)
        async with self._claiming:
            await self._claim_in_turns(waiting)
        await asyncio.sleep(rest_s)

    async def _list_free(self) -> dict[str, deque[Job[SubjectT]]]:
        """Return the jobs that no process runs, by tenant."""
        listed: dict[str, list[Job[SubjectT]]] = {}
        async with aclosing(self._queue.list_waiting()) as jobs:
            async for job in jobs:
                listed.setdefault(job.tenant, []).append(job)
        waiting: dict[str, deque[Job[SubjectT]]] = {}
        for tenant, of_tenant in listed.items():
            leases = await self._kv.get_many([job.lease_key for job in of_tenant])
            waiting[tenant] = deque(job for job, lease in zip(of_tenant, leases, strict=True) if lease is None)
        self._may_have_more = any(waiting.values())
        return waiting

    async def _claim_in_turns(self, waiting: dict[str, deque[Job[SubjectT]]]) -> None:
        """Start jobs up to the limit. The rest is looked at when one of these ends, or at the next look."""
        for tenant, jobs in waiting.items():
            for job in jobs:
                if not job.needs_place and (claim := await self._try_claim(job)):
                    self.start_job(claim, None)
            waiting[tenant] = deque(job for job in jobs if job.needs_place)
        self._has_waiting = False
        running = {tenant: await self._queue.count_running(tenant) for tenant in waiting}
        self._last_turns = {tenant: turn for tenant, turn in self._last_turns.items() if tenant in waiting}
        while waiting and not self.is_stopping:
            tenant = min(waiting, key=lambda name: (running[name], self._last_turns.get(name, 0)))
            is_below_limit = running[tenant] < self._queue.tenant_limit
            place = self._places.try_acquire(tenant) if is_below_limit else None
            self._has_waiting |= place is None and bool(waiting[tenant])
            if place is None or not await self._claim_next(waiting[tenant], place):
                del waiting[tenant]
            else:
                running[tenant] += 1
                self._last_turns[tenant] = max(self._last_turns.values(), default=0) + 1

    async def _claim_next(self, jobs: deque[Job[SubjectT]], place: Place) -> bool:
        """Start the first job that can be claimed; return False, and release the place, if there is none."""
        with ExitStack() as places:
            places.enter_context(place)
            while jobs:
                job = jobs.popleft()
                if claim := await self._try_claim(job):
                    self.start_job(claim, place)
                    places.pop_all()
                    return True
        return False

    async def _try_claim(self, job: Job[SubjectT]) -> Claim[SubjectT, RecordT] | None:
        if self.is_stopping or job.lease_key in self._running:
            return None
        try:
            return await self._queue.claim(job, self._sign)
        except StoreUnavailable:
            raise
        except StackError as exc:
            _log.warning("%s waits: %s", job.lease_key, exc.message)
            return None

    def start_job(self, claim: Claim[SubjectT, RecordT], place: Place | None) -> "asyncio.Task[None]":
        """Run a claimed job in a task, which releases its place in the end."""
        key = claim.job.lease_key
        task = asyncio.create_task(self._run(claim))
        self._running[key] = task, claim
        task.add_done_callback(lambda ended: self._on_end(claim, ended, place))
        return task

    def _on_end(self, claim: Claim[SubjectT, RecordT], task: "asyncio.Task[None]", place: Place | None) -> None:
        key = claim.job.lease_key
        running = self._running.get(key)
        if running is not None and running[0] is task:
            del self._running[key]
        if place is not None:
            place.release()
        self._queue.on_end(claim)
        if self._may_have_more:
            self._wakeup.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed on a bug", key, exc_info=error)

    async def _run(self, claim: Claim[SubjectT, RecordT]) -> None:
        lease, queue = claim.lease, self._queue
        try:
            async with lease.renew_in_background() if queue.renews_leases else nullcontext():
                lost_workers = await self._find_poison(claim)
                if lost_workers is None:
                    await queue.run(claim)
                else:
                    _log.error("%s fails for its attempts: %s", claim.job.lease_key, claim.record)
                    await queue.fail(claim, lost_workers)
        except LeaseLost:
            _log.info("%s has ended, or another worker has it now", claim.job.lease_key)
        except asyncio.CancelledError:
            await self._give_back(claim, 0)
            raise
        except StackError as exc:
            is_limited = isinstance(
                exc, RateLimited
            )  # a tenant may be at its limits for hours: no matter for operators
            level = logging.DEBUG if is_limited else logging.WARNING
            _log.log(level, "%s is tried again later: %s", claim.job.lease_key, exc.message)
            await self._give_back(claim, queue.retry_s)
        else:
            if not lease.is_relinquished:
                await self._give_back(claim, 0)

    async def _find_poison(self, claim: Claim[SubjectT, RecordT]) -> int | None:
        """Return the number of workers that the job has cost if it fails for that, or 0 if it has been left too often;
        else None. Workers that live are found out before, and forgotten."""
        record = claim.record
        if not isinstance(record, JobRecord):
            return None
        *lost, present = record.workers
        if len(lost) >= self._queue.max_lost_workers:
            async with claim.lease.renew_in_background():
                lost = await self._sign.list_ended(lost)
            record.workers = [*lost, present]
        if len(lost) >= self._queue.max_lost_workers:
            return len(lost)
        return 0 if record.attempts - record.handovers > MAX_UNRETURNED else None

    async def _give_back(self, claim: Claim[SubjectT, RecordT], delay_s: float) -> None:
        """Return a job to the queue, for another worker after `delay_s`. One that was removed meanwhile stays so."""
        lease, self._may_have_more = claim.lease, True
        claim.record.give_back(self._sign.name)
        with suppress(StackError, LeaseLost, TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                ops = await self._queue.build_record_ops(claim)
                if delay_s:
                    await lease.write(ops, ttl_s=delay_s)
                elif not await lease.release(ops):
                    await lease.release()


async def claim_job(
    kv: KVStore, job: Job[SubjectT], record: RecordT, sign: WorkerSign, life_s: float | None = None
) -> Claim[SubjectT, RecordT] | None:
    """Begin an attempt at a job: store it in the record, and acquire the lease; None if another worker did."""
    record.begin_attempt(sign.name)
    lease = Lease(kv, job.lease_key, job.lease_s, holder=sign.name)
    ops = [] if job.entry is None else [Put(job.key, encode_record(record), life_s, job.entry.version)]
    # durable, so that no store that fails over forgets who runs it
    versions = await lease.acquire(ops, durable=True)
    return None if versions is None else Claim(job, record, lease, versions[0] if versions else None)
