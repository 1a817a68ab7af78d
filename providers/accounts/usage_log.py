"""StoredUsageLog: the sums of each hour in the KVStore, each process in rows of its own."""

import asyncio
from typing import Final

from apis.accounts.usage import HOUR_S, UsageEntry
from apis.storage.kv_store import KVStore
from apis.storage.records import decode_record
from providers.accounts.ledger.stored_ledger import StoredLedger
from providers.accounts.records import usage_key
from providers.common.state.scan import skipping_damaged

_PAGE_ROWS: Final = 1000


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
        entries: list[UsageEntry] = []
        while rows := await self._kv.scan(usage_key(None, "", ""), after=after, before=before, limit=_PAGE_ROWS):
            for key, entry in rows:
                with skipping_damaged(self._kv, key, UsageEntry.__name__):
                    entries.append(decode_record(entry, UsageEntry))
            after = rows[-1][0]
            await asyncio.sleep(0)  # a store within the process answers without a pause
        return entries
