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
from apis.errors import StackError
from apis.storage.kv_store import ABSENT, Delete, Entry, Op, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.ledger.counters import UseCounter, Windows, add_headers
from providers.accounts.ledger.limit_lease import ChargeRequest, LeaseRecord, LimitLease, add_recent
from providers.accounts.prices import Prices
from providers.accounts.records import find_counter_key, usage_key

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
            stored, self.end_version, self.is_stored = decode_record(end_entry, ChargeEnd), end_entry.version, True
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
    """What one write is about. `is_busy` says that the last write was a moment ago, and `is_flush` that no requests are
    expected."""

    requests: Sequence[ChargeRequest]
    ends: list[PendingEnd]
    void_leases: list[VoidLease]
    is_busy: bool
    is_flush: bool

    def find_subjects(self, lease: LimitLease) -> set[str]:
        """Return the subjects of the counters that the write may change."""
        subjects = {subject for request in self.requests for subject in request.limits}
        subjects.update(part.subject for end in self.ends for part in end.record.parts)
        subjects.update(subject for void in self.void_leases for subject in void.amounts)
        return subjects.union(lease.leased, lease.taken)


@dataclass(slots=True)
class LedgerRows:
    """The rows of a project as they are in the store: counters with their versions, sums of usage, and the lease."""

    lease: LimitLease
    counters: dict[str, tuple[UseCounter, int]] = field(default_factory=dict[str, tuple[UseCounter, int]])
    usage: dict[UsageRow, UsageCounts] = field(default_factory=dict[UsageRow, UsageCounts])

    def forget(self) -> None:
        """Have the counters and the lease read again."""
        self.counters.clear()
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
    has_free: bool = False
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
    """Plans the rounds of one project. `process_name` is in the keys of the usage rows that this process alone writes;
    `guard_key` guards its lease."""

    project_id: str
    process_name: str
    guard_key: str
    prices: Prices
    usage_ttl_s: float

    def plan(self, round_input: RoundInput, rows: LedgerRows) -> LedgerRound:
        """Return the changes, ends first: they make room."""
        now, lease = Windows.at(time.time()), rows.lease
        round_ = LedgerRound({}, {})
        for subject in round_input.find_subjects(lease):
            counter = rows.counters[subject][0].advance(now)
            nothing = UseCounter(counter.windows)
            round_.others[subject] = counter.minus(lease.leased.get(subject, nothing))
            round_.taken[subject] = nothing.plus(lease.taken.get(subject, nothing))
        for void in round_input.void_leases:
            if round_.delete(void.key, void.version):
                for subject, amounts in void.amounts.items():
                    round_.others[subject] = round_.others[subject].minus(amounts)
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
        """Return the use with which a charge ended, by the subjects of its limits."""
        parts = end.record.parts
        if not parts:
            return {}
        counts = end.counts
        cost = self.prices.cost_of_end(end)
        used = Amounts(counts.input_tokens + counts.output_tokens, sum(counts.tool_calls.values()), cost)
        return {
            part.subject: UseCounter.of_use(part, _larger(used, part.amounts) if end.uses_reserved else used)
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
            subject = part.subject
            if subject in in_lease:
                round_.taken[subject] = round_.taken[subject].minus(in_lease[subject])
            elif is_open:
                reservation = UseCounter.of_part(part, is_background=end.record.is_background)
                round_.others[subject] = round_.others[subject].minus(reservation)
        for subject, use in (self.find_uses(end) if pending.uses is None else pending.uses).items():
            round_.others[subject] = round_.others[subject].plus(use)
        round_.counted.append(end.record)

    def _plan_request(self, request: ChargeRequest, round_: LedgerRound) -> None:
        is_background = request.demand.is_background
        reserved: dict[str, UseCounter] = {}
        totals: dict[str, UseCounter] = {}
        try:
            for subject, limit in request.limits.items():
                total = round_.others[subject].plus(round_.taken[subject])
                reserved[subject] = part = request.reserve(subject, total.windows)
                name = _subject_name(self.project_id, subject)
                total.require_room(limit, part.amounts, name, is_background=is_background)
                totals[subject] = total.plus(part)
        except StackError as exc:
            round_.refused.append((request, exc))
            return
        headers: dict[str, str] = {}
        for subject, limit in request.limits.items():
            add_headers(headers, limit, totals[subject])
            sums = round_.others if is_background else round_.taken
            sums[subject] = sums[subject].plus(reserved[subject])
        record = request.build_record(self.project_id, reserved)
        round_.admitted.append(Admitted(request, record, headers, reserved, len(round_.ops) if is_background else None))
        if is_background:
            round_.ops.append(OpenCharge(record, self.guard_key).to_put())

    def _find_recent(
        self, round_input: RoundInput, lease: LimitLease, round_: LedgerRound
    ) -> dict[str, tuple[RateLimit, UseCounter]]:
        """Return what many requests have reserved lately, by subject, with the limits of the subjects."""
        recent = dict(lease.recent)
        for admitted in round_.admitted if round_input.is_busy else ():
            for subject, counter in admitted.reserved.items():
                add_recent(recent, subject, admitted.request.limits[subject], counter)
        return recent

    def _plan_lease(
        self, round_: LedgerRound, rows: LedgerRows, recent: Mapping[str, tuple[RateLimit, UseCounter]]
    ) -> None:
        """Lease what is taken, and twice as much as was reserved lately."""
        for subject, others in round_.others.items():
            leased = round_.taken[subject]
            nothing = UseCounter(leased.windows)
            if subject in recent:
                limit, reserved = recent[subject]
                free = others.plus(leased).find_free(limit, reserved.plus(reserved), _FREE_SHARE)
                leased, round_.has_free = leased.plus(free), round_.has_free or free != nothing
            if leased != nothing:
                round_.leased[subject] = leased
            stored, version = rows.counters[subject]
            if (counter := others.plus(leased)) != stored:
                round_.counters[subject] = counter, len(round_.ops)
                key = find_counter_key(self.project_id, subject)
                round_.ops.append(Put(key, encode_record(counter), COUNTER_TTL_S, version))
        lease = rows.lease
        # also unchanged, so that no counter is written if another process has released the lease meanwhile
        if round_.leased != lease.leased or (round_.counters and lease.version):
            round_.lease_index = len(round_.ops)
            record = encode_record(LeaseRecord(self.guard_key, round_.leased))
            put = Put(lease.key, record, RECORD_TTL_S, lease.version)
            round_.ops.append(put if round_.leased else Delete(lease.key, lease.version))

    def usage_key(self, row: UsageRow) -> str:
        """Return the key of a row of this process."""
        hour, subject = row
        names = [subject.project_id, subject.key_id, subject.model]
        if subject.category or subject.service_tier or subject.is_batch:
            names += [subject.category, subject.service_tier, str(subject.is_batch)]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]
        return usage_key(hour, digest, self.process_name)


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
