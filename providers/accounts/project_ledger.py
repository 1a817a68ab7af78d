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

from apis.accounts.charges import (
    CHARGES_PREFIX,
    Amounts,
    ChargeEnd,
    ChargeRecord,
    Demand,
    OpenCharge,
)
from apis.accounts.limits import RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry
from apis.errors import Overloaded, StackError
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record
from providers.accounts.counters import UseCounter, Windows
from providers.accounts.ledger_round import (
    ChargeRequest,
    LedgerRound,
    PendingEnd,
    RoundPlanner,
    UsageRow,
    find_usage_row,
)
from providers.accounts.records import find_counter_key, usage_key

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
        self._counters: dict[str, tuple[UseCounter, int]] = {}
        self._usage: dict[UsageRow, UsageCounts] = {}
        self._unsure: _UnsureEnds | None = None
        self._flushes: list[asyncio.Future[None]] = []
        self._next_collection_at = 0.0
        self._next_ends_at = 0.0
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing waits and nothing is written."""
        return self._task is None or self._task.done()

    async def reserve(
        self, key_id: str, limits: Mapping[str, RateLimit], demand: Demand
    ) -> tuple[ChargeRecord, dict[str, str], int]:
        """Return the record of an admitted request, its headers and the version of its reservation. Raises RateLimited,
        QuotaExceeded, StoreUnavailable and Overloaded."""
        amounts = Amounts(
            demand.input_tokens + demand.output_tokens, demand.tool_calls, self._planner.prices.estimate(demand)
        )
        result = asyncio.get_running_loop().create_future()
        request = ChargeRequest(key_id, limits, demand, amounts, result)
        self._requests.append(request)
        self._wakeup.set()
        self._start()
        try:
            return await result
        except asyncio.CancelledError:
            if result.done() and not result.cancelled() and result.exception() is None:
                record, _, version = result.result()
                self.add(PendingEnd(ChargeEnd(record, int(time.time())), record, version))
            raise

    def add(self, end: PendingEnd) -> None:
        """Count an end soon."""
        self._ends.append(end)
        self._start()

    async def flush(self) -> None:
        """Count all ends now; return when that has been tried."""
        if self.is_idle:
            return
        flushed = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._wakeup.set()
        await asyncio.wait({flushed}, timeout=_FLUSH_TIMEOUT_S)

    async def close(self) -> None:
        """Count what waits; during an outage of the store it is lost after a few seconds."""
        await self.flush()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    def collect(self, rows: Sequence[tuple[str, Entry]], void_guards: Iterable[str], *, min_age_s: float = 0) -> None:
        """Add the stored ends among the project's charges that are `min_age_s` old, and release the reservations whose
        guard is among `void_guards`."""
        pending, void = {end.record.id for end in self._ends}, set(void_guards)
        for key, entry in rows:
            if key.endswith("/end"):
                end = decode_record(entry, ChargeEnd)
                if end.record.id not in pending and time.time() - end.ended_at >= min_age_s:
                    pending.add(end.record.id)  # its reservation, whose key follows, ends with it
                    self.add(PendingEnd(end, end.record, None, entry.version, is_stored=True))
            elif (charge := decode_record(entry, OpenCharge)).guard_key in void and charge.record.id not in pending:
                released = ChargeEnd(charge.record, int(time.time()))
                self.add(PendingEnd(released, charge.record, entry.version))

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._requests or self._ends or self._unsure:
            if not self._requests:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_DELAY_S):
                        await self._wakeup.wait()
            self._wakeup.clear()
            requests, self._requests = self._requests[:_MAX_ROUND], self._requests[_MAX_ROUND:]
            flushes: list[asyncio.Future[None]] = []
            if len(self._ends) <= _MAX_ROUND:
                flushes, self._flushes = self._flushes, []
            try:
                await self._run_round(requests, is_flush=bool(flushes))
            except StackError as exc:
                _fail(requests, exc)
                self._counters.clear()
                self._usage.clear()
                _log.warning("the usage of requests waits: %s", exc.message)
                await asyncio.sleep(_RETRY_S)
            finally:
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
        try:
            await self._write_round(requests, ends)
        except StackError:
            if self._unsure is None:
                self._forget_versions(ends)
                self._ends[:0] = ends
            raise

    async def _write_round(self, requests: list[ChargeRequest], ends: list[PendingEnd]) -> None:
        has_collected = False
        for _ in range(_ATTEMPTS):
            await self._load(requests, ends)
            round_ = self._planner.plan(requests, ends, self._counters, self._usage)
            if round_.refused and not has_collected:
                has_collected = True
                self._counters.clear()
                ends += self._ends
                self._ends = []
                await self._collect_own(ends)  # what others have counted or released since may make room
                continue
            versions = await self._write(round_, ends) if round_.ops else []
            if versions is not None:
                self._commit(round_, versions)
                return
            self._forget_versions(ends)
            await asyncio.sleep(random.uniform(0, _MAX_PAUSE_S))  # noqa: S311 - no secret
        raise Overloaded("Too many requests of this project arrive at the same time.", retry_after_s=1)

    async def _write(self, round_: LedgerRound, ends: list[PendingEnd]) -> list[int] | None:
        """Write a round. One that raises may have happened: what it wrote of the usage shows that later."""
        usage_prefix = usage_key(None, "", "")
        puts = [op for op in round_.ops if isinstance(op, Put)]
        self._unsure = _UnsureEnds(ends, next((put for put in puts if put.key.startswith(usage_prefix)), None))
        try:
            versions = await self._kv.write(round_.ops, durable=False)
        except StackError:
            self._ends += [PendingEnd(ChargeEnd(each[1], int(time.time())), each[1]) for each in round_.admitted]
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
            return []
        self._forget_versions(unsure.ends)
        return unsure.ends

    def _forget_versions(self, ends: Sequence[PendingEnd]) -> None:
        self._counters.clear()
        for end in ends:
            end.open_version = end.end_version = None

    async def _load(self, requests: Sequence[ChargeRequest], ends: list[PendingEnd]) -> None:
        """Read what is not in memory, and remove the ends that others have counted."""
        unknown = [end for end in ends if not end.is_known]
        charge_keys = [key for end in unknown for key in (end.record.open_key, end.record.end_key)]
        rows = {find_usage_row(end.end) for end in ends if end.end is not None and end.end.counts.requests}
        missing_rows = [row for row in rows if row not in self._usage]
        subjects = {subject for request in requests for subject in request.limits}
        subjects |= {part.subject for end in ends for part in end.record.parts}
        missing = [subject for subject in subjects if subject not in self._counters]
        keys = [
            *charge_keys,
            *(self._planner.usage_key(row) for row in missing_rows),
            *(find_counter_key(self._project_id, subject) for subject in missing),
        ]
        if not keys:
            return
        entries = await self._kv.get_many(keys)
        for index, end in enumerate(unknown):
            if not _take_versions(end, entries[2 * index], entries[2 * index + 1]):
                ends.remove(end)
        late_rows = {find_usage_row(end.end) for end in unknown if end.end is not None} - rows
        rest = entries[len(charge_keys) :]
        for row, entry in zip(missing_rows, rest[: len(missing_rows)], strict=True):
            self._usage[row] = UsageCounts() if entry is None else decode_record(entry, UsageEntry).counts
        now = Windows.at(time.time())
        for subject, entry in zip(missing, rest[len(missing_rows) :], strict=True):
            version = ABSENT if entry is None else entry.version
            self._counters[subject] = (UseCounter(now) if entry is None else decode_record(entry, UseCounter), version)
        if any(row not in self._usage for row in late_rows):
            await self._load(requests, ends)  # the ends say only now which rows they belong to

    async def _collect_own(self, ends: list[PendingEnd]) -> None:
        """Add to `ends` those that other processes have stored, and the reservations that have become void."""
        began_at = time.monotonic()
        if began_at < self._next_collection_at:
            return
        rows = await self._kv.scan(f"{CHARGES_PREFIX}{self._project_id}/", limit=_MAX_COLLECTED)
        known = {end.record.id for end in ends}
        self.collect(
            [row for row in rows if row[0].split("/")[-2] not in known], await find_void_guards(self._kv, rows)
        )
        if not self._ends:
            now = time.monotonic()
            self._next_collection_at = now + _REST_FACTOR * (now - began_at)
        ends += self._ends
        self._ends = []

    def _commit(self, round_: LedgerRound, versions: Sequence[int]) -> None:
        first_counter = len(round_.ops) - len(round_.usage) - len(round_.counters)
        for index, (subject, counter) in enumerate(round_.counters.items(), first_counter):
            self._counters[subject] = (counter, versions[index])
        hour = int(time.time()) // HOUR_S
        self._usage = {row: counts for row, counts in {**self._usage, **round_.usage}.items() if row[0] >= hour}
        for request, record, headers, index in round_.admitted:
            if request.result.done():  # cancelled meanwhile
                self._ends.append(PendingEnd(ChargeEnd(record, int(time.time())), record, versions[index]))
            else:
                request.result.set_result((record, headers, versions[index]))
        for request, error in round_.refused:
            if not request.result.done():
                request.result.set_exception(error)


async def find_void_guards(kv: KVStore, rows: Sequence[tuple[str, Entry]]) -> set[str]:
    """Return the guard keys of the reservations among `rows` that do not exist."""
    guards = {decode_record(entry, OpenCharge).guard_key for key, entry in rows if key.endswith("/open")}
    ordered = sorted(guards)
    entries = await kv.get_many(ordered) if ordered else []
    return {guard for guard, entry in zip(ordered, entries, strict=True) if entry is None}


def _take_versions(pending: PendingEnd, open_entry: Entry | None, end_entry: Entry | None) -> bool:
    """Complete an end by what is stored of it; return false if another has counted it."""
    pending.open_version = ABSENT if open_entry is None else open_entry.version
    if pending.is_stored or (pending.may_be_stored and end_entry is not None):
        if end_entry is None:
            return False
        pending.end, pending.end_version = decode_record(end_entry, ChargeEnd), end_entry.version
        pending.is_stored = True
    pending.may_be_stored = False
    return True


def _fail(requests: Sequence[ChargeRequest], error: StackError) -> None:
    for request in requests:
        if not request.result.done():
            request.result.set_exception(error)
