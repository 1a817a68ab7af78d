"""StoredLedger: the meter of all projects in one process, on top of the counters and charges in the KVStore."""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from apis.accounts.charges import CHARGES_PREFIX, Charge, ChargeEnd, Demand, Meter
from apis.accounts.limits import ORGANIZATION, RateLimit
from apis.errors import PermissionDenied, StackError
from apis.storage.kv_store import Delete, KVStore
from apis.storage.lease import Lease
from providers.accounts.ledger.limit_lease import new_record
from providers.accounts.ledger.project_ledger import ProjectLedger, find_ledger_id, find_uncounted
from providers.accounts.ledger.round_planner import PendingEnd, RoundPlanner, VoidLease
from providers.accounts.prices import Prices
from providers.accounts.records import ORGANIZATION_ID, SWEEP_LEASE_KEY, heartbeat_key
from providers.common.jobs import LeaderQueue, LeasedJobs
from providers.common.state.worker_signs import WorkerSign
from providers.common.supervision import supervise

_log = logging.getLogger(__name__)
HEARTBEAT_TTL_S: Final = 10.0
"""Seconds after which the reservations of a killed process are void."""
_HEARTBEAT_INTERVAL_S: Final = 3.0
_SWEEP_INTERVAL_S: Final = 2.0
"""Seconds between two looks for ends that no process has counted, such as those of background responses."""
_MIN_SWEPT_AGE_S: Final = 2.0
"""Age from which a stored end is counted by any process: the one that stored it counts it earlier."""
_CLOSE_S: Final = 3.0
"""Seconds in which a process that ends leaves the sweep to another one."""
_PAGE_ROWS: Final = 1000
_MAX_LEDGERS: Final = 1000
"""Projects whose counters stay in memory while nothing of them waits."""


