"""WorkerRegistry: the processes that execute background responses, as they report themselves in a KVStore.

/worker/ID     the report of a process; it expires when the process stops reporting
"""

import logging
import os
import platform
import secrets
import time
from typing import Final

from apis.errors import StackError
from apis.observation.background import WorkerSummary
from apis.storage.kv_store import Delete, KVStore, Put
from apis.storage.records import encode_record
from providers.common.state.scan import list_records

_log = logging.getLogger(__name__)
_PREFIX: Final = "/worker/"
_MAX_WORKERS: Final = 1000
_LIFE_INTERVALS: Final = 3
"""Reports that a process may miss until it is listed no more."""


class WorkerRegistry:
    """The report of this process, written every `interval_s` at most, and those of all."""

    def __init__(self, kv: KVStore, interval_s: float, max_running: int) -> None:
        self.worker_id = f"worker_{secrets.token_hex(8)}"
        self._kv = kv
        self._interval_s = interval_s
        self._max_running = max_running
        self._started_at = time.time()
        self._reported_at = float("-inf")

    async def report(self, running: int) -> None:
        """Report this process if it is time to. An outage of the store is no reason to stop: nothing depends on it."""
        if time.monotonic() - self._reported_at < self._interval_s:
            return
        self._reported_at = time.monotonic()
        host, pid = platform.node(), os.getpid()
        record = WorkerSummary(self.worker_id, host, pid, self._started_at, time.time(), running, self._max_running)
        put = Put(_PREFIX + self.worker_id, encode_record(record), _LIFE_INTERVALS * self._interval_s)
        try:
            await self._kv.write([put], durable=False)
        except StackError as exc:
            _log.debug("this worker could not report itself: %s", exc.message)

    async def remove(self) -> None:
        """Remove the report of this process, which ends; where the store is away it expires."""
        try:
            await self._kv.write([Delete(_PREFIX + self.worker_id)], durable=False)
        except StackError as exc:
            _log.debug("this worker could not remove its report: %s", exc.message)

    async def has_others(self) -> bool:
        """Return True if another process has reported itself lately."""
        return any(worker.id != self.worker_id for worker in await self.list_workers())

    async def list_workers(self) -> list[WorkerSummary]:
        """Return the processes that have reported themselves lately, the oldest first."""
        rows = await list_records(self._kv, _PREFIX, WorkerSummary, limit=_MAX_WORKERS)
        return sorted((stored.record for stored in rows), key=lambda worker: worker.started_at)
