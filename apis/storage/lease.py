"""Lease: a right that one holder at a time has, as a key with a short life in a KVStore.

The holder renews the key and writes on the condition that the key is still its own. A lease expires by the clock of the
store, so clocks that differ between machines do no harm, and a holder that stalled past its lease cannot write, renew
or delete anything. Neither can one whose last writes the store has lost in a fail-over: its lease is as it was before,
and it would add to state that no longer exists.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

from apis.errors import StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put

_log = logging.getLogger(__name__)
_MAX_RETRY_INTERVAL_S: Final = 0.2
_NO_VERSION: Final = -1
"""No entry has this version, so a condition on it never holds."""


class LeaseLost(Exception):
    """The lease has expired, or another has it: nothing was written."""


def read_holder(entry: Entry) -> str:
    """Return the name of the holder of the lease in `entry`, which may be empty. Raises StorageCorrupt."""
    try:
        return entry.value.partition(b" ")[0].decode()
    except UnicodeDecodeError as exc:
        raise StorageCorrupt from exc


class Lease:
    """The right named by `key`, for `lease_s` seconds from each write.

    The stored value is `HOLDER TOKEN NUMBER`: the holder's name, which may be empty; a token of this object; and the
    number of its write, by which the outcome of a write that raised is read from the store.
    """

    def __init__(self, kv: KVStore, key: str, lease_s: float, *, holder: str = "") -> None:
        self.key = key
        self.lease_s = lease_s
        self._kv = kv
        self._holder = holder.encode()
        self._value_prefix = b"%b %b " % (self._holder, secrets.token_hex(8).encode())
        self._write_number = 0
        self._tried_at = 0.0  # when the newest write was tried for the first time
        self._stored_number = 0  # the newest write that is known to have happened
        self._version: int | None = None  # None while it is unknown
        self._expires_at = 0.0
        self._is_relinquished = False
        self._write_lock = asyncio.Lock()

    def is_named_in(self, entry: Entry) -> bool:
        """True if the lease in `entry` was acquired under the holder's name, by this object or another one."""
        return entry.value.partition(b" ")[0] == self._holder

    async def acquire(
        self, ops: Sequence[Op] = (), *, expect: int | None = ABSENT, ttl_s: float | None = None, durable: bool = False
    ) -> list[int] | None:
        """Acquire the lease and apply `ops` in one atomic write, for `ttl_s` instead of `lease_s` where it is set.

        With `expect`, the lease is taken over from the entry of that version; None takes it from any holder. Returns
        the new versions of `ops`, or None if another has the lease or `ops` did not hold. After a StoreUnavailable
        the lease may be held until it expires.
        """
        async with self._write_lock:
            put = self._next_put(ttl_s or self.lease_s, expect)
            versions = await self._kv.write([put, *ops], durable=durable)
            if versions is None:
                return None
            self._set_version(versions[0], put, self._tried_at)
            return versions[1:]

    @property
    def is_relinquished(self) -> bool:
        """True once its holder has begun to release the lease or to hand it over."""
        return self._is_relinquished

    async def write(self, ops: Sequence[Op] = (), *, ttl_s: float | None = None, durable: bool = False) -> bool:
        """Apply `ops` as the holder and renew the lease, in one atomic write, for `ttl_s` instead of `lease_s` where it
        is set.

        An outage of the store is waited out for as long as the lease can live, and a write that raised and happened all
        the same counts as written. Returns False if a condition among `ops` did not hold. Raises LeaseLost.
        """
        deadline = time.monotonic() + self.lease_s
        async with self._write_lock:
            put = self._next_put(ttl_s or self.lease_s)
            while True:
                try:
                    return await self._write_as_holder(put, ops, durable=durable)
                except StoreUnavailable:
                    if time.monotonic() > deadline:
                        raise LeaseLost from None
                await asyncio.sleep(min(_MAX_RETRY_INTERVAL_S, self.lease_s / 10))

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost as far as this object knows: after a failed renewal, or when the last
        successful write began longer ago than the lease lives."""
        if time.monotonic() > self._expires_at:
            raise LeaseLost

    @asynccontextmanager
    async def renew_in_background(self) -> AsyncGenerator[None]:
        """Renew the lease while the context is entered, until it is released, handed over or lost. Does not release."""
        renewal = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            async with self._write_lock:  # so that no write is interrupted whose outcome would be unknown
                renewal.cancel()
            await asyncio.wait({renewal})

    async def release(self, ops: Sequence[Op] = (), *, even_if_lost: bool = False) -> bool:
        """Delete the lease and apply `ops`, in one atomic write, which is not repeated during an outage.

        Returns False if a condition among `ops` did not hold. Raises LeaseLost; with `even_if_lost`, `ops` are then
        written without the lease, as their own conditions allow.
        """
        async with self._write_lock:
            self._is_relinquished = True
            try:
                return await self._write_as_holder(Delete(self.key), ops, durable=bool(ops))
            except LeaseLost:
                if not even_if_lost:
                    raise
            return not ops or await self._kv.write(ops) is not None

    async def release_with(self, write: Callable[[Delete], Awaitable[bool]]) -> bool:
        """Release the lease by `write`, which writes the operation that it is called with among its own and returns
        whether they were written; return that. Raises LeaseLost."""
        async with self._write_lock:
            await self._load_version()
            version, self._version = self._version, None
            self._is_relinquished = await write(Delete(self.key, version))
            return self._is_relinquished

    async def prepare_release(self) -> Delete:
        """Stop the renewal and return `release_op`, after finding out the version if it is unknown."""
        async with self._write_lock:
            self._is_relinquished = True
            with suppress(LeaseLost):
                await self._load_version()
            return self.release_op

    @property
    def release_op(self) -> Delete:
        """The operation that releases the lease, to be written together with others. Its condition does not hold if the
        lease is lost or its version unknown. No write or renewal may come in between."""
        return Delete(self.key, _NO_VERSION if self._version is None else self._version)

    @asynccontextmanager
    async def hand_over(self, ttl_s: float) -> AsyncGenerator[Put]:
        """Yield the operation that keeps the lease for `ttl_s` without renewal, for another that acquires it under the
        same name: to be written before the context ends. Its condition does not hold if the lease is lost."""
        async with self._write_lock:
            with suppress(LeaseLost):
                await self._load_version()
            version, self._version = self._version, None
            yield self._next_put(ttl_s, _NO_VERSION if version is None else version)
            self._is_relinquished = True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            async with self._write_lock:
                if self._is_relinquished:
                    return
                try:
                    await self._write_as_holder(self._next_put(self.lease_s), (), durable=False)
                except StoreUnavailable:
                    continue  # the next write finds out whether this one happened
                except LeaseLost:
                    return

    async def _write_as_holder(self, op: Put | Delete, ops: Sequence[Op], *, durable: bool) -> bool:
        """Write `op`, which is of the lease, and `ops`, unless that has happened already. The version is unknown after
        any exception, and read by the next write."""
        refused_version = None
        while True:
            entry = await self._load_version()
            if entry is not None and isinstance(op, Put) and entry.value == op.value:
                self._set_version(entry.version, op, self._tried_at)
                return True
            if self._version == refused_version:
                return False  # the lease is as it was, so a condition among `ops` did not hold
            refused_version, self._version = self._version, None
            began_at = time.monotonic()
            versions = await self._kv.write(
                [msgspec.structs.replace(op, expect=refused_version), *ops], durable=durable
            )
            if versions is not None:
                if isinstance(op, Put):
                    self._set_version(versions[0], op, began_at)
                return True

    async def _load_version(self) -> Entry | None:
        """Find out the version if it is unknown; returns the entry if it was read. Raises LeaseLost."""
        if self._version is not None:
            return None
        entry = await self._kv.get(self.key)
        number = None if entry is None else self._find_number(entry)
        if entry is None or number is None:
            self._expires_at = 0.0
            raise LeaseLost
        if number < self._stored_number:
            _log.warning("the store has lost writes of the lease %s, so its holder gives it up", self.key)
            self._expires_at = 0.0
            raise LeaseLost
        self._version = entry.version
        return entry

    def _find_number(self, entry: Entry) -> int | None:
        """Return the number of the write; None if the lease is of another holder or damaged."""
        try:
            value = entry.value
            return int(value.removeprefix(self._value_prefix)) if value.startswith(self._value_prefix) else None
        except (StorageCorrupt, ValueError):
            return None

    def _next_put(self, ttl_s: float, expect: int | None = None) -> Put:
        self._write_number += 1
        self._tried_at = time.monotonic()
        return Put(self.key, b"%b%d" % (self._value_prefix, self._write_number), ttl_s, expect)

    def _set_version(self, version: int, put: Put, began_at: float) -> None:
        """Take note of a write that has happened. `began_at` is a time before it: the store's clock started later, so
        that the holder never believes in a lease that another may have by now."""
        self._version = version
        self._stored_number = int(put.value.removeprefix(self._value_prefix))
        self._expires_at = began_at + (put.ttl_s or self.lease_s)


async def release_lease_of(kv: KVStore, key: str, holder: str) -> None:
    """Delete the lease if it was acquired under this holder's name, by any process."""
    entry = await kv.get(key)
    if entry is not None and Lease(kv, key, 0, holder=holder).is_named_in(entry):
        await kv.write([Delete(key, entry.version)], durable=False)
