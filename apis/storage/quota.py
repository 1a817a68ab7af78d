"""StorageQuota: a bound on the bytes that one tenant has in a KVStore.

The bytes are counted as those of files are: a running sum, and the truth by measuring the store before anything is
refused. The sum is of this process alone, so that a write costs no second one; other processes' writes enter it with
the next measurement, which is due after a sixteenth of the quota was written here.

    /stored_bytes/TENANT/sum    the result of the last measurement that took several reads

A process begins with that result, so that the start of many workers does not read a large store many times.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from apis.errors import InvalidRequest, QuotaExceeded, StackError

if TYPE_CHECKING:  # a store has its quota
    from apis.storage.kv_store import KVStore

_WRITTEN_SHARE: Final = 1 / 16
"""Share of the quota that this process writes for a tenant until it measures the store again."""
_REST_FACTOR: Final = 4
"""A measurement pauses for this many times the duration of each page, so that it takes a fifth of the store's time."""
_MIN_REFUSAL_S: Final = 1.0
"""Seconds for which a refusal is repeated without measuring again; longer where measuring takes longer."""


_MIN_STORED_PAGES: Final = 8
"""Reads of a measurement whose sum is not stored, because the store is small."""
_MEASURING: Final = b"-"
"""In the place of a sum that a process measures, for as long as the next constant says."""
_MEASURING_LIFE_S: Final = 120.0
_SUM_LIFE_S: Final = 86_400.0
"""Seconds for which a process that starts may begin with the result of another one's measurement."""


@dataclass(slots=True)
class _TenantBytes:
    """`measured_bytes` is None until the first measurement has ended; `written_bytes` is what came after its start.
    `bound_bytes` is the tenant's own bound, where it has one."""

    measured_bytes: int | None = None
    written_bytes: int = 0
    refused_until: float = 0.0
    bound_bytes: int | None = None
    measurement: "asyncio.Task[None] | None" = None

    @property
    def total_bytes(self) -> int:
        return (self.measured_bytes or 0) + self.written_bytes


class StorageQuota:
    """The bytes of each tenant in a store, at most `max_tenant_bytes`."""

    def __init__(self, store: "KVStore", max_tenant_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_tenant_bytes
        self._tenants: dict[str, _TenantBytes] = {}

    def add(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Count writes that have happened: keys, and the bytes of their values. A key that begins with a slash belongs
        to no tenant."""
        for key, size in sizes:
            tenant = key[: key.find("/")]
            usage = self._tenants.get(tenant)
            if usage is not None:
                usage.written_bytes += size + len(key)

    def bound(self, tenant: str, max_bytes: int | None) -> None:
        """Set the tenant's own bound, which may be below the one of all; None removes it."""
        usage = self._tenants.get(tenant)
        if usage is None and max_bytes is not None:
            usage = self._tenants[tenant] = _TenantBytes()
        if usage is not None and usage.bound_bytes != max_bytes:
            usage.bound_bytes, usage.refused_until = max_bytes, 0.0

    async def require_room(self, tenant: str) -> None:
        """Raise InvalidRequest if the tenant has stored more than the quota, or QuotaExceeded if more than its own
        bound, by a measurement that is seconds old."""
        usage = self._tenants.get(tenant)
        if usage is None:
            usage = self._tenants[tenant] = _TenantBytes()
        max_bytes = self._max_bytes if usage.bound_bytes is None else min(self._max_bytes, usage.bound_bytes)
        if usage.total_bytes >= max_bytes and time.monotonic() >= usage.refused_until:
            if usage.measurement is not None:  # it may have counted the writes since its start twice
                await asyncio.shield(usage.measurement)
            if usage.total_bytes >= max_bytes:
                await asyncio.shield(self._start(usage, self._measure(tenant, usage)))
        elif usage.measured_bytes is None or usage.written_bytes > max_bytes * _WRITTEN_SHARE:
            self._start(usage, self._load_or_measure(tenant, usage))
        if usage.total_bytes >= max_bytes:
            if max_bytes < self._max_bytes:
                raise QuotaExceeded(
                    f"This project has stored {usage.total_bytes} bytes, and {max_bytes} are allowed "
                    "(`max_stored_bytes`). Delete responses, conversations or files, or send `store: false`."
                )
            raise InvalidRequest(
                f"You have stored {usage.total_bytes} bytes, and {self._max_bytes} are allowed "
                "(`kv_store.max_tenant_bytes`). Delete responses, conversations or files, or send `store: false`.",
                param="store",
                code="storage_quota_exceeded",
            )

    async def close(self) -> None:
        """Cancel the measurements that run."""
        tasks = [usage.measurement for usage in self._tenants.values() if usage.measurement is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, usage: _TenantBytes, measuring: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        if usage.measurement is None:
            usage.measurement = asyncio.create_task(measuring)
        else:
            measuring.close()
        return usage.measurement

    async def _load_or_measure(self, tenant: str, usage: _TenantBytes) -> None:
        """Begin with the sum that another process has stored, or is about to store; measure without one, or if this
        process has begun."""
        is_first = usage.measured_bytes is None
        if is_first and await self._load(tenant, usage):
            usage.measurement = None
            return
        await self._measure(tenant, usage, is_first=is_first)

    async def _load(self, tenant: str, usage: _TenantBytes) -> bool:
        """Load the sum that is stored; return False where there is none, and no process measures it."""
        try:
            entry = await self._store.get(_sum_key(tenant))
            if entry is None:
                return False
            usage.measured_bytes = None if entry.value == _MEASURING else int(entry.value)
        except (StackError, ValueError):
            return False  # a damaged sum is none
        return True

    async def _measure(self, tenant: str, usage: _TenantBytes, *, is_first: bool = False) -> None:
        started_at = time.monotonic()
        written_before, total, after, pages = usage.written_bytes, 0, "", 0
        try:
            while True:
                page_started_at = time.monotonic()
                size, after = await self._store.measure(f"{tenant}/", after=after)
                total, pages = total + size, pages + 1
                if not after:
                    break
                if is_first and pages == _MIN_STORED_PAGES:  # from here on the others wait for the sum
                    if await self._load(tenant, usage):
                        return
                    await self._store.put(_sum_key(tenant), _MEASURING, ttl_s=_MEASURING_LIFE_S, durable=False)
                await asyncio.sleep(_REST_FACTOR * (time.monotonic() - page_started_at))
            usage.measured_bytes = total
            usage.written_bytes -= written_before
            if pages > _MIN_STORED_PAGES:
                await self._store.put(_sum_key(tenant), b"%d" % total, ttl_s=_SUM_LIFE_S, durable=False)
            now = time.monotonic()
            if total >= min(self._max_bytes, usage.bound_bytes or self._max_bytes):
                usage.refused_until = now + max(_MIN_REFUSAL_S, 10 * (now - started_at))
        except StackError:
            pass  # during an outage of the store the sum stays as it is; the next request starts a measurement
        finally:
            usage.measurement = None


def _sum_key(tenant: str) -> str:
    return f"/stored_bytes/{tenant}/sum"
