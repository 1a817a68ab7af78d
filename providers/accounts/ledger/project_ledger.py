"""ProjectLedger: the counters and usage of one project as this process changes them, one atomic write at a time.

Requests and ends that arrive while a write is under way share the next one. A write holds on the condition that no
counter has changed since it was read; only other processes can be in the way. Where all projects together have a limit,
their requests count under one counter, so one ledger of this process is for all of them.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from apis.accounts.charges import CHARGES_PREFIX, Amounts, ChargeEnd, ChargeRecord, Demand, OpenCharge
from apis.accounts.limits import ORGANIZATION, RateLimit
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
from providers.accounts.records import (
    ORGANIZATION_COUNTER,
    ORGANIZATION_ID,
    find_counter_key,
    usage_key,
)
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
_MAX_COLLECTED_PROJECTS: Final = 10
_MAX_COUNTERS: Final = 10_000
"""Counters that stay in memory while nothing is leased of them."""
_ORGANIZATION_KEY: Final = find_counter_key(ORGANIZATION_ID, ORGANIZATION)
_BUSY_S: Final = 0.02
"""Seconds since the last write within which another request counts as one of many."""


@dataclass(frozen=True, slots=True)
class _UnsureEnds:
    """The ends of a write that raised, and what it wrote of the usage, if anything."""

    ends: list[PendingEnd]
    usage_put: Put | None


class ProjectLedger:
    """Admits the requests of one project, or of all projects together, and counts their ends. `ledger_id` is that of
    the project, or ORGANIZATION_ID."""

    def __init__(self, kv: KVStore, ledger_id: str, planner: RoundPlanner) -> None:
        self._kv = kv
        self._planner = planner
        self._ledger_id = ledger_id
        self._requests: list[ChargeRequest] = []
        self._ends: list[PendingEnd] = []
        self._void_leases: list[VoidLease] = []
        self._lease = LimitLease(ledger_id, planner.writer_name)
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
        self, caller_ids: tuple[str, str], limits: Mapping[str, RateLimit], demand: Demand, *, priced_as: str
    ) -> Admission:
        """Admit a request. Raises RateLimited, QuotaExceeded, StoreUnavailable and Overloaded."""
        amounts = Amounts(
            demand.input_tokens + demand.output_tokens, demand.tool_calls, self._planner.prices.estimate(demand)
        )
        result = asyncio.get_running_loop().create_future()
        subjects = {find_counter_key(caller_ids[0], subject): subject for subject in limits}
        limits = {key: limits[subject] for key, subject in subjects.items()}
        request = ChargeRequest(caller_ids, limits, subjects, demand, amounts, priced_as, result)
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

    def collect(self, charges: Iterable[PendingEnd | VoidLease]) -> None:
        """Add stored ends, and what is to be released, unless their ends wait here already."""
        pending = {end.record.id for end in self._ends}
        for charge in charges:
            if isinstance(charge, VoidLease):
                self._void_leases.append(charge)
                self._start()
            elif charge.record.id not in pending:
                pending.add(charge.record.id)  # its reservation, whose key follows, ends with it
                self.add(charge)

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
        while self._requests or self._ends or self._void_leases or self._unsure or self._lease.free_since:
            self._wakeup.clear()
            self._admit_waiting()
            if not (self._requests or self._flushes):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_DELAY_S):
                        await self._wakeup.wait()
            requests = self._take_requests()
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

    def _take_requests(self) -> list[ChargeRequest]:
        """Remove the requests of the next write from those that wait; of more than fit, projects take turns."""
        waiting, self._requests = self._requests, []
        if len(waiting) <= _MAX_ROUND:
            return waiting
        turns: dict[str, int] = {}
        ranked: list[tuple[int, int]] = []
        for index, request in enumerate(waiting):
            turns[request.project_id] = turn = turns.get(request.project_id, 0) + 1
            ranked.append((turn, index))
        chosen = {index for _, index in sorted(ranked)[:_MAX_ROUND]}
        self._requests = [request for index, request in enumerate(waiting) if index not in chosen]
        return [waiting[index] for index in sorted(chosen)]

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
        round_input = RoundInput(requests, ends, void_leases, is_busy, is_flush, now - _END_DELAY_S)
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
                # what others have counted or released since may make room
                await self._collect_own(round_input, {request.project_id for request, _ in round_.refused})
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
        missing = [*(round_input.find_counters(lease) - counters.keys() - self._rows.damaged)]
        keys = [*charge_keys, *(self._planner.usage_key(row) for row in missing_rows), *missing]
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
        for key, entry in zip(missing, rest[len(missing_rows) :], strict=True):
            version = ABSENT if entry is None else entry.version
            counter = UseCounter(now) if entry is None else decode_or_skip(self._kv, key, entry, UseCounter)
            if counter is None and key == ORGANIZATION_COUNTER:
                counter = UseCounter(now)  # which would refuse all projects; setting the limit again sums the month
            if counter is None:
                self._rows.damaged.add(key)
            else:
                counters[key] = counter, version
        if any(row not in usage for row in late_rows):
            await self._load(round_input)  # a stored end may belong to another row

    async def _collect_own(self, round_input: RoundInput, project_ids: set[str]) -> None:
        """Add the ends that other processes have stored, and the reservations and leases that have become void, of
        these projects and of the leases of this ledger."""
        ends = round_input.ends
        ends += self._ends
        self._ends = []
        began_at = time.monotonic()
        if began_at < self._next_collection_at:
            return
        rows: list[tuple[str, Entry]] = []
        for project_id in {*sorted(project_ids)[:_MAX_COLLECTED_PROJECTS], self._ledger_id}:
            rows += await self._kv.scan(f"{CHARGES_PREFIX}{project_id}/", limit=_MAX_COLLECTED)
        known_ids = {end.record.id for end in ends}
        charges = await find_uncounted(self._kv, rows, self._planner.guard_key)
        self.collect(
            charge
            for ledger_id, charge in charges
            if ledger_id == self._ledger_id and (isinstance(charge, VoidLease) or charge.record.id not in known_ids)
        )
        if not (self._ends or self._void_leases):
            now = time.monotonic()
            self._next_collection_at = now + _REST_FACTOR * (now - began_at)
        ends += self._ends
        round_input.void_leases += self._void_leases
        self._ends, self._void_leases = [], []

    def _commit(self, round_: LedgerRound, versions: Sequence[int]) -> None:
        counters = self._rows.counters
        for key, (counter, index) in round_.counters.items():
            counters[key] = (counter, versions[index])
        if len(counters) > _MAX_COUNTERS:
            self._rows.counters = {key: counters[key] for key in round_.leased if key in counters}
        hour = int(time.time()) // HOUR_S
        usage = {**self._rows.usage, **round_.usage}
        self._rows.usage = {row: counts for row, counts in usage.items() if row[0] >= hour}
        lease = self._lease
        for record in round_.counted:
            lease.drop(record)
        index = round_.lease_index
        version = versions[index] if index is not None else lease.version or ABSENT
        lease.commit(round_.leased, version, round_.others, frozenset(round_.free))
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


async def find_uncounted(
    kv: KVStore, rows: Sequence[tuple[str, Entry]], guard_key: str, *, min_age_s: float = 0
) -> list[tuple[str, PendingEnd | VoidLease]]:
    """Return, among these charges of the store, the stored ends that are `min_age_s` old, and the reservations and
    leases whose guard is gone, each with the id of the ledger that it belongs to. Leases with the guard `guard_key` are
    those of this process."""
    stored = [(key, entry.version, charge) for key, entry in rows if (charge := _decode_charge(kv, key, entry))]
    guards = sorted({charge.guard_key for _, _, charge in stored if not isinstance(charge, ChargeEnd)})
    entries = await kv.get_many(guards) if guards else []
    void_guards = {guard for guard, entry in zip(guards, entries, strict=True) if entry is None}
    now, found = time.time(), list[tuple[str, PendingEnd | VoidLease]]()
    for key, version, charge in stored:
        if isinstance(charge, ChargeEnd):
            if now - charge.ended_at >= min_age_s:
                found.append((find_ledger_id(charge.record), PendingEnd(charge, None, version, is_stored=True)))
        elif charge.guard_key not in void_guards:
            continue
        elif isinstance(charge, OpenCharge):
            released = ChargeEnd(charge.record, int(now))
            # a run that ended after the reservation was read has stored its end before its guard was gone
            found.append((find_ledger_id(charge.record), PendingEnd(released, may_be_stored=True, is_void=True)))
        elif charge.guard_key != guard_key:
            ledger_id = key.removeprefix(CHARGES_PREFIX).partition("/")[0]
            found.append((ledger_id, VoidLease(key, version, charge.amounts)))
    return found


def find_ledger_id(record: ChargeRecord) -> str:
    """Return the id of the ledger that a charge belongs to: that of all projects together if it counts under their
    limit."""
    is_of_all = any(part.counter_key == _ORGANIZATION_KEY for part in record.parts)
    return ORGANIZATION_ID if is_of_all else record.project_id


def _decode_charge(kv: KVStore, key: str, entry: Entry) -> ChargeEnd | LeaseRecord | OpenCharge | None:
    """Return the record, or None if it is damaged: it then counts until it expires, for its project alone."""
    is_end, is_lease = key.endswith("/end"), key.endswith(LEASE_SUFFIX)
    return decode_or_skip(kv, key, entry, ChargeEnd if is_end else LeaseRecord if is_lease else OpenCharge)


def _fail(requests: Sequence[ChargeRequest], error: StackError) -> None:
    for request in requests:
        if not request.result.done():
            request.result.set_exception(error)
