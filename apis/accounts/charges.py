"""Charges: what one request reserves under the limits of its caller, and the usage with which it ends.

    /accounts/charges/PROJECT/ID/open   the reservation of a background response, until it is settled or released
    /accounts/charges/PROJECT/ID/end    the usage, written in the same step as the response; present until it is counted

The other requests of a process are reserved together, in one entry. A reservation is valid as long as its guard,
another key of the store, exists: the heartbeat of the process that answers, or the run of a background response. So
what a killed process has reserved is released, and a background response that another worker resumes stays reserved
and is counted once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from apis.accounts.limits import RateLimit
from apis.accounts.usage import UsageCounts, UsageSubject
from apis.storage.keys import new_id_key
from apis.storage.kv_store import Op, Put
from apis.storage.records import encode_record

CHARGES_PREFIX: Final = "/accounts/charges/"
RECORD_TTL_S: Final = 40 * 24 * 3600.0
"""Seconds after which a record that no worker has counted expires: longer than the longest window of a limit."""
_RELEASED: Final = UsageCounts()


class Amounts(msgspec.Struct, frozen=True, array_like=True):
    """Amounts that are counted under limits. `cost` is in NANOS of the currency."""

    tokens: int = 0
    tool_calls: int = 0
    cost: int = 0


class Demand(msgspec.Struct, frozen=True):
    """An estimate of what a request will use. `is_background` says that it outlives its connection; `model_aliases` are
    the other names of `model`, of which one may have the price."""

    model: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    tool_calls: int = 0
    is_background: bool = False
    is_batch: bool = False
    model_aliases: tuple[str, ...] = ()


class ReservedPart(msgspec.Struct, frozen=True, array_like=True):
    """Amounts reserved under one limit, in the counter with this key and these windows: the numbers of the minute, day
    and month."""

    counter_key: str
    amounts: Amounts
    minute: int
    day: int
    month: int


class ChargeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A charge as it is stored. A background response takes it along to the worker that ends it. Its usage is that of
    `model`, whichever name the request used; `priced_as` is the name that has the price, if that is another one."""

    id: str
    project_id: str
    key_id: str
    parts: tuple[ReservedPart, ...] = ()
    is_background: bool = False
    is_batch: bool = False
    model: str = ""
    priced_as: str = ""

    @property
    def open_key(self) -> str:
        return f"{CHARGES_PREFIX}{self.project_id}/{self.id}/open"

    @property
    def end_key(self) -> str:
        return f"{CHARGES_PREFIX}{self.project_id}/{self.id}/end"

    def without_parts(self) -> "ChargeRecord":
        """Return the record of a charge whose reservation is settled already."""
        return msgspec.structs.replace(self, parts=())


class OpenCharge(msgspec.Struct):
    """The stored reservation, and the key without which it is void."""

    record: ChargeRecord
    guard_key: str

    def to_put(self) -> Put:
        """Return the operation that stores the reservation."""
        return Put(self.record.open_key, encode_record(self), RECORD_TTL_S)


class ChargeEnd(msgspec.Struct, omit_defaults=True):
    """The end of a charge at `ended_at`, in seconds of Unix time. With `uses_reserved` the reserved amounts count as
    used, where a model has worked and its usage is unknown."""

    record: ChargeRecord
    ended_at: int
    subject: UsageSubject = UsageSubject()
    counts: UsageCounts = _RELEASED
    uses_reserved: bool = False

    def to_put(self) -> Put:
        """Return the operation that stores the end, for a later step that counts it."""
        return Put(self.record.end_key, encode_record(self), RECORD_TTL_S)


class Use(msgspec.Struct, frozen=True):
    """The use of a request that has ended: counts of a model; `uses_reserved` is that of ChargeEnd."""

    model: str
    counts: UsageCounts
    uses_reserved: bool = False
    category: str = ""
    service_tier: str = ""


RELEASED_USE: Final = Use("", _RELEASED)
"""The use of a request that failed before a model worked."""
UNKNOWN_USE: Final = Use("", _RELEASED, uses_reserved=True)
"""The use of a request whose client left before its usage was known."""


def build_end(record: ChargeRecord, use: Use) -> ChargeEnd:
    """Return the end of a charge as of now."""
    subject = UsageSubject(
        record.project_id,
        record.key_id,
        record.model or use.model,
        use.category,
        use.service_tier,
        is_batch=record.is_batch,
    )
    return ChargeEnd(record, int(time.time()), subject, use.counts, use.uses_reserved)


