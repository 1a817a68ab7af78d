"""LimitLease: what one process has reserved under the limits of a project, so that not every request needs a write.

    /accounts/charges/PROJECT/PROCESS/lease   the amounts of the lease by the keys of the counters, which include them

Where all projects together have a limit, one lease is for the requests of all of them. The lease covers the requests in
progress and, while many arrive, some that come next. It is valid as long as its guard exists, the heartbeat of its
process.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from apis.accounts.charges import CHARGES_PREFIX, Amounts, ChargeRecord, Demand, ReservedPart
from apis.accounts.limits import RateLimit
from apis.storage.keys import new_id_key
from apis.storage.kv_store import ABSENT, Entry
from apis.storage.records import decode_record
from providers.accounts.ledger.counters import MINUTE_S, UseCounter, Windows, add_headers, cap_amounts

LEASE_SUFFIX: Final = "/lease"
Admission = tuple[ChargeRecord, dict[str, str], int]
"""The record of an admitted request, its headers, and the version of its own stored reservation, or ABSENT."""


class LeaseRecord(msgspec.Struct):
    """A stored lease: amounts by the keys of their counters, and the key without which it is void."""

    guard_key: str
    amounts: dict[str, UseCounter]


@dataclass(slots=True, eq=False)
class ChargeRequest:
    """One request that waits to be admitted. Its limits, and their subjects, are by the keys of their counters."""

    caller_ids: tuple[str, str]
    limits: Mapping[str, RateLimit]
    subjects: Mapping[str, str]
    demand: Demand
    amounts: Amounts
    priced_as: str
    result: "asyncio.Future[Admission]"

    @property
    def project_id(self) -> str:
        return self.caller_ids[0]

    def reserve(self, counter_key: str, windows: Windows) -> UseCounter:
        """Return what the request reserves under one of its limits."""
        amounts = cap_amounts(self.limits[counter_key], self.amounts)
        return UseCounter.reserve(windows, amounts, is_background=self.demand.is_background)

    def build_record(self, reserved: Mapping[str, UseCounter]) -> ChargeRecord:
        """Return the record of a new charge with these reservations."""
        parts = tuple(counter.to_part(key) for key, counter in reserved.items())
        return new_record(self.caller_ids, self.demand, self.priced_as, parts)


def new_record(
    caller_ids: tuple[str, str], demand: Demand, priced_as: str, parts: tuple[ReservedPart, ...] = ()
) -> ChargeRecord:
    """Return the record of a new charge of a project and key."""
    other_name = "" if priced_as == demand.model else priced_as
    model, is_background = demand.model, demand.is_background
    return ChargeRecord(new_id_key(), *caller_ids, parts, is_background, demand.is_batch, model, other_name)


class LimitLease:
    """The lease of this process for the requests of one ledger; all amounts are by the keys of their counters. `taken`
    is what requests use of it: those in progress what they have reserved, and those that have ended and are not counted
    yet what they have used."""

    def __init__(self, ledger_id: str, process_name: str) -> None:
        self.key = f"{CHARGES_PREFIX}{ledger_id}/{process_name}{LEASE_SUFFIX}"
        self.version: int | None = None
        """The version of the stored lease; None if it has to be read before it is used."""
        self.leased: dict[str, UseCounter] = {}
        self.taken: dict[str, UseCounter] = {}
        self.free_since: dict[str, float] = {}
        """When more was leased than requests had taken, by the clock of `time.monotonic`."""
        self.recent: dict[str, tuple[RateLimit, UseCounter]] = {}
        """The use reserved without a write since the counter was written, with the last known limit, by counter."""
        self.is_changed = False
        """True if others have changed the stored lease, so that all its counters have to be written again."""
        self._others: dict[str, UseCounter] = {}
        self._charges: dict[str, dict[str, UseCounter]] = {}

    @property
    def has_charges(self) -> bool:
        """True if requests are in progress or not counted yet."""
        return bool(self._charges)

    def load(self, entry: Entry | None) -> None:
        """Take over what is stored."""
        self.version = ABSENT if entry is None else entry.version
        leased: dict[str, UseCounter] = {} if entry is None else decode_record(entry, LeaseRecord).amounts
        self.is_changed = self.is_changed or leased != self.leased
        self.leased = leased
        for key, counter in self.leased.items():
            self.taken.setdefault(key, UseCounter(counter.windows))

    def forget(self) -> None:
        """Have the stored lease read again before it is used."""
        self.version = None

    def commit(
        self, leased: dict[str, UseCounter], version: int, others: dict[str, UseCounter], free: frozenset[str]
    ) -> None:
        """Take over what was written: the amounts and their version, and those of `leased` with more than is taken.
        `others` is what the counters that were written hold of ended requests and of other processes."""
        self.leased, self.version, self.is_changed = leased, version, False
        self._others = {key: counter for key, counter in {**self._others, **others}.items() if key in leased}
        now = time.monotonic()
        for key in others:
            self.recent.pop(key, None)
            self.free_since.pop(key, None)
            if key in leased:
                nothing = UseCounter(leased[key].windows)
                self.taken[key] = nothing.plus(self.taken.get(key, nothing))
            else:
                self.taken.pop(key, None)
        self.free_since |= dict.fromkeys(free, now)

    def admit(self, request: ChargeRequest) -> Admission | None:
        """Admit a request for which the lease has room, without a write; return None if it has none."""
        if self.version is None or request.demand.is_background:
            return None
        minute = int(time.time()) // MINUTE_S
        reserved, totals = dict[str, UseCounter](), dict[str, UseCounter]()
        for key, limit in request.limits.items():
            leased = self.leased.get(key)
            if leased is None or key not in self._others or leased.windows.minute < minute:
                return None
            reserved[key] = part = request.reserve(key, leased.windows)
            totals[key] = total = self.taken[key].plus(part)
            if not total.fits(leased, limit):
                return None
        headers: dict[str, str] = {}
        for key, limit in request.limits.items():
            add_headers(headers, limit, self._others[key].plus(totals[key]))
            add_recent(self.recent, key, limit, reserved[key])
        record = request.build_record(reserved)
        self.hold(record, reserved)
        return record, headers, ABSENT

    def hold(self, record: ChargeRecord, reserved: dict[str, UseCounter]) -> None:
        """Add what an admitted request has reserved to what is taken."""
        self._charges[record.id] = reserved
        for key, counter in reserved.items():
            self.taken[key] = self.taken[key].plus(counter)

    def find_taken(self, record: ChargeRecord) -> Mapping[str, UseCounter]:
        """Return what is taken by the request of a charge; nothing if its reservation is not part of this lease."""
        return self._charges.get(record.id, {}) if record.parts else {}

    def end(self, record: ChargeRecord, uses: dict[str, UseCounter]) -> None:
        """Replace what a request has reserved by what it has used."""
        counters = self.find_taken(record)
        if counters:
            self._charges[record.id] = uses
        for key, counter in counters.items():
            if key in self.taken:
                self.taken[key] = self.taken[key].minus(counter).plus(uses[key])

    def drop(self, record: ChargeRecord) -> None:
        """Remove a request that has been counted from what is taken."""
        for key, counter in self.find_taken(record).items():
            if key in self.taken:
                self.taken[key] = self.taken[key].minus(counter)
        if record.parts:
            self._charges.pop(record.id, None)


def add_recent(
    recent: dict[str, tuple[RateLimit, UseCounter]], counter_key: str, limit: RateLimit, reserved: UseCounter
) -> None:
    """Add what one request has reserved to the sum of its counter."""
    previous = recent.get(counter_key)
    recent[counter_key] = limit, reserved if previous is None else reserved.plus(previous[1])
