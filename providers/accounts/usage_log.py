"""StoredUsageLog: the sums of each hour in the KVStore, each process in rows of its own."""

from apis.accounts.usage import HOUR_S, UsageEntry
from apis.storage.kv_store import KVStore
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.records import usage_key
from providers.common.state.scan import scan_records


class StoredUsageLog:
    """Sums of what was used in each hour, shared by all workers, in rows that one process writes each, so that none
    overwrites what another has counted. `ledger` writes them; it counts what is stored and not counted yet before each
    read."""

    def __init__(self, kv_store: KVStore, ledger: StoredLedger) -> None:
        self._kv = kv_store
        self._ledger = ledger

    async def read(self, start_time: int, end_time: int) -> list[UsageEntry]:
        """Return the entries of the hours from `start_time` on and before `end_time`, oldest first. They include every
        response that was stored before the call."""
        await self._ledger.settle_all()
        after, before = usage_key(-(-start_time // HOUR_S), "", ""), usage_key(-(-end_time // HOUR_S), "", "")
        rows = scan_records(self._kv, usage_key(None, "", ""), UsageEntry, after=after, before=before)
        return [row.record async for row in rows]
