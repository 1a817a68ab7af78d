"""WorkerSign: distinguishes a worker that has ended from one that is slow.

    /worker_sign/NAME     present while the worker NAME renews it, and for some intervals more

A lease that has expired shows only that its holder did not renew it. The holder may have ended; or it lives, on a busy
machine, or without its store for a while. Work that may end its workers therefore keeps the names of those that left it
and gave nothing back. Before it fails for their number, it asks which of them have really ended.
"""

import asyncio
import logging
import secrets
from collections.abc import Collection, Sequence
from typing import Final

from apis.errors import StackError
from apis.storage.kv_store import ABSENT, KVStore, Put
from providers.common.supervision import supervise

_log = logging.getLogger(__name__)
_PREFIX: Final = "/worker_sign/"
_AWAITED_INTERVALS: Final = 3
"""Intervals in which a worker that lives renews its sign at least once."""
_LOOKS_PER_INTERVAL: Final = 4
_LIFE_INTERVALS: Final = 2 * _AWAITED_INTERVALS


class WorkerSign:
    """The sign of one worker, renewed every `interval_s` from `start` to `close`; and the signs of the others."""

    def __init__(self, kv: KVStore, interval_s: float, *, name: str = "") -> None:
        """`name` is that of the worker, by default a random one."""
        self.name = name or secrets.token_hex(8)
        self._kv = kv
        self._interval_s = interval_s
        self._renewal: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._renewal = supervise("the sign of a worker", self._renew)

    async def close(self) -> None:
        """Renew the sign no more. It expires later: others may still ask for this worker."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait({self._renewal})

    async def list_ended(self, workers: Sequence[str]) -> list[str]:
        """Return those of the workers that have ended: they do not renew their signs while this call waits for them.
        A worker that is named twice counts twice. Raises StoreUnavailable."""
        names = {worker for worker in workers if worker != self.name}
        versions = await self._read_versions(names)
        # looks are counted instead of time: where this process stalls, the others may have stalled too
        for _ in range(_AWAITED_INTERVALS * _LOOKS_PER_INTERVAL):
            if not versions:
                break
            await asyncio.sleep(self._interval_s / _LOOKS_PER_INTERVAL)
            new_versions = await self._read_versions(versions.keys())
            versions = {name: version for name, version in versions.items() if new_versions[name] in (version, ABSENT)}
        return [worker for worker in workers if worker in versions]

    async def _read_versions(self, names: Collection[str]) -> dict[str, int]:
        ordered = sorted(names)
        entries = await self._kv.get_many([_PREFIX + name for name in ordered]) if ordered else ()
        return {name: ABSENT if entry is None else entry.version for name, entry in zip(ordered, entries, strict=True)}

    async def _renew(self) -> None:
        while True:
            try:
                put = Put(_PREFIX + self.name, b"", _LIFE_INTERVALS * self._interval_s)
                await self._kv.write([put], durable=False)
            except StackError as exc:
                _log.debug("the sign of this worker could not be renewed: %s", exc.message)
            await asyncio.sleep(self._interval_s)
