"""ProjectLedger: the counters and usage of one project as this process changes them, one atomic write at a time.

Requests and ends that arrive while a write is under way share the next one. A write holds on the condition that no
counter has changed since it was read; only other processes can be in the way.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from apis.accounts.charges import CHARGES_PREFIX, Amounts, ChargeEnd, Demand, OpenCharge
from apis.accounts.limits import RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry
from apis.errors import Overloaded, StackError
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record
from providers.accounts.ledger.counters import UseCounter, Windows
from providers.accounts.ledger.limit_lease import LEASE_SUFFIX, Admission, ChargeRequest, LeaseRecord, LimitLease
from providers.accounts.ledger.round_planner import (
    LedgerRound,
    LedgerRows,
    PendingEnd,
    RoundInput,
    RoundPlanner,
    VoidLease,
    find_usage_row,
)
from providers.accounts.records import find_counter_key, usage_key
from providers.common.state.scan import decode_or_skip

_log = logging.getLogger(__name__)
_ATTEMPTS: Final = 200
_MAX_PAUSE_S: Final = 0.02
"""Longest pause before another attempt, after another process has written the same counter."""
_END_DELAY_S: Final = 0.05
"""Seconds for which ends wait for others, or for the next request, to share a write."""
_RETRY_S: Final = 0.5
"""Seconds between attempts to count ends during an outage of the store."""
_FLUSH_TIMEOUT_S: Final = 2.0
_MAX_ROUND: Final = 200
"""Requests and ends of one write."""
_REST_FACTOR: Final = 4
"""A look in vain at the ends of other processes, because a request would be refused, is followed by a pause of this
many times its duration."""
_MAX_COLLECTED: Final = 1000
_BUSY_S: Final = 0.02
"""Seconds since the last write within which another request counts as one of many."""


@dataclass(frozen=True, slots=True)
class _UnsureEnds:
    """The ends of a write that raised, and what it wrote of the usage, if anything."""

    ends: list[PendingEnd]
    usage_put: Put | None


class ProjectLedger:
    """Admits the requests of one project and counts their ends."""

    def __init__(self, kv: KVStore, planner: RoundPlanner) -> None:
        self._kv = kv
        self._planner = planner
        self._project_id = planner.project_id
        self._requests: list[ChargeRequest] = []
        self._ends: list[PendingEnd] = []
        self._void_leases: list[VoidLease] = []
        self._lease = LimitLease(planner.project_id, planner.process_name)
        self._rows = LedgerRows(self._lease)
        self._written_at = 0.0
        self._is_writing = False
        self._unsure: _UnsureEnds | None = None
        self._flushes: list[asyncio.Future[None]] = []
        self._next_collection_at = 0.0
        self._next_ends_at = 0.0
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, nothing is written and no request is in progress."""
        return not (self._is_running or self._lease.has_charges)

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def reserve(
        self, key_id: str, limits: Mapping[str, RateLimit], demand: Demand, *, priced_as: str
    ) -> Admission:
        """Admit a request. Raises RateLimited, QuotaExceeded, StoreUnavailable and Overloaded."""
        amounts = Amounts(
            demand.input_tokens + demand.output_tokens, demand.tool_calls, self._planner.prices.estimate(demand)
        )
        result = asyncio.get_running_loop().create_future()
        request = ChargeRequest(key_id, limits, demand, amounts, priced_as, result)
        if not (self._is_writing or self._requests):
            admission = self._lease.admit(request)
            if admission is not None:
                return admission
        self._requests.append(request)
        self._wakeup.set()
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            if result.done() and not result.cancelled() and result.exception() is None:
                self._release(result.result())
            raise

    def add(self, end: PendingEnd) -> None:
        """Count an end soon."""
        end.uses = self._planner.find_uses(end.end)
        self._lease.end(end.record, end.uses)
        self._ends.append(end)
        self._start()

    def forget_lease(self) -> None:
        """Read the lease, and the counters of which it is a part, before they are used: others may have released it."""
        self._rows.forget()

    async def flush(self) -> None:
        """Count all ends now; return when that has been tried."""
        if not self._is_running:
            return
        flushed = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._wakeup.set()
        await asyncio.wait({flushed}, timeout=_FLUSH_TIMEOUT_S)

    async def close(self) -> None:
        """Count what waits; during an outage of the store it is lost after a few seconds."""
        await self.flush()
        if self._task is not None and self._is_running:
            self._task.cancel()
            await asyncio.wait({self._task})

    def collect(self, rows: Sequence[tuple[str, Entry]], void_guards: Iterable[str], *, min_age_s: float = 0) -> None:
        """Add the stored ends among the project's charges that are `min_age_s` old, and release the reservations and
        leases whose guard is among `void_guards`."""
        pending, void = {end.record.id for end in self._ends}, set(void_guards)
        for key, entry in rows:
            stored = _decode_charge(self._kv, key, entry)
            if isinstance(stored, ChargeEnd):
                if stored.record.id not in pending and time.time() - stored.ended_at >= min_age_s:
                    pending.add(stored.record.id)  # its reservation, whose key follows, ends with it
                    self.add(PendingEnd(stored, None, entry.version, is_stored=True))
            elif isinstance(stored, LeaseRecord):
                if stored.guard_key in void and key != self._lease.key:
                    self._void_leases.append(VoidLease(key, entry.version, stored.amounts))
                    self._start()
            elif stored is not None and stored.guard_key in void and stored.record.id not in pending:
                released = ChargeEnd(stored.record, int(time.time()))
                # a run that ended after the reservation was read has stored its end before its guard was gone
                self.add(PendingEnd(released, may_be_stored=True, is_void=True))

    def _start(self) -> None:
        if not self._is_running:
            self._task = asyncio.create_task(self._run())

    def _release(self, admission: Admission) -> None:
        record, _, version = admission
        self.add(PendingEnd(ChargeEnd(record, int(time.time())), version))

    def _admit_waiting(self) -> None:
        """Admit those of the requests that have arrived during a write for which the lease has room now."""
        waiting, self._requests = self._requests, []
        for request in waiting:
            admission = None if self._requests or request.result.done() else self._lease.admit(request)
            if admission is not None:
                request.result.set_result(admission)
            elif not request.result.done():
                self._requests.append(request)

    async def _run(self) -> None:
        while self._requests or self._ends or self._void_leases or self._unsure or self._lease.has_free:
            self._wakeup.clear()
            self._admit_waiting()
            if not (self._requests or self._flushes):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_DELAY_S):
                        await self._wakeup.wait()
            requests, self._requests = self._requests[:_MAX_ROUND], self._requests[_MAX_ROUND:]
            flushes: list[asyncio.Future[None]] = []
            if len(self._ends) <= _MAX_ROUND:
                flushes, self._flushes = self._flushes, []
            self._is_writing = True
            try:
                await self._run_round(requests, is_flush=bool(flushes))
            except StackError as exc:
                _fail(requests, exc)
                self._rows.forget()
                self._rows.usage.clear()
                _log.warning("the usage of requests waits: %s", exc.message)
                await asyncio.sleep(_RETRY_S)
            finally:
                self._is_writing = False
                _fail(requests, Overloaded("The limits of this project cannot be counted now.", retry_after_s=1))
                for flushed in flushes:
                    flushed.cancel()
        for flushed in self._flushes:
            flushed.cancel()
        self._flushes.clear()

    async def _run_round(self, requests: list[ChargeRequest], *, is_flush: bool) -> None:
        ends = await self._resolve_unsure()
        # ends have to be read before they are counted: requests do not wait for that each time
        now = time.monotonic()
        is_due = is_flush or not requests or now >= self._next_ends_at or len(self._ends) >= _MAX_ROUND
        if is_due:
            self._next_ends_at = now + _END_DELAY_S
        room = _MAX_ROUND - len(ends) if is_due else 0
        ends, self._ends = [*ends, *self._ends[:room]], self._ends[room:]
        void_leases, self._void_leases = self._void_leases, []
        is_busy = now - self._written_at < _BUSY_S
        round_input = RoundInput(requests, ends, void_leases, is_busy, is_flush)
        try:
            await self._write_round(round_input)
        except StackError:
            if self._unsure is None:
                self._forget_versions(ends)
                self._ends[:0] = ends
            raise

    async def _write_round(self, round_input: RoundInput) -> None:
        has_collected = False
        for _ in range(_ATTEMPTS):
            await self._load(round_input)
            round_ = self._planner.plan(round_input, self._rows)
            if round_.refused and not has_collected:
                has_collected = True
                self._rows.forget()
                await self._collect_own(round_input)  # what others have counted or released since may make room
                continue
            versions = await self._write(round_, round_input.ends) if round_.ops else []
            if versions is not None:
                self._commit(round_, versions)
                return
            self._forget_versions(round_input.ends)
            await asyncio.sleep(random.uniform(0, _MAX_PAUSE_S))  # noqa: S311 - no secret
            await self._reload_void_leases(round_input.void_leases)
        raise Overloaded("Too many requests of this project arrive at the same time.", retry_after_s=1)

    async def _reload_void_leases(self, void_leases: list[VoidLease]) -> None:
        """Remove the leases that others have released or renewed."""
        if void_leases:
            entries = await self._kv.get_many([each.key for each in void_leases])
            void_leases[:] = [
                each
                for each, entry in zip(void_leases, entries, strict=True)
                if entry is not None and entry.version == each.version
            ]

    async def _write(self, round_: LedgerRound, ends: list[PendingEnd]) -> list[int] | None:
        """Write a round. One that raises may have happened: what it wrote of the usage shows that later."""
        usage_prefix = usage_key(None, "", "")
        puts = [op for op in round_.ops if isinstance(op, Put)]
        self._unsure = _UnsureEnds(ends, next((put for put in puts if put.key.startswith(usage_prefix)), None))
        try:
            versions = await self._kv.write(round_.ops, durable=False)
        except StackError:
            for each in round_.admitted:
                if each.op_index is not None:
                    self.add(PendingEnd(ChargeEnd(each.record, int(time.time()))))
            raise
        self._unsure = None
        return versions

    async def _resolve_unsure(self) -> list[PendingEnd]:
        """Return the ends of a write that raised, unless it has happened all the same."""
        unsure = self._unsure
        if unsure is None:
            return []
        entry = await self._kv.get(unsure.usage_put.key) if unsure.usage_put is not None else None
        self._unsure = None
        if unsure.usage_put is not None and entry is not None and entry.value == unsure.usage_put.value:
            for end in unsure.ends:
                self._lease.drop(end.record)
            return []
        self._forget_versions(unsure.ends)
        return unsure.ends

    def _forget_versions(self, ends: Sequence[PendingEnd]) -> None:
        self._rows.forget()
        for end in ends:
            end.open_version = end.end_version = None

    async def _load(self, round_input: RoundInput) -> None:
        """Read what is not in memory, and remove the ends that others have counted."""
        lease, counters, usage = self._lease, self._rows.counters, self._rows.usage
        if lease.version is None:
            lease.load(await self._kv.get(lease.key))
        ends = round_input.ends
        unknown = [end for end in ends if not end.is_known]
        charge_keys = [key for end in unknown for key in (end.record.open_key, end.record.end_key)]
        rows = {find_usage_row(end.end) for end in ends if end.end.counts.requests}
        missing_rows = [row for row in rows if row not in usage]
        missing = [subject for subject in round_input.find_subjects(lease) if subject not in counters]
        keys = [
            *charge_keys,
            *(self._planner.usage_key(row) for row in missing_rows),
            *(find_counter_key(self._project_id, subject) for subject in missing),
        ]
        if not keys:
            return
        entries = await self._kv.get_many(keys)
        for index, end in enumerate(unknown):
            if not end.take_versions(entries[2 * index], entries[2 * index + 1]):
                ends.remove(end)
                lease.drop(end.record)
        late_rows = {find_usage_row(end.end) for end in unknown} - rows
        rest = entries[len(charge_keys) :]
        for row, entry in zip(missing_rows, rest[: len(missing_rows)], strict=True):
            usage[row] = UsageCounts() if entry is None else decode_record(entry, UsageEntry).counts
        now = Windows.at(time.time())
        for subject, entry in zip(missing, rest[len(missing_rows) :], strict=True):
            version = ABSENT if entry is None else entry.version
            counters[subject] = (UseCounter(now) if entry is None else decode_record(entry, UseCounter), version)
        if any(row not in usage for row in late_rows):
            await self._load(round_input)  # a stored end may belong to another row

    async def _collect_own(self, round_input: RoundInput) -> None:
        """Add the ends that other processes have stored, and the reservations and leases that have become void."""
        ends = round_input.ends
        ends += self._ends
        self._ends = []
        began_at = time.monotonic()
        if began_at < self._next_collection_at:
            return
        rows = await self._kv.scan(f"{CHARGES_PREFIX}{self._project_id}/", limit=_MAX_COLLECTED)
        known = {end.record.id for end in ends}
        self.collect(
            [row for row in rows if row[0].split("/")[-2] not in known], await find_void_guards(self._kv, rows)
        )
        if not (self._ends or self._void_leases):
            now = time.monotonic()
            self._next_collection_at = now + _REST_FACTOR * (now - began_at)
        ends += self._ends
        round_input.void_leases += self._void_leases
        self._ends, self._void_leases = [], []

    def _commit(self, round_: LedgerRound, versions: Sequence[int]) -> None:
        for subject, (counter, index) in round_.counters.items():
            self._rows.counters[subject] = (counter, versions[index])
        hour = int(time.time()) // HOUR_S
        usage = {**self._rows.usage, **round_.usage}
        self._rows.usage = {row: counts for row, counts in usage.items() if row[0] >= hour}
        lease = self._lease
        for record in round_.counted:
            lease.drop(record)
        index = round_.lease_index
        version = versions[index] if index is not None else lease.version or ABSENT
        lease.commit(round_.leased, version, round_.others, has_free=round_.has_free)
        for each in round_.admitted:
            if each.op_index is None:
                lease.hold(each.record, each.reserved)
        self._written_at = time.monotonic()
        for each in round_.admitted:
            version = ABSENT if each.op_index is None else versions[each.op_index]
            admission = each.record, each.headers, version
            if each.request.result.done():  # cancelled meanwhile
                self._release(admission)
            else:
                each.request.result.set_result(admission)
        for request, error in round_.refused:
            if not request.result.done():
                request.result.set_exception(error)


async def find_void_guards(kv: KVStore, rows: Sequence[tuple[str, Entry]]) -> set[str]:
    """Return the guard keys of the reservations among `rows` that do not exist."""
    charges = [_decode_charge(kv, key, entry) for key, entry in rows if not key.endswith("/end")]
    ordered = sorted({charge.guard_key for charge in charges if isinstance(charge, LeaseRecord | OpenCharge)})
    entries = await kv.get_many(ordered) if ordered else []
    return {guard for guard, entry in zip(ordered, entries, strict=True) if entry is None}


def _decode_charge(kv: KVStore, key: str, entry: Entry) -> ChargeEnd | LeaseRecord | OpenCharge | None:
    """Return the record, or None if it is damaged: it then counts until it expires, for its project alone."""
    is_end, is_lease = key.endswith("/end"), key.endswith(LEASE_SUFFIX)
    return decode_or_skip(kv, key, entry, ChargeEnd if is_end else LeaseRecord if is_lease else OpenCharge)


def _fail(requests: Sequence[ChargeRequest], error: StackError) -> None:
    for request in requests:
        if not request.result.done():
            request.result.set_exception(error)
