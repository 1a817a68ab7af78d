"""RoundPlanner: the changes of counters, reservations and usage that one atomic write makes. Pure functions."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from apis.accounts.charges import RECORD_TTL_S, Amounts, ChargeEnd, ChargeRecord, OpenCharge
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT, RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageSubject
from apis.errors import StackError, StorageCorrupt
from apis.storage.kv_store import ABSENT, Delete, Entry, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.ledger.counters import UseCounter, Windows, add_headers
from providers.accounts.ledger.limit_lease import ChargeRequest, LeaseRecord, LimitLease, add_recent
from providers.accounts.prices import Prices
from providers.accounts.records import usage_key

COUNTER_TTL_S: Final = 32 * 24 * 3600.0
_FREE_SHARE: Final = 128
"""A process leases at most this fraction of what is free under a limit for requests that come next."""
UsageRow = tuple[int, UsageSubject]
"""The hour (since 1970) and the subject of a sum of usage."""


@dataclass(slots=True, eq=False)
class PendingEnd:
    """An end to be counted. `open_version` is that of its own stored reservation, None if unknown. `end_version` is
    that of the stored end, None if unknown, where `is_stored` or `may_be_stored`. With `is_void` it releases a
    reservation whose guard is gone, unless an end is stored for it."""

    end: ChargeEnd
    open_version: int | None = None
    end_version: int | None = None
    is_stored: bool = False
    may_be_stored: bool = False
    is_void: bool = False
    uses: dict[str, UseCounter] | None = None
    """The result of `find_uses`; None where the stored end is another one."""

    @property
    def record(self) -> ChargeRecord:
        """The charge that has ended."""
        return self.end.record

    @property
    def is_known(self) -> bool:
        """True if nothing of it has to be read before it is counted."""
        has_open = self.open_version is not None or not self.record.parts
        return has_open and not self.may_be_stored and (not self.is_stored or self.end_version is not None)

    def take_versions(self, open_entry: Entry | None, end_entry: Entry | None) -> bool:
        """Complete the end by what is stored of it; return false if another process has counted it."""
        self.open_version = ABSENT if open_entry is None else open_entry.version
        if self.is_void and open_entry is None:
            return False
        if self.is_stored or (self.may_be_stored and end_entry is not None):
            if end_entry is None:
                return False
            stored = decode_record(end_entry, ChargeEnd)
            self.end_version, self.is_stored = end_entry.version, True
            if stored != self.end:
                self.end, self.uses = stored, None
        self.may_be_stored = False
        return True


@dataclass(frozen=True, slots=True)
class VoidLease:
    """The stored lease of a process that does not run any more."""

    key: str
    version: int
    amounts: Mapping[str, UseCounter]


@dataclass(slots=True, eq=False)
class RoundInput:
    """The input of one write. `is_busy` says that the last write was a moment ago, and `is_flush` that no requests are
    expected. What was leased for requests that come next is given back if it is free since `free_before`."""

    requests: Sequence[ChargeRequest]
    ends: list[PendingEnd]
    void_leases: list[VoidLease]
    is_busy: bool
    is_flush: bool
    free_before: float

    def find_counters(self, lease: LimitLease) -> set[str]:
        """Return the keys of the counters that the write may change."""
        keys = {key for request in self.requests for key in request.limits}
        keys.update(part.counter_key for end in self.ends for part in end.record.parts)
        keys.update(key for void in self.void_leases for key in void.amounts)
        if lease.is_changed or not self.requests:
            return keys.union(lease.leased, lease.taken)
        return keys.union(key for key, since in lease.free_since.items() if since < self.free_before)


@dataclass(slots=True)
class LedgerRows:
    """The rows of a ledger as they are in the store: counters with their versions, sums of usage, and the lease. The
    counters that are `damaged` count nothing, and the requests that need them are refused."""

    lease: LimitLease
    counters: dict[str, tuple[UseCounter, int]] = field(default_factory=dict[str, tuple[UseCounter, int]])
    usage: dict[UsageRow, UsageCounts] = field(default_factory=dict[UsageRow, UsageCounts])
    damaged: set[str] = field(default_factory=set[str])

    def forget(self) -> None:
        """Have the counters and the lease read again."""
        self.counters.clear()
        self.damaged.clear()
        self.lease.forget()


@dataclass(slots=True)
class Admitted:
    """A request that the write admits. `op_index` is that of its own reservation, None where the lease has it."""

    request: ChargeRequest
    record: ChargeRecord
    headers: dict[str, str]
    reserved: dict[str, UseCounter]
    op_index: int | None


@dataclass(slots=True)
class LedgerRound:
    """The changes of one write. Each counter is the sum of `others`, which no part of this process's lease is, and of
    `leased`, which is `taken` by requests or free."""

    others: dict[str, UseCounter]
    taken: dict[str, UseCounter]
    ops: list[Op] = field(default_factory=list[Op])
    counters: dict[str, tuple[UseCounter, int]] = field(default_factory=dict[str, tuple[UseCounter, int]])
    """The counters that change, with the indexes of their operations."""
    usage: dict[UsageRow, UsageCounts] = field(default_factory=dict[UsageRow, UsageCounts])
    leased: dict[str, UseCounter] = field(default_factory=dict[str, UseCounter])
    free: set[str] = field(default_factory=set[str])
    """The keys of the counters of which more is leased than taken."""
    lease_index: int | None = None
    admitted: list[Admitted] = field(default_factory=list[Admitted])
    refused: list[tuple[ChargeRequest, StackError]] = field(default_factory=list[tuple[ChargeRequest, StackError]])
    counted: list[ChargeRecord] = field(default_factory=list[ChargeRecord])
    deleted_keys: set[str] = field(default_factory=set[str])

    def delete(self, key: str, version: int | None) -> bool:
        """Delete a key of this version; return false if the round deletes it already."""
        if key in self.deleted_keys:
            return False
        self.deleted_keys.add(key)
        self.ops.append(Delete(key, version))
        return True


@dataclass(frozen=True, slots=True)
class RoundPlanner:
    """Plans the rounds of one ledger. `writer_name` is in the keys of the usage rows that this ledger alone writes;
    `guard_key` guards its lease."""

    writer_name: str
    guard_key: str
    prices: Prices
    usage_ttl_s: float

    def plan(self, round_input: RoundInput, rows: LedgerRows) -> LedgerRound:
        """Return the changes, ends first: they make room."""
        now, lease = Windows.at(time.time()), rows.lease
        round_ = LedgerRound({}, {})
        for key in round_input.find_counters(lease) - rows.damaged:
            counter = rows.counters[key][0].advance(now)
            nothing = UseCounter(counter.windows)
            round_.others[key] = counter.minus(lease.leased.get(key, nothing))
            round_.taken[key] = nothing.plus(lease.taken.get(key, nothing))
        for void in round_input.void_leases:
            if round_.delete(void.key, void.version):
                for key, amounts in void.amounts.items():
                    if key in round_.others:
                        round_.others[key] = round_.others[key].minus(amounts)
        for end in round_input.ends:
            self._plan_end(end, rows, round_)
        for request in round_input.requests:
            if not request.result.done():
                self._plan_request(request, round_)
        recent = {} if round_input.is_flush else self._find_recent(round_input, lease, round_)
        self._plan_lease(round_, rows, recent)
        for row, counts in round_.usage.items():
            entry = UsageEntry(row[0] * HOUR_S, row[1], counts)
            round_.ops.append(Put(self.usage_key(row), encode_record(entry), self.usage_ttl_s))
        return round_

    def find_uses(self, end: ChargeEnd) -> dict[str, UseCounter]:
        """Return the use with which a charge ended, by the keys of its counters."""
        parts = end.record.parts
        if not parts:
            return {}
        counts = end.counts
        cost = self.prices.cost_of_end(end)
        used = Amounts(counts.input_tokens + counts.output_tokens, sum(counts.tool_calls.values()), cost)
        return {
            part.counter_key: UseCounter.of_use(part, _larger(used, part.amounts) if end.uses_reserved else used)
            for part in parts
        }

    def _plan_end(self, pending: PendingEnd, rows: LedgerRows, round_: LedgerRound) -> None:
        end = pending.end
        if pending.end_version and not round_.delete(end.record.end_key, pending.end_version):
            return  # the same end twice
        # released within the same round, it is not open any more
        is_open = bool(end.record.parts and pending.open_version) and round_.delete(
            end.record.open_key, pending.open_version
        )
        if end.counts.requests:
            cost = self.prices.cost_of_end(end)
            row = find_usage_row(end)
            counts = round_.usage.get(row, rows.usage[row])
            round_.usage[row] = counts.plus(msgspec.structs.replace(end.counts, cost=cost) if cost else end.counts)
        in_lease = rows.lease.find_taken(end.record)
        for part in end.record.parts:
            key = part.counter_key
            if key not in round_.others:
                continue
            if key in in_lease:
                round_.taken[key] = round_.taken[key].minus(in_lease[key])
            elif is_open:
                reservation = UseCounter.of_part(part, is_background=end.record.is_background)
                round_.others[key] = round_.others[key].minus(reservation)
        for key, use in (self.find_uses(end) if pending.uses is None else pending.uses).items():
            if key in round_.others:
                round_.others[key] = round_.others[key].plus(use)
        round_.counted.append(end.record)

    def _plan_request(self, request: ChargeRequest, round_: LedgerRound) -> None:
        is_background = request.demand.is_background
        reserved: dict[str, UseCounter] = {}
        totals: dict[str, UseCounter] = {}
        try:
            for key, limit in request.limits.items():
                if key not in round_.others:
                    raise StorageCorrupt
                total = round_.others[key].plus(round_.taken[key])
                reserved[key] = part = request.reserve(key, total.windows)
                name = _subject_name(request.project_id, request.subjects[key])
                total.require_room(limit, part.amounts, name, is_background=is_background)
                totals[key] = total.plus(part)
        except StackError as exc:
            round_.refused.append((request, exc))
            return
        headers: dict[str, str] = {}
        for key, limit in request.limits.items():
            add_headers(headers, limit, totals[key])
            sums = round_.others if is_background else round_.taken
            sums[key] = sums[key].plus(reserved[key])
        record = request.build_record(reserved)
        round_.admitted.append(Admitted(request, record, headers, reserved, len(round_.ops) if is_background else None))
        if is_background:
            round_.ops.append(OpenCharge(record, self.guard_key).to_put())

    def _find_recent(
        self, round_input: RoundInput, lease: LimitLease, round_: LedgerRound
    ) -> dict[str, tuple[RateLimit, UseCounter]]:
        """Return what many requests have reserved lately, by the keys of the counters, with their limits."""
        recent = dict(lease.recent)
        for admitted in round_.admitted if round_input.is_busy else ():
            for key, counter in admitted.reserved.items():
                add_recent(recent, key, admitted.request.limits[key], counter)
        return recent

    def _plan_lease(
        self, round_: LedgerRound, rows: LedgerRows, recent: Mapping[str, tuple[RateLimit, UseCounter]]
    ) -> None:
        """Lease what is taken, and twice as much as was reserved lately. What the round does not count stays leased."""
        lease = rows.lease
        round_.leased = {key: leased for key, leased in lease.leased.items() if key not in round_.others}
        for key, others in round_.others.items():
            leased = round_.taken[key]
            nothing = UseCounter(leased.windows)
            if key in recent:
                limit, reserved = recent[key]
                free = others.plus(leased).find_free(limit, reserved.plus(reserved), _FREE_SHARE)
                if free != nothing:
                    leased = leased.plus(free)
                    round_.free.add(key)
            if leased != nothing:
                round_.leased[key] = leased
            stored, version = rows.counters[key]
            if (counter := others.plus(leased)) != stored:
                round_.counters[key] = counter, len(round_.ops)
                round_.ops.append(Put(key, encode_record(counter), COUNTER_TTL_S, version))
        # also unchanged, so that no counter is written if another process has released the lease meanwhile
        if round_.leased != lease.leased or (round_.counters and lease.version):
            round_.lease_index = len(round_.ops)
            record = encode_record(LeaseRecord(self.guard_key, round_.leased))
            put = Put(lease.key, record, RECORD_TTL_S, lease.version)
            round_.ops.append(put if round_.leased else Delete(lease.key, lease.version))

    def usage_key(self, row: UsageRow) -> str:
        """Return the key of a row of this ledger."""
        hour, subject = row
        names = [subject.project_id, subject.key_id, subject.model]
        if subject.category or subject.service_tier or subject.is_batch:
            names += [subject.category, subject.service_tier, str(subject.is_batch)]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]
        return usage_key(hour, digest, self.writer_name)


def find_usage_row(end: ChargeEnd) -> UsageRow:
    """Return the row that the usage of an end belongs to."""
    return end.ended_at // HOUR_S, end.subject


def _larger(used: Amounts, reserved: Amounts) -> Amounts:
    return Amounts(
        max(used.tokens, reserved.tokens), max(used.tool_calls, reserved.tool_calls), max(used.cost, reserved.cost)
    )


def _subject_name(project_id: str, subject: str) -> str:
    if subject == ORGANIZATION:
        return "all projects together"
    return f"project {project_id}" if subject == WHOLE_PROJECT else f"{subject} in project {project_id}"
