"""StoredUsageLog: the sums of each hour in the KVStore, each process in rows of its own."""

import asyncio
import hashlib
import logging
import secrets
import time
from typing import Final

from apis.accounts.usage import HOUR_S, UsageCounts, UsageEntry, UsageLog, UsageSubject
from apis.errors import StackError
from apis.storage.kv_store import KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.accounts.records import usage_key

_log = logging.getLogger(__name__)
_FLUSH_INTERVAL_S: Final = 1.0
_MAX_BATCH_ROWS: Final = 500
_PAGE_ROWS: Final = 1000


class StoredUsageLog(UsageLog):
    """Sums of this process since the hour began, written as whole rows under its own random name: no two processes
    write one row, so none overwrites what another has counted. While the store is down the sums wait in memory."""

    def __init__(self, kv_store: KVStore, retention_days: float) -> None:
        self._kv = kv_store
        self._ttl_s = retention_days * 86_400
        self._process_name = secrets.token_hex(8)
        self._rows: dict[tuple[int, UsageSubject], UsageCounts] = {}
        self._changed: set[tuple[int, UsageSubject]] = set()
        self._flush_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._flush_task is not None:
            self._flush_task.cancel()
            await asyncio.wait({self._flush_task})
        await self.flush()

    def add(self, subject: UsageSubject, counts: UsageCounts) -> None:
        row = (int(time.time()) // HOUR_S, subject)
        self._rows[row] = self._rows.get(row, UsageCounts()).plus(counts)
        self._changed.add(row)
        if self._flush_task is None or self._flush_task.done():
            self._flush_task = asyncio.create_task(self._flush_later())

    async def read(self, start_time: int, end_time: int) -> list[UsageEntry]:
        await self.flush()
        after, before = usage_key(-(-start_time // HOUR_S), "", ""), usage_key(-(-end_time // HOUR_S), "", "")
        entries: list[UsageEntry] = []
        while rows := await self._kv.scan(usage_key(None, "", ""), after=after, before=before, limit=_PAGE_ROWS):
            entries += [decode_record(entry, UsageEntry) for _, entry in rows]
            after = rows[-1][0]
        return entries

    async def flush(self) -> None:
        """Write the rows that have changed. A failure is logged, and they are written with the next ones."""
        changed, self._changed = [*self._changed], set()
        for first in range(0, len(changed), _MAX_BATCH_ROWS):
            batch = changed[first : first + _MAX_BATCH_ROWS]
            puts = [self._put(hour, subject) for hour, subject in batch]
            try:
                await self._kv.write(puts, durable=False)
            except StackError as exc:
                self._changed.update(changed[first:])
                _log.warning("the usage of %d subjects was not stored yet: %s", len(changed) - first, exc.message)
                return
            except asyncio.CancelledError:
                self._changed.update(changed[first:])
                raise
        hour = int(time.time()) // HOUR_S
        self._rows = {row: counts for row, counts in self._rows.items() if row[0] >= hour or row in self._changed}

    async def _flush_later(self) -> None:
        while self._changed:
            await asyncio.sleep(_FLUSH_INTERVAL_S)
            await self.flush()

    def _put(self, hour: int, subject: UsageSubject) -> Put:
        names = "\n".join((subject.project_id, subject.key_id, subject.model))
        digest = hashlib.sha256(names.encode()).hexdigest()[:24]
        entry = UsageEntry(hour * HOUR_S, subject, self._rows[hour, subject])
        return Put(usage_key(hour, digest, self._process_name), encode_record(entry), self._ttl_s)
