"""RoundPlanner: the changes of counters, reservations and usage that one atomic write makes. Pure functions."""

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from apis.accounts.charges import Amounts, ChargeEnd, ChargeRecord, Demand, OpenCharge
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT, RateLimit
from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageSubject
from apis.errors import StackError
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Delete, Op, Put
from apis.storage.records import encode_record
from providers.accounts.counters import UseCounter, Windows, cap_amounts
from providers.accounts.prices import Prices
from providers.accounts.records import find_counter_key, usage_key

COUNTER_TTL_S: Final = 32 * 24 * 3600.0
UsageRow = tuple[int, UsageSubject]
"""The hour (since 1970) and the subject of a sum of usage."""


@dataclass(slots=True, eq=False)
class ChargeRequest:
    """One request that waits to be admitted. `result` is its record and counters' headers, and the version of its
    stored reservation."""

    key_id: str
    limits: Mapping[str, RateLimit]
    demand: Demand
    amounts: Amounts
    result: "asyncio.Future[tuple[ChargeRecord, dict[str, str], int]]"


@dataclass(slots=True, eq=False)
class PendingEnd:
    """An end to be counted. `open_version` is that of its reservation, None if unknown. `end_version` is that of the
    stored end, None if unknown, where `is_stored` or `may_be_stored`."""

    end: ChargeEnd | None
    record: ChargeRecord
    open_version: int | None = None
    end_version: int | None = None
    is_stored: bool = False
    may_be_stored: bool = False

    @property
    def is_known(self) -> bool:
        """True if nothing of it has to be read before it is counted."""
        has_open = self.open_version is not None or not self.record.parts
        return has_open and not self.may_be_stored and (not self.is_stored or self.end_version is not None)


@dataclass(slots=True)
class LedgerRound:
    """The changes of one write."""

    ops: list[Op]
    counters: dict[str, UseCounter]
    usage: dict[UsageRow, UsageCounts]
    admitted: list[tuple[ChargeRequest, ChargeRecord, dict[str, str], int]]
    refused: list[tuple[ChargeRequest, StackError]]
    deleted_keys: set[str]

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
    `guard_key` guards its reservations."""

    project_id: str
    process_name: str
    guard_key: str
    prices: Prices
    usage_ttl_s: float

    def plan(
        self,
        requests: Sequence[ChargeRequest],
        ends: Sequence[PendingEnd],
        stored: Mapping[str, tuple[UseCounter, int]],
        usage: Mapping[UsageRow, UsageCounts],
    ) -> LedgerRound:
        """Return the changes, ends first: they make room. `stored` are the counters with their versions, and `usage`
        the sums, as they are in the store."""
        now = Windows.at(time.time())
        counters = {subject: counter.advance(now) for subject, (counter, _) in stored.items()}
        round_ = LedgerRound([], {}, {}, [], [], set())
        for end in ends:
            self._plan_end(end, counters, usage, round_)
        for request in requests:
            if request.result.done():
                continue
            self._plan_request(request, counters, round_)
        for subject, counter in round_.counters.items():
            key = find_counter_key(self.project_id, subject)
            round_.ops.append(Put(key, encode_record(counter), COUNTER_TTL_S, stored[subject][1]))
        for row, counts in round_.usage.items():
            entry = UsageEntry(row[0] * HOUR_S, row[1], counts)
            round_.ops.append(Put(self.usage_key(row), encode_record(entry), self.usage_ttl_s))
        return round_

    def _plan_end(
        self,
        pending: PendingEnd,
        counters: dict[str, UseCounter],
        usage: Mapping[UsageRow, UsageCounts],
        round_: LedgerRound,
    ) -> None:
        end = pending.end
        assert end is not None  # it has been read
        counts = end.counts
        if pending.end_version and not round_.delete(end.record.end_key, pending.end_version):
            return  # the same end twice
        # released within the same round, it is not open any more
        is_open = bool(end.record.parts and pending.open_version) and round_.delete(
            end.record.open_key, pending.open_version
        )
        if counts.requests:
            counts = replace(counts, cost=self.prices.cost_of(end.subject.model, counts))
            row = find_usage_row(end)
            round_.usage[row] = round_.usage.get(row, usage[row]).plus(counts)
        used = Amounts(counts.input_tokens + counts.output_tokens, sum(counts.tool_calls.values()), counts.cost)
        for part in end.record.parts:
            counter = counters[part.subject]
            if is_open:
                counter = counter.end(is_background=end.record.is_background)
            reserved = part.amounts if is_open else Amounts()
            spent = _larger(used, part.amounts) if end.uses_reserved else used
            counters[part.subject] = round_.counters[part.subject] = counter.settle(part, spent, reserved)

    def _plan_request(self, request: ChargeRequest, counters: dict[str, UseCounter], round_: LedgerRound) -> None:
        is_background = request.demand.is_background
        wanted = {subject: cap_amounts(limit, request.amounts) for subject, limit in request.limits.items()}
        try:
            for subject, limit in request.limits.items():
                name = _subject_name(self.project_id, subject)
                counters[subject].require_room(limit, wanted[subject], name, is_background=is_background)
        except StackError as exc:
            round_.refused.append((request, exc))
            return
        headers: dict[str, str] = {}
        for subject, limit in request.limits.items():
            counters[subject] = counters[subject].begin(wanted[subject], is_background=is_background)
            round_.counters[subject] = counters[subject]
            _merge_headers(headers, counters[subject].headers(limit))
        record = ChargeRecord(
            new_id_key(),
            self.project_id,
            request.key_id,
            tuple(counters[subject].reserve(subject, amounts) for subject, amounts in wanted.items()),
            is_background,
            request.demand.is_batch,
        )
        round_.admitted.append((request, record, headers, len(round_.ops)))
        round_.ops.append(OpenCharge(record, self.guard_key).to_put())

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


def _merge_headers(headers: dict[str, str], own: Mapping[str, str]) -> None:
    """Replace the headers of each unit by those of a limit with a smaller rest."""
    for unit in ("requests", "tokens"):
        rest = f"x-ratelimit-remaining-{unit}"
        if rest in own and (rest not in headers or int(own[rest]) < int(headers[rest])):
            headers |= {name: value for name, value in own.items() if name.endswith(unit)}


def _subject_name(project_id: str, subject: str) -> str:
    if subject == ORGANIZATION:
        return "all projects together"
    return f"project {project_id}" if subject == WHOLE_PROJECT else f"{subject} in project {project_id}"