class Charge:
    """One request's charge in the process that answers it.

    It ends once: by the write of a response (`end_ops`, then `confirm`), by a background response that takes it along
    (`adopt_ops`, then `confirm_adoption`), or else by `end`, when the request is over. `input_tokens` is what was
    estimated of its prompt.
    """

    __slots__ = (
        "_claimed",
        "_is_closed",
        "_is_unsure",
        "_late_use",
        "_meter",
        "_stored_end",
        "headers",
        "input_tokens",
        "open_version",
        "record",
    )

    def __init__(
        self, meter: "Meter", record: ChargeRecord, headers: Mapping[str, str], open_version: int | None = None
    ) -> None:
        """`headers` are the `x-ratelimit-*` headers of the limit with the smallest remaining share; `open_version` is
        that of the stored reservation."""
        self._meter = meter
        self._is_closed = False
        self._is_unsure = False
        self._claimed = 0
        self._late_use: Use | None = None
        self._stored_end: ChargeEnd | None = None
        self.record = record
        self.headers = headers
        self.open_version = open_version
        self.input_tokens = 0

    def end_ops(self, use: Use) -> Sequence[Op]:
        """Return the write of the usage, which belongs in the write of the response; `confirm` has to follow it."""
        self._claimed += 1
        self._stored_end = build_end(self.record.without_parts() if self._is_closed else self.record, use)
        return [self._stored_end.to_put()]

    def confirm(self, versions: Sequence[int] | None) -> None:
        """End the charge if the write of `end_ops` has happened, with these versions of its keys; None says that it has
        not, so that the charge can still end in another way."""
        self._claimed -= 1
        if self._is_closed:
            return
        if versions is not None and self._stored_end is not None:
            self._is_closed = True
            self._meter.count_stored(self._stored_end, self.open_version, versions[0])
            return
        self._is_unsure = True  # a write that raised may have happened all the same
        if self._late_use is not None and not self._claimed:
            self.end(self._late_use)

    def count_aside(self, use: Use) -> None:
        """Count what was used for the request besides its own end, at once."""
        count_aside(self._meter, self.record, use)

    def claim(self) -> None:
        """Let what follows decide how the charge ends, also where the request is over before: `end_claimed` has to
        follow."""
        self._claimed += 1

    def end_claimed(self, use: Use) -> None:
        """End the charge, after `claim`, if nothing else has ended it."""
        self._claimed -= 1
        self.end(use)

    def adopt_ops(self, run_key: str) -> Sequence[Op]:
        """Return the write by which the reservation lasts as long as the run of a background response."""
        return [OpenCharge(self.record, run_key).to_put()] if self.record.parts else []

    def confirm_adoption(self) -> None:
        """Leave the end of the charge to the worker that ends the response."""
        self._is_closed = True

    def end(self, use: Use) -> None:
        """End the charge if nothing else has ended it. Returns at once; the store is written soon after."""
        if self._is_closed:
            return
        if self._claimed:
            self._late_use = use  # of the two, the write of the response decides
            return
        self._is_closed = True
        self._meter.count_end(build_end(self.record, use), self.open_version, may_be_stored=self._is_unsure)


class Meter(ABC):
    """Counts requests, tokens and money under limits, and usage, in the store: each step is atomic for all limits of a
    request and for all workers.

    Promises (tests/spec/accounts): no limit is passed by reserving; where more is used than was reserved, that counts
    within a fraction of a second after the end; a reservation of a process that
    was killed is released within seconds; the usage of a stored response is stored in the step that stores it, and
    counted once.
    """

    @abstractmethod
    async def open_charge(self, caller_ids: tuple[str, str], limits: Mapping[str, RateLimit], demand: Demand) -> Charge:
        """Return the charge of one request of a project and key, after it was counted and its demand reserved under
        each of `limits`, by subject. Where a limit is smaller than the demand, all of it is reserved. Without limits
        nothing is written.

        Raises RateLimited or QuotaExceeded, with nothing counted; PermissionDenied for a model without a price under a
        limit of money; and StoreUnavailable.
        """

    @abstractmethod
    def count_end(self, end: ChargeEnd, open_version: int | None, *, may_be_stored: bool) -> None:
        """Count an end that no response's write has stored, soon after; it is in memory until then. `may_be_stored`
        says that a write of it raised, and may have happened."""

    @abstractmethod
    def count_stored(self, end: ChargeEnd, open_version: int | None, end_version: int) -> None:
        """Count an end that has been stored with a response in this version of its key, soon after."""


def count_aside(meter: Meter, record: ChargeRecord, use: Use) -> None:
    """Count what was used for the request of a charge besides its own end, such as the tokens of a moderation."""
    aside = ChargeRecord(new_id_key(), record.project_id, record.key_id, is_batch=record.is_batch)
    meter.count_end(build_end(aside, use), None, may_be_stored=False)
