"""Runs: the background responses that are not at their end, in a KVStore, and their legal moves.

    /run/TENANT/ID                     how far it is: there from the first answer until the end, whatever the end is
    /queue/RANK/TIME/TENANT/ID         that it waits for a worker; the smallest key is served first
    /place/TENANT/NUMBER               who has this place among those that wait: there are so many, and no more can wait
    /lease/TENANT/ID                   that a worker has it; gone when the worker has not renewed it in time
    TENANT/request/ID                  what was asked

    queued --claim--> in_progress --end--> (kept by History: completed, incomplete, failed or cancelled)
       ^ \\--end------------------------>     |
       '------------- give back ------------'

Every move is one atomic write that expects the record, or the lease, as it was read: of two that would make a move,
one does. A lease lives by the clock of the store, so clocks that differ between machines mislead nobody; and whoever
holds none that lives can write nothing. No tenant's name is empty, so no tenant's key begins with a slash.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec

from apis.errors import RateLimited, StackError, StoreUnavailable
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from providers.responses.events.ids import is_response_id

_log = logging.getLogger(__name__)
RecordT = TypeVar("RecordT")
_PAGE_SIZE = 1000
_RETRY_INTERVAL_S = 0.2


class RunRecord(
    msgspec.Struct,
    rename={"queue_key": "queue", "is_portable": "portable", "slot_key": "place", "handover_count": "handed"},
):
    """How far a response is. `queue` is its key in the queue, which is gone when it has waited for too long; not
    `portable` ones only the process that took the request can make, because what it holds is not for storing. Of its
    `attempts`, so many were `handed` over by a worker that had to leave."""

    status: Literal["queued", "in_progress"]
    queue_key: str
    is_portable: bool = True
    attempts: int = 0
    slot_key: str = ""
    handover_count: int = 0


class StoredRequest(msgspec.Struct, rename={"input_items": "given", "item_id_count": "ids"}):
    """What was asked: the request, its input items as they are listed, and how many item ids those took."""

    request: msgspec.Raw
    input_items: msgspec.Raw
    item_id_count: int
    created_at: int


@dataclass(frozen=True, slots=True)
class ResponseRef:
    """Which response."""

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


class LeaseLost(Exception):
    """Another has the run by now, or nobody: what was made since is void."""


def run_key(tenant: str, response_id: str) -> str:
    """Of the record that is there until the response is at its end."""
    return f"/run/{tenant}/{response_id}"


_decode_run = msgspec.json.Decoder(RunRecord).decode
_decode_request = msgspec.json.Decoder(StoredRequest).decode
_encode = msgspec.json.Encoder().encode


class Lease:
    """The right to go on with one run, for `lease_s` from each write. Not for two tasks at a time."""

    def __init__(self, kv: KVStore, ref: ResponseRef, lease_s: float, retention_s: float) -> None:
        self.ref = ref
        self._kv = kv
        self.lease_s = lease_s
        self.retention_s = retention_s
        self._holder = secrets.token_hex(8)
        self._write_number = 0
        self._version = ABSENT

    def acquire_op(self, expect: int | None = ABSENT) -> Put:
        """The write that takes it; None as `expect` takes it from whoever has it."""
        self._write_number += 1
        return Put(self.ref.lease_key, f"{self._holder} {self._write_number}".encode(), self.lease_s, expect)

    def mark_acquired(self, version: int) -> None:
        """The write was made."""
        self._version = version

    async def write(self, ops: Sequence[Op] = (), *, durable: bool = False) -> None:
        """Write as the holder, which renews the lease. Raises LeaseLost. An outage of the store is waited out for as
        long as the lease can live."""
        deadline = time.monotonic() + self.lease_s
        put = self.acquire_op(self._version)
        while True:
            try:
                versions = await self._kv.write([put, *ops], durable=durable)
                break
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise LeaseLost from None
            if await self._was_written(put, deadline):
                return
        if versions is None:
            raise LeaseLost
        self._version = versions[0]

    async def _was_written(self, put: Put, deadline: float) -> bool:
        """Whether a write that raised was made all the same: the lease says so."""
        while True:
            await asyncio.sleep(_RETRY_INTERVAL_S)
            try:
                entry = await self._kv.get(put.key)
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise LeaseLost from None
                continue
            if entry is None or (entry.value != put.value and entry.version != self._version):
                raise LeaseLost
            if entry.value == put.value:
                self._version = entry.version
            return entry.value == put.value

    def end_ops(self) -> list[Op]:
        """What ends the run, if this lease still lives: to be written together with how it ended."""
        return [Delete(self.ref.lease_key, self._version), Delete(self.ref.run_key), Delete(self.ref.request_key)]

    async def release(self, run: RunRecord, extra_ops: Sequence[Op] = ()) -> None:
        """Let another worker go on at once, after `also`; nothing happens when the lease is lost."""
        run.handover_count += 1
        ops: list[Op] = [
            Delete(self.ref.lease_key, self._version),
            Put(self.ref.run_key, _encode(run), self.retention_s),
            Put(run.queue_key, _encode_ref(self.ref), 60 * self.lease_s),
        ]
        await self._kv.write([*ops, *extra_ops])


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run, what was asked, and the right to go on with it; `late` if it had waited for too long."""

    run: RunRecord
    stored_request: StoredRequest
    lease: Lease
    is_late: bool = False

    @property
    def ref(self) -> ResponseRef:
        return self.lease.ref