class StoredLedger(Meter):
    """While the store is down, nothing that is limited is admitted, and ends wait in memory."""

    def __init__(
        self, kv_store: KVStore, prices: Prices, usage_ttl_s: float, sweep_interval_s: float = _SWEEP_INTERVAL_S
    ) -> None:
        self._kv = kv_store
        self._prices = prices
        self._usage_ttl_s = usage_ttl_s
        self._process_name = secrets.token_hex(8)
        self._guard_key = heartbeat_key(self._process_name)
        self._ledgers: dict[str, ProjectLedger] = {}
        self._heartbeat: asyncio.Task[None] | None = None
        self._heartbeat_lock = asyncio.Lock()
        self._beat_at = -HEARTBEAT_TTL_S
        sign = WorkerSign(kv_store, HEARTBEAT_TTL_S, name=self._process_name)
        self._sweeper = LeasedJobs(_SweepQueue(self, kv_store, sweep_interval_s), sign, sweep_interval_s)

    def start(self) -> None:
        """Begin to look for ends that no process has counted."""
        self._sweeper.start()

    async def close(self) -> None:
        """Count what waits, and make what is still reserved by this process void."""
        await self._sweeper.close(_CLOSE_S)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait({self._heartbeat})
        for ledger in [*self._ledgers.values()]:
            await ledger.close()
        if self._heartbeat is not None:
            with suppress(StackError):
                await self._kv.write([Delete(self._guard_key)], durable=False)

    async def open_charge(self, caller_ids: tuple[str, str], limits: Mapping[str, RateLimit], demand: Demand) -> Charge:
        priced_as = self._prices.find_name(demand)
        if not limits:
            return Charge(self, new_record(caller_ids, demand, priced_as or ""), {})
        if demand.model and priced_as is None and any(limit.month_cost is not None for limit in limits.values()):
            raise PermissionDenied(
                f"There is a limit of spending, and the model '{demand.model[:256]}' has no price: an administrator of "
                "this server adds one to `accounts.prices`, 0 for a model that is free.",
                param="model",
                code="model_without_price",
            )
        await self._ensure_heartbeat()
        ledger = self._find_ledger(ORGANIZATION_ID if ORGANIZATION in limits else caller_ids[0])
        record, headers, version = await ledger.reserve(caller_ids, limits, demand, priced_as=priced_as or "")
        return Charge(self, record, headers, version)

    def count_end(self, end: ChargeEnd, open_version: int | None, *, may_be_stored: bool) -> None:
        if end.record.parts or end.counts.requests:
            pending = PendingEnd(end, open_version, may_be_stored=may_be_stored)
            self._find_ledger(find_ledger_id(end.record)).add(pending)

    def count_stored(self, end: ChargeEnd, open_version: int | None, end_version: int) -> None:
        pending = PendingEnd(end, open_version, end_version, is_stored=True)
        self._find_ledger(find_ledger_id(end.record)).add(pending)

    async def settle_all(self) -> None:
        """Count every end that is stored now."""
        await self.sweep(min_age_s=0)
        await self.flush_all()

    async def flush_all(self) -> None:
        """Count what waits in this process now."""
        for ledger in [*self._ledgers.values()]:
            await ledger.flush()

    def forget_leases(self) -> None:
        """Read the leases of this process again before they are used: others may have released them."""
        for ledger in self._ledgers.values():
            ledger.forget_lease()

    def _find_ledger(self, ledger_id: str) -> ProjectLedger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            if len(self._ledgers) >= _MAX_LEDGERS:
                self._ledgers = {name: each for name, each in self._ledgers.items() if not each.is_idle}
            # a project may change its ledger, and each writes its own rows of usage
            writer_name = f"{self._process_name}{'.all' if ledger_id == ORGANIZATION_ID else ''}"
            planner = RoundPlanner(writer_name, self._guard_key, self._prices, self._usage_ttl_s)
            ledger = self._ledgers[ledger_id] = ProjectLedger(self._kv, ledger_id, planner)
        return ledger

    async def _ensure_heartbeat(self) -> None:
        """Return once the guard of this process's reservations exists."""
        if time.monotonic() - self._beat_at < HEARTBEAT_TTL_S / 2:
            return
        async with self._heartbeat_lock:
            if time.monotonic() - self._beat_at >= HEARTBEAT_TTL_S / 2:
                await self._beat()
            if self._heartbeat is None:
                self._heartbeat = supervise("the heartbeat of the charges", self._beat_forever)

    async def _beat(self) -> None:
        beat_at = time.monotonic()
        if beat_at - self._beat_at >= HEARTBEAT_TTL_S:
            self.forget_leases()
        await self._kv.put(self._guard_key, b"", ttl_s=HEARTBEAT_TTL_S, durable=False)
        self._beat_at = beat_at

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_INTERVAL_S)
            try:
                await self._beat()
            except StackError as exc:
                _log.warning("the reservations of this process cannot be renewed: %s", exc.message)

    async def sweep(self, *, min_age_s: float) -> None:
        """Note the ends that no process has counted, in seconds at least as old as `min_age_s`. Raises
        StoreUnavailable."""
        after = ""
        while rows := await self._kv.scan(CHARGES_PREFIX, after=after, limit=_PAGE_ROWS):
            charges: dict[str, list[PendingEnd | VoidLease]] = {}
            for ledger_id, charge in await find_uncounted(self._kv, rows, self._guard_key, min_age_s=min_age_s):
                charges.setdefault(ledger_id, []).append(charge)
            for ledger_id, group in charges.items():
                self._find_ledger(ledger_id).collect(group)
            after = rows[-1][0]
            if len(rows) < _PAGE_ROWS:
                return


class _SweepQueue(LeaderQueue):
    """One process of all counts the ends that others have stored."""

    title = "the ends of other processes"

    def __init__(self, ledger: StoredLedger, kv: KVStore, interval_s: float) -> None:
        super().__init__(kv, SWEEP_LEASE_KEY, HEARTBEAT_TTL_S, interval_s)
        self._ledger = ledger

    async def work(self, lease: Lease) -> None:
        await self._ledger.sweep(min_age_s=_MIN_SWEPT_AGE_S)
