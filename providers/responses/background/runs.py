"""Runs: the background responses that have not ended, in a KVStore, and the legal changes of their state.

    /run/TENANT/ID                     the state of the run: present from the first answer until the response has ended
    /queue/TENANT/RANK/TIME/ID         present while the run waits for a worker; a tenant's smallest is served first;
                                       /deferred/ for a run with a completion window (ranks.py)
    /place/TENANT/NUMBER               a slot in the tenant's queue, taken by a waiting run: bounds how many can wait;
                                       /deferred_place/ for a run with a completion window
    /lease/TENANT/ID                   held by the worker that executes the run; gone when it was not renewed in time
    TENANT/request/ID                  the request

    queued --claim--> in_progress --end--> (stored by History: completed, incomplete, failed or cancelled)
       ^ \\--end------------------------>     |
       '------------- hand back -----------'

Every change is one atomic write on the condition that the record, or the lease, is as it was read: of two concurrent
changes one happens. No tenant's name is empty, so no tenant's key begins with a slash.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from apis.accounts.charges import ChargeRecord
from apis.errors import RateLimited, StorageCorrupt
from apis.moderation import ModerationScores
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import decode_record, encode_record, scan_groups
from apis.telemetry import TRACE_HEADERS, telemetry
from providers.common.jobs import MAX_UNRETURNED, Claim, Job, JobRecord
from providers.common.state.change import repeat_until_true
from providers.common.state.scan import report_damaged, scan_records
from providers.common.state.worker_signs import WorkerSign
from providers.responses.background.ranks import (
    DEFERRED_PREFIX,
    QUEUE_PREFIX,
    QueueLimits,
    Rank,
    is_deferred_key,
    read_queued_at,
)
from providers.responses.events.ids import is_response_id
from providers.responses.store.history_cache import TurnPosition
from providers.responses.store.response_record import run_key

_log = logging.getLogger(__name__)
_BATCH_SIZE = 1000
_CLAIM_PAGE = 16
MAX_LOST_WORKERS: Final = 3
"""Workers that one run may cost before it fails: the next one only stores its end."""
_END_WAIT_S: Final = 0.05
"""Seconds between looks at a run that another process ends."""
_MAX_END_CLAIMS: Final = 6
"""Workers that may fail to store the end of such a run, until no more claim it: its records are damaged."""


class RunRecord(JobRecord, kw_only=True):
    """The state of a run. `queue_key` is absent from the store when the run has waited for too long. A run that is not
    `is_portable` can only be executed by the process that took the request, because the request holds secrets that are
    not stored."""

    status: Literal["queued", "in_progress"]
    queue_key: str
    is_portable: bool = True
    slot_key: str = ""
    is_ending: bool = False
    """The holder of the lease has taken it over to end the run, and not to execute it."""

    @property
    def is_deferred(self) -> bool:
        """True for a run with a completion window."""
        return is_deferred_key(self.queue_key)

    def begin_attempt(self, worker: str) -> None:
        """Note that the worker executes it now."""
        super().begin_attempt(worker)
        self.status, self.is_ending = "in_progress", False


class StoredRequest(msgspec.Struct):
    """The request, its input items as they are listed, and the number of item ids that those use. `trace` holds the
    trace headers of the request that created it, with which each worker goes on, and `charge` what it has reserved;
    `previous` is the position of the turn before it, if it continues one, and `key_id` the key that created it. The
    worker that begins one that `is_uncharged` reserves what it may use. `judged_input` are the scores of its input, if
    that was moderated."""

    request: msgspec.Raw
    input_items: msgspec.Raw
    item_id_count: int
    created_at: int
    trace: dict[str, str] = {}
    charge: ChargeRecord | None = None
    previous: TurnPosition | None = None
    key_id: str = ""
    is_uncharged: bool = False
    judged_input: ModerationScores | None = None


@dataclass(frozen=True, slots=True)
class ResponseRef:
    """The tenant and id of a response, and the keys of its run."""

    tenant: str
    id: str

    @property
    def run_key(self) -> str:
        return run_key(self.tenant, self.id)

    @property
    def lease_key(self) -> str:
        return f"/lease/{self.tenant}/{self.id}"

    @property
    def request_key(self) -> str:
        return f"{self.tenant}/request/{self.id}"


class RunLease(Lease):
    """The right to execute one run."""

    def __init__(self, kv: KVStore, ref: ResponseRef, lease_s: float, retention_s: float, sign: WorkerSign) -> None:
        super().__init__(kv, ref.lease_key, lease_s, holder=sign.name)
        self.ref = ref
        self._sign = sign
        self._retention_s = retention_s

    def end_ops(self) -> list[Op]:
        """Return the operations that end the run if the lease is still held: to be written with the final response."""
        self._is_relinquished = True
        return [self.release_op, Delete(self.ref.run_key), Delete(self.ref.request_key)]

    async def hand_back(self, run: RunRecord, extra_ops: Sequence[Op] = ()) -> None:
        """Return the run to the queue, so that another worker can resume it at once, and apply `extra_ops` with it.
        Nothing is written when the lease is lost."""
        run.give_back(self._sign.name)
        put_run = Put(self.ref.run_key, encode_record(run), self._retention_s)
        put_queue = Put(run.queue_key, b"", 60 * self.lease_s)
        with suppress(LeaseLost):
            await self.release([put_run, put_queue, *extra_ops])


@dataclass(frozen=True, slots=True)
class ClaimedRun(Claim[ResponseRef, RunRecord]):
    """A run with its request and lease; `is_late` if it has waited for too long."""

    lease: RunLease
    stored_request: StoredRequest
    is_late: bool = False

    @property
    def run(self) -> RunRecord:
        return self.record

    @property
    def ref(self) -> ResponseRef:
        return self.job.subject

    @property
    def queued_at_s(self) -> float:
        """The time at which the run was added, in seconds since the epoch."""
        return read_queued_at(self.run.queue_key)


class Runs:
    """All runs of a store."""

    def __init__(
        self,
        kv: KVStore,
        limits: QueueLimits,
        *,
        lease_s: float,
        retention_s: float,
        sign: WorkerSign | None = None,
    ) -> None:
        """`sign` names this process in its leases."""
        self.kv = self._kv = kv
        self.sign = sign or WorkerSign(kv, lease_s)
        self._lease_s = lease_s
        self._limits = limits
        self.retention_s = retention_s

    async def add(
        self,
        ref: ResponseRef,
        rank: Rank,
        stored_request: StoredRequest,
        extra_ops: Sequence[Op],
        *,
        is_portable: bool,
        start_now: bool,
    ) -> ClaimedRun | None:
        """Add a run, written with `extra_ops`: it waits for a worker, or is claimed at once with `start_now`; the
        request's trace is stored with it. Raises
        LeaseLost if a condition in `extra_ops` does not hold, RateLimited if too many runs of the tenant wait."""
        stored_request.trace = dict(TRACE_HEADERS.get())
        queue_key, retention_s = rank.build_key(ref.tenant, ref.id), self.retention_s + rank.window_s
        run = RunRecord(status="queued", queue_key=queue_key, is_portable=is_portable)
        if start_now:
            run.begin_attempt(self.sign.name)
        put_request = Put(ref.request_key, encode_record(stored_request), retention_s)
        if start_now:
            lease = self._new_lease(ref)
            put_run = Put(ref.run_key, encode_record(run), self.retention_s, ABSENT)
            if await lease.acquire([put_run, put_request, *extra_ops], durable=True) is None:
                raise LeaseLost
            return self._build_claim(run, lease, stored_request)

        async def attempt() -> bool:
            run.slot_key = await self._draw_free_slot(ref.tenant, rank)
            ops = [
                Put(ref.run_key, encode_record(run), retention_s, ABSENT),
                put_request,
                *extra_ops,
                Put(queue_key, b"", rank.window_s or self._limits.queue_timeout_s),
                Put(run.slot_key, ref.id.encode(), retention_s, ABSENT),
            ]
            if await self._kv.write(ops) is not None:
                return True
            if not await self._do_hold(extra_ops):
                raise LeaseLost  # else another run has taken the slot, and may have left it again
            return False

        await repeat_until_true(attempt)
        telemetry().add("stack.responses.queued", 1)
        return None

    def queue_ops(self, ref: ResponseRef, rank: Rank, stored_request: StoredRequest) -> list[Op]:
        """Return the writes by which a run waits for a worker, without a limit of waiting runs."""
        stored_request.trace = dict(TRACE_HEADERS.get())
        retention_s = self.retention_s + rank.window_s
        run = RunRecord(status="queued", queue_key=rank.build_key(ref.tenant, ref.id))
        return [
            Put(ref.run_key, encode_record(run), retention_s, ABSENT),
            Put(ref.request_key, encode_record(stored_request), retention_s),
            Put(run.queue_key, b"", rank.window_s or self._limits.queue_timeout_s),
        ]

    async def _do_hold(self, ops: Sequence[Op]) -> bool:
        """Return True if the conditions of these operations hold now."""
        conditional = [op for op in ops if op.expect is not None]
        entries = await self._kv.get_many([op.key for op in conditional]) if conditional else []
        versions = [ABSENT if entry is None else entry.version for entry in entries]
        return versions == [op.expect for op in conditional]

    async def _draw_free_slot(self, tenant: str, rank: Rank) -> str:
        """Return the key of a random free slot: concurrent requests seldom draw the same one. Raises RateLimited."""
        prefix = f"{rank.slot_prefix}{tenant}/"
        limit, field = self._limits.find_limit(rank)
        rows = await self._kv.scan(prefix, limit=limit)
        free = set(range(limit)) - {int(key[len(prefix) :]) for key, _ in rows}
        if not free:
            raise RateLimited(
                f"{limit} background responses are waiting already (`responses.background.{field}`).",
                retry_after_s=60 if rank.window_s else 5,
            )
        return f"{prefix}{random.choice([*free]):08d}"  # noqa: S311 - not a secret

    async def has_waiting(self, tenant: str) -> bool:
        """Return True if a run of the tenant waits for a worker."""
        return bool(await self._kv.scan(f"/place/{tenant}/", limit=1))

    async def count_running(self, tenant: str, limit: int) -> int:
        """Return the number of the tenant's runs that are being executed, counted up to `limit`."""
        return len(await self._kv.scan(f"/lease/{tenant}/", limit=limit))

    async def list_of_tenant(self, tenant: str, limit: int) -> list[ResponseRef]:
        """Return up to `limit` runs of the tenant that have not ended."""
        prefix = f"/run/{tenant}/"
        rows = await self._kv.scan(prefix, limit=limit)
        return [ResponseRef(tenant, key.removeprefix(prefix)) for key, _ in rows]

    async def list_waiting(self, limit: int) -> list[tuple[str, ResponseRef]]:
        """Return up to `limit` waiting runs of each tenant with their keys in the queue, in a tenant's order of
        service."""
        groups = scan_groups(self._kv, QUEUE_PREFIX, limit=limit)
        return [(key, _queued_ref(key)) async for _, rows in groups for key, _ in rows]

    async def count_deferred(self, limit: int) -> list[tuple[str, int]]:
        """Return the tenants that have waiting runs with a completion window, and the number of these up to `limit`."""
        return [(tenant, len(rows)) async for tenant, rows in scan_groups(self._kv, DEFERRED_PREFIX, limit=limit)]

    async def claim_deferred(self, tenant: str) -> ClaimedRun | None:
        """Claim the tenant's waiting run with the earliest deadline; None if there is none."""
        last_key = ""
        while rows := await self._kv.scan(f"{DEFERRED_PREFIX}{tenant}/", after=last_key, limit=_CLAIM_PAGE):
            for last_key, _ in rows:
                claimed = await self.claim(_queued_ref(last_key), last_key)
                if claimed is not None:
                    return claimed
        return None

    async def get(self, ref: ResponseRef) -> tuple[RunRecord, StoredRequest] | None:
        """Return a run that has not ended, and its request."""
        if not is_response_id(ref.id):
            return None
        run, request = await self._kv.get_many([ref.run_key, ref.request_key])
        if run is None or request is None:
            return None
        return decode_record(run, RunRecord), decode_record(request, StoredRequest)

    async def claim(
        self, ref: ResponseRef, queue_key: str = "", *, max_lost: int = MAX_LOST_WORKERS
    ) -> ClaimedRun | None:
        """Claim a run that no worker holds, from the queue or as an orphan; None if a worker holds it, it has ended or
        its records are damaged, or if it may cost this worker, and has cost more than `max_lost`."""
        run, request, lease = await self._kv.get_many([ref.run_key, ref.request_key, ref.lease_key])
        if run is None or request is None:
            if queue_key:
                await self._kv.write([Delete(queue_key)], durable=False)
            return None
        if lease is not None:
            return None
        try:
            record = decode_record(run, RunRecord)
            if record.attempts - record.handovers >= MAX_UNRETURNED + _MAX_END_CLAIMS:
                return None
            if max_lost < len(record.workers) < MAX_LOST_WORKERS:
                return None
            is_late = not queue_key and record.status == "queued"
            claimed = await self._acquire(ref, run, request, ABSENT)
        except StorageCorrupt as exc:
            report_damaged(self._kv, ref.run_key, "RunRecord, or its request", exc)
            return None
        return replace(claimed, is_late=is_late) if claimed else None

    async def delete(self, ref: ResponseRef) -> None:
        """Delete a run whose records are damaged, so that no worker can end it."""
        await self._kv.write([Delete(ref.run_key), Delete(ref.request_key), Delete(ref.lease_key)])

    async def take_over(self, ref: ResponseRef) -> ClaimedRun | None:
        """Claim a run from any worker that executes it, to end it; None if it has ended. Another one that ends it is
        waited for, as long as its lease lives: those that took it from each other would never end it."""
        while is_response_id(ref.id):
            run, request, lease = await self._kv.get_many([ref.run_key, ref.request_key, ref.lease_key])
            if run is None or request is None:
                return None
            if lease is not None and decode_record(run, RunRecord).is_ending:
                await asyncio.sleep(_END_WAIT_S)
                continue
            claimed = await self._acquire(ref, run, request, None, is_ending=True)
            if claimed is not None:
                return claimed
        return None

    async def _acquire(
        self, ref: ResponseRef, run_entry: Entry, request_entry: Entry, expect: int | None, *, is_ending: bool = False
    ) -> ClaimedRun | None:
        run, stored_request = decode_record(run_entry, RunRecord), decode_record(request_entry, StoredRequest)
        slot_key, run.slot_key = run.slot_key, ""
        run.begin_attempt(self.sign.name)
        run.is_ending = is_ending
        ops: list[Op] = [
            Put(ref.run_key, encode_record(run), self.retention_s, run_entry.version),
            *(Delete(key) for key in (run.queue_key, slot_key) if key),
        ]
        lease = self._new_lease(ref)
        # durable, so that no store that fails over forgets who runs it
        if await lease.acquire(ops, expect=expect, durable=True) is None:
            return None
        return self._build_claim(run, lease, stored_request)

    def _build_claim(self, run: RunRecord, lease: RunLease, stored_request: StoredRequest) -> ClaimedRun:
        job = Job(lease.ref.tenant, lease.ref, lease.key, lease.lease_s)
        return ClaimedRun(job, run, lease, None, stored_request)

    def _new_lease(self, ref: ResponseRef) -> RunLease:
        return RunLease(self._kv, ref, self._lease_s, self.retention_s, self.sign)

    async def list_orphaned(self) -> list[ResponseRef]:
        """Return the runs that no worker will claim from the queue: in progress without a lease, or queued for too
        long."""
        runs = [
            (_running_ref(stored.key), stored.record)
            async for stored in scan_records(self._kv, "/run/", RunRecord, page_size=_BATCH_SIZE)
        ]
        orphaned: list[ResponseRef] = []
        for start in range(0, len(runs), _BATCH_SIZE):
            batch = runs[start : start + _BATCH_SIZE]
            keys = [run.queue_key if run.status == "queued" else ref.lease_key for ref, run in batch]
            entries = await self._kv.get_many(keys)
            orphaned += [ref for (ref, _), entry in zip(batch, entries, strict=True) if entry is None]
        return orphaned


def _queued_ref(key: str) -> ResponseRef:
    """Return the run that waits under a key of the queue."""
    tenant, _, _, name = key.split("/")[-4:]
    return ResponseRef(tenant, name)


def _running_ref(key: str) -> ResponseRef:
    tenant, _, name = key.removeprefix("/run/").partition("/")
    return ResponseRef(tenant, name)