class Runs:
    """All runs of a store. Of a tenant, `max_waiting` can wait."""

    def __init__(
        self, kv: KVStore, *, lease_s: float, queue_timeout_s: float, retention_s: float, max_waiting: int
    ) -> None:
        self._kv = kv
        self._lease_s = lease_s
        self._queue_timeout_s = queue_timeout_s
        self._retention_s = retention_s
        self._max_waiting = max_waiting

    async def add(
        self,
        ref: ResponseRef,
        priority: int,
        stored_request: StoredRequest,
        extra_ops: Sequence[Op],
        *,
        is_portable: bool,
        start_now: bool,
    ) -> ClaimedRun | None:
        """A new one, written with `also`: it waits from now on, or is claimed `at_once`. Raises LeaseLost when
        something in `also` does not hold, RateLimited when too many of the tenant's wait already."""
        queue = f"/queue/{priority}/{time.time_ns() // 1000:017d}/{ref.tenant}/{ref.id}"
        run = RunRecord("in_progress" if start_now else "queued", queue, is_portable, int(start_now))
        lease = self._new_lease(ref)
        request = Put(ref.request_key, _encode(stored_request), self._retention_s)
        waits = Put(queue, _encode_ref(ref), self._queue_timeout_s)
        while True:
            taken: list[Op] = [lease.acquire_op()]
            if not start_now:
                run.slot_key = await self._draw_free_slot(ref.tenant)
                taken = [waits, Put(run.slot_key, ref.id.encode(), self._retention_s, ABSENT)]
            record = Put(ref.run_key, _encode(run), self._retention_s, ABSENT)
            versions = await self._kv.write([record, request, *extra_ops, *taken])
            if versions is not None:
                break
            if start_now or await self._kv.get(run.slot_key) is None:
                raise LeaseLost
        lease.mark_acquired(versions[-1])
        return ClaimedRun(run, stored_request, lease) if start_now else None

    async def _draw_free_slot(self, tenant: str) -> str:
        """A place that nobody has, drawn, so that many who come together seldom draw the same."""
        prefix = f"/place/{tenant}/"
        rows = await self._kv.scan(prefix, limit=self._max_waiting)
        free = set(range(self._max_waiting)) - {int(key[len(prefix) :]) for key, _ in rows}
        if not free:
            raise RateLimited(
                f"{self._max_waiting} background responses are waiting already (`responses.background.max_waiting`).",
                retry_after_s=5,
            )
        return f"{prefix}{random.choice([*free]):08d}"  # noqa: S311 - nothing is secret about it

    async def has_waiting(self, tenant: str) -> bool:
        """Whether any of the tenant's wait."""
        return bool(await self._kv.scan(f"/place/{tenant}/", limit=1))

    async def count_running(self, tenant: str, limit: int) -> int:
        """How many of the tenant's are being made, counted up to `most`."""
        return len(await self._kv.scan(f"/lease/{tenant}/", limit=limit))

    async def list_waiting(self, limit: int) -> list[tuple[str, ResponseRef]]:
        """Who waits, by their keys in the queue, first served first."""
        return [(key, _decode_ref(entry.value)) for key, entry in await self._kv.scan("/queue/", limit=limit)]

    async def get(self, ref: ResponseRef) -> tuple[RunRecord, StoredRequest] | None:
        """A run that is not at its end."""
        if not is_response_id(ref.id):
            return None
        run, asked = await self._kv.get_many([ref.run_key, ref.request_key])
        return (
            None
            if run is None or asked is None
            else (_decode_record(_decode_run, run), _decode_record(_decode_request, asked))
        )

    async def claim(self, ref: ResponseRef, queue_key: str = "") -> ClaimedRun | None:
        """Take what nobody has, from the queue or from where it was left; None if somebody has it, or it is at its
        end."""
        found, asked, held = await self._kv.get_many([ref.run_key, ref.request_key, ref.lease_key])
        if found is None or asked is None:
            if queue_key:
                await self._kv.write([Delete(queue_key)], durable=False)
            return None
        if held is not None:
            return None
        late = not queue_key and _decode_record(_decode_run, found).status == "queued"
        claimed = await self._acquire(ref, found, asked, self._new_lease(ref), ABSENT)
        return replace(claimed, is_late=late) if claimed else None

    async def take_over(self, ref: ResponseRef) -> ClaimedRun | None:
        """Take a run from whoever has it; None when it is at its end."""
        while is_response_id(ref.id):
            found, asked = await self._kv.get_many([ref.run_key, ref.request_key])
            if found is None or asked is None:
                return None
            claimed = await self._acquire(ref, found, asked, self._new_lease(ref), None)
            if claimed is not None:
                return claimed
        return None

    async def _acquire(
        self, ref: ResponseRef, run_entry: Entry, request_entry: Entry, lease: Lease, expect: int | None
    ) -> ClaimedRun | None:
        run = _decode_record(_decode_run, run_entry)
        place, run.slot_key = run.slot_key, ""
        run.status = "in_progress"
        run.attempts += 1
        ops: list[Op] = [
            lease.acquire_op(expect),
            Put(ref.run_key, _encode(run), self._retention_s, run_entry.version),
            Delete(run.queue_key),
        ]
        if place:
            ops.append(Delete(place))
        versions = await self._kv.write(ops, durable=False)
        if versions is None:
            return None
        lease.mark_acquired(versions[0])
        return ClaimedRun(run, _decode_record(_decode_request, request_entry), lease)

    def _new_lease(self, ref: ResponseRef) -> Lease:
        return Lease(self._kv, ref, self._lease_s, self._retention_s)

    async def list_orphaned(self) -> list[ResponseRef]:
        """Runs that need somebody: in progress and of nobody, or queued for too long."""
        left: list[ResponseRef] = []
        after = ""
        while rows := await self._kv.scan("/run/", after=after, limit=_PAGE_SIZE):
            after = rows[-1][0]
            runs = {_ref_from_run_key(row[0]): run for row in rows if (run := _decode_run_row(row)) is not None}
            wanted = [run.queue_key if run.status == "queued" else ref.lease_key for ref, run in runs.items()]
            found = await self._kv.get_many(wanted)
            left += [ref for ref, entry in zip(runs, found, strict=True) if entry is None]
        return left


def _decode_record(decode: Callable[[bytes], RecordT], entry: Entry) -> RecordT:
    try:
        return decode(entry.value)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def _decode_run_row(row: tuple[str, Entry]) -> RunRecord | None:
    """None for a damaged record: it must not keep the others waiting."""
    try:
        return _decode_run(row[1].value)
    except msgspec.MsgspecError:
        _log.error("the record %s cannot be read", row[0])
        return None


def _encode_ref(ref: ResponseRef) -> bytes:
    return f"{ref.tenant}/{ref.id}".encode()


def _decode_ref(value: bytes) -> ResponseRef:
    tenant, _, name = value.decode().partition("/")
    return ResponseRef(tenant, name)


def _ref_from_run_key(key: str) -> ResponseRef:
    return _decode_ref(key.removeprefix("/run/").encode())
