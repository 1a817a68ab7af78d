"""StoredSpendLimits: limits of money, which are counted together with all other limits of a request."""

import time
from dataclasses import replace
from typing import Final

import msgspec

from apis.accounts.charges import CHARGES_PREFIX, OpenCharge
from apis.accounts.limits import ORGANIZATION, WHOLE_PROJECT, RateLimit
from apis.accounts.spending import SpendLimit
from apis.accounts.usage import HOUR_S
from apis.errors import NotFound, Overloaded
from apis.storage.kv_store import ABSENT, Entry, KVStore, Put
from apis.storage.records import decode_record, encode_record, scan_all
from providers.accounts.alerts.months import Month
from providers.accounts.ledger.counters import UseCounter, Windows
from providers.accounts.ledger.limit_lease import LEASE_SUFFIX, LeaseRecord
from providers.accounts.ledger.round_planner import COUNTER_TTL_S
from providers.accounts.limiter import LimitTable, StoredLimiter
from providers.accounts.records import ORGANIZATION_ID, find_counter_key
from providers.accounts.usage_log import StoredUsageLog
from providers.common.state.scan import decode_or_skip, skipping_damaged

_ATTEMPTS: Final = 200
_EXACT_ATTEMPTS: Final = 5


class StoredSpendLimits:
    """The limits of spending, in the store. `project_id` is None for the limit of all projects together. The limit of a
    project is in the record of its other limits; that of all projects has a record of its own.

    Every method raises NotFound for a project that does not exist, and StoreUnavailable.
    """

    def __init__(self, kv_store: KVStore, limiter: StoredLimiter, usage_log: StoredUsageLog) -> None:
        self._kv = kv_store
        self._limiter = limiter
        self._usage_log = usage_log

    async def get(self, project_id: str | None) -> SpendLimit:
        """Return the limit. Raises NotFound where none is set."""
        limit = await self._load(project_id)
        if limit is None or limit.month_cost is None:
            raise _unset_error(project_id)
        _, counter = await self._read_counter(project_id)
        return SpendLimit(
            limit.month_cost, await self._sum_month(project_id) if counter is None else counter.month_cost
        )

    async def set(self, project_id: str | None, cost: int) -> SpendLimit:
        """Set the limit in NANOS of the currency; it holds everywhere within MAX_KEY_AGE_S, and counts what was spent
        since the month began. Requests that are in progress meanwhile are counted when they end only if another limit
        applies to them."""
        await self._change(project_id, cost)
        first, spent = UseCounter(Windows.at(time.time())), 0
        for attempt in range(_ATTEMPTS):
            # before the sum, so that the write fails if something is counted after it that the sum does not have
            entry, stored_counter = await self._read_counter(project_id)
            counter = stored_counter or UseCounter(Windows.at(time.time()))
            if attempt <= _EXACT_ATTEMPTS:
                first, spent = counter, await self._sum_month(project_id)
            # while so much is counted that no sum is the newest, what has come since then is added to it
            spent_now = spent + max(0, counter.month_cost - first.month_cost)
            version = ABSENT if entry is None else entry.version
            record = encode_record(msgspec.structs.replace(counter, month_cost=spent_now))
            put = Put(_counter_key(project_id), record, COUNTER_TTL_S, version)
            if await self._kv.write([put]) is not None:
                return SpendLimit(cost, spent_now)
        raise Overloaded("Too many requests are being counted. Set the limit again.", retry_after_s=1)

    async def delete(self, project_id: str | None) -> None:
        """Remove the limit. Raises NotFound where none is set."""
        limit = await self._load(project_id)
        if limit is None or limit.month_cost is None:
            raise _unset_error(project_id)
        await self._change(project_id, None)

    async def _load(self, project_id: str | None) -> RateLimit | None:
        return (await self._limiter.list_limits(project_id)).get(WHOLE_PROJECT)

    async def _change(self, project_id: str | None, cost: int | None) -> None:
        def change(limits: LimitTable) -> RateLimit:
            limits[WHOLE_PROJECT] = limit = replace(limits.get(WHOLE_PROJECT, RateLimit()), month_cost=cost)
            return limit

        await self._limiter.change_limits(project_id, change, "spend_limit", {"max_cost_per_1_month": cost})

    async def _read_counter(self, project_id: str | None) -> tuple[Entry | None, UseCounter | None]:
        """Return the entry and the counter in it as of now; no counter where it is damaged."""
        key, now = _counter_key(project_id), Windows.at(time.time())
        entry = await self._kv.get(key)
        if entry is None:
            return None, UseCounter(now)
        counter = decode_or_skip(self._kv, key, entry, UseCounter)
        return entry, None if counter is None else counter.advance(now)

    async def _sum_month(self, project_id: str | None) -> int:
        """Return what was spent since the month began, and what is reserved under the limit now."""
        now = time.time()
        entries = await self._usage_log.read(Month.at(now).start, int(now) + HOUR_S)
        spent = sum(entry.counts.cost for entry in entries if project_id in (None, entry.subject.project_id))
        counter_key, windows = _counter_key(project_id), Windows.at(now)
        # a lease for all projects is there where they have a limit together
        for ledger_id in (None,) if project_id is None else (project_id, ORGANIZATION_ID):
            prefix = CHARGES_PREFIX if ledger_id is None else f"{CHARGES_PREFIX}{ledger_id}/"
            async for key, entry in scan_all(self._kv, prefix):
                with skipping_damaged(self._kv, key, "charge"):
                    spent += _reserved_cost(key, entry, counter_key, windows)
        return spent


def _reserved_cost(key: str, entry: Entry, counter_key: str, windows: Windows) -> int:
    """Return what a charge of the store reserves in a counter. Raises StorageCorrupt."""
    if key.endswith("/open"):
        parts = decode_record(entry, OpenCharge).record.parts
        return sum(part.amounts.cost for part in parts if part.counter_key == counter_key)
    if key.endswith(LEASE_SUFFIX):
        leased = decode_record(entry, LeaseRecord).amounts.get(counter_key)
        return 0 if leased is None else leased.advance(windows).month_cost
    return 0


def _subject(project_id: str | None) -> str:
    return ORGANIZATION if project_id is None else WHOLE_PROJECT


def _counter_key(project_id: str | None) -> str:
    return find_counter_key(project_id or ORGANIZATION_ID, _subject(project_id))


def _unset_error(project_id: str | None) -> NotFound:
    return NotFound("No spend limit is set." if project_id is None else "No spend limit is set for this project.")
