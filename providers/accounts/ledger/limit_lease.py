"""LimitLease: what one process has reserved under the limits of a project, so that not every request needs a write.

    /accounts/charges/PROJECT/PROCESS/lease   the amounts of the lease by subject; the counters include them

The lease covers the requests in progress and, while many arrive, some that come next. It is valid as long as its guard
exists, the heartbeat of its process.
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
    """A stored lease: amounts by subject, and the key without which it is void."""

    guard_key: str
    amounts: dict[str, UseCounter]


@dataclass(slots=True, eq=False)
class ChargeRequest:
    """One request that waits to be admitted."""

    key_id: str
    limits: Mapping[str, RateLimit]
    demand: Demand
    amounts: Amounts
    priced_as: str
    result: "asyncio.Future[Admission]"

    def reserve(self, subject: str, windows: Windows) -> UseCounter:
        """Return what the request reserves under one of its limits."""
        amounts = cap_amounts(self.limits[subject], self.amounts)
        return UseCounter.reserve(windows, amounts, is_background=self.demand.is_background)

    def build_record(self, project_id: str, reserved: Mapping[str, UseCounter]) -> ChargeRecord:
        """Return the record of a new charge with these reservations by subject."""
        parts = tuple(counter.to_part(subject) for subject, counter in reserved.items())
        return new_record((project_id, self.key_id), self.demand, self.priced_as, parts)


def new_record(
    caller_ids: tuple[str, str], demand: Demand, priced_as: str, parts: tuple[ReservedPart, ...] = ()
) -> ChargeRecord:
    """Return the record of a new charge of a project and key."""
    other_name = "" if priced_as == demand.model else priced_as
    model, is_background = demand.model, demand.is_background
    return ChargeRecord(new_id_key(), *caller_ids, parts, is_background, demand.is_batch, model, other_name)


class LimitLease:
    """The lease of this process in one project. `taken` is what requests use of it: those in progress what they have
    reserved, and those that have ended and are not counted yet what they have used."""

    def __init__(self, project_id: str, process_name: str) -> None:
        self.key = f"{CHARGES_PREFIX}{project_id}/{process_name}{LEASE_SUFFIX}"
        self.version: int | None = None
        """The version of the stored lease; None if it has to be read before it is used."""
        self.leased: dict[str, UseCounter] = {}
        self.taken: dict[str, UseCounter] = {}
        self.has_free = False
        """True if more was leased than requests had taken when it was written."""
        self.recent: dict[str, tuple[RateLimit, UseCounter]] = {}
        """What was reserved without a write since the last write, by subject, with the last known limit."""
        self._project_id = project_id
        self._others: dict[str, UseCounter] = {}
        self._charges: dict[str, dict[str, UseCounter]] = {}

    @property
    def has_charges(self) -> bool:
        """True if requests are in progress or not counted yet."""
        return bool(self._charges)

    def load(self, entry: Entry | None) -> None:
        """Take over what is stored."""
        self.version = ABSENT if entry is None else entry.version
        self.leased = {} if entry is None else decode_record(entry, LeaseRecord).amounts
        for subject, leased in self.leased.items():
            self.taken.setdefault(subject, UseCounter(leased.windows))

    def forget(self) -> None:
        """Have the stored lease read again before it is used."""
        self.version = None

    def commit(
        self, leased: dict[str, UseCounter], version: int, others: dict[str, UseCounter], *, has_free: bool
    ) -> None:
        """Take over what was written: the amounts by subject and their version. `others` is what the counters hold of
        ended requests and of other processes."""
        self.leased, self.version, self._others = leased, version, others
        self.recent, self.has_free = {}, has_free
        self.taken = {
            subject: (nothing := UseCounter(counter.windows)).plus(self.taken.get(subject, nothing))
            for subject, counter in leased.items()
        }

    def admit(self, request: ChargeRequest) -> Admission | None:
        """Admit a request for which the lease has room, without a write; return None if it has none."""
        if self.version is None or request.demand.is_background:
            return None
        minute = int(time.time()) // MINUTE_S
        reserved, totals = dict[str, UseCounter](), dict[str, UseCounter]()
        for subject, limit in request.limits.items():
            leased = self.leased.get(subject)
            if leased is None or leased.windows.minute < minute:
                return None
            reserved[subject] = part = request.reserve(subject, leased.windows)
            totals[subject] = total = self.taken[subject].plus(part)
            if not total.fits(leased, limit):
                return None
        headers: dict[str, str] = {}
        for subject, limit in request.limits.items():
            add_headers(headers, limit, self._others[subject].plus(totals[subject]))
            add_recent(self.recent, subject, limit, reserved[subject])
        record = request.build_record(self._project_id, reserved)
        self.hold(record, reserved)
        return record, headers, ABSENT

    def hold(self, record: ChargeRecord, reserved: dict[str, UseCounter]) -> None:
        """Add what an admitted request has reserved to what is taken."""
        self._charges[record.id] = reserved
        for subject, counter in reserved.items():
            self.taken[subject] = self.taken[subject].plus(counter)

    def find_taken(self, record: ChargeRecord) -> Mapping[str, UseCounter]:
        """Return what is taken by the request of a charge; nothing if its reservation is not part of this lease."""
        return self._charges.get(record.id, {}) if record.parts else {}

    def end(self, record: ChargeRecord, uses: dict[str, UseCounter]) -> None:
        """Replace what a request has reserved by what it has used."""
        counters = self.find_taken(record)
        if counters:
            self._charges[record.id] = uses
        for subject, counter in counters.items():
            if subject in self.taken:
                self.taken[subject] = self.taken[subject].minus(counter).plus(uses[subject])

    def drop(self, record: ChargeRecord) -> None:
        """Remove a request that has been counted from what is taken."""
        for subject, counter in self.find_taken(record).items():
            if subject in self.taken:
                self.taken[subject] = self.taken[subject].minus(counter)
        if record.parts:
            self._charges.pop(record.id, None)


def add_recent(
    recent: dict[str, tuple[RateLimit, UseCounter]], subject: str, limit: RateLimit, reserved: UseCounter
) -> None:
    """Add what one request has reserved to the sum of its subject."""
    previous = recent.get(subject)
    recent[subject] = limit, reserved if previous is None else reserved.plus(previous[1])
