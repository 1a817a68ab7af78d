"""Directory: which process keeps which Python session, told to the others in a KVStore.

    TENANT/container/HASH    of the session's name: where its keeper listens, there until the session ends

Nothing but a keeper's own record says that it keeps a session, and only the keeper knows whether that is still so:
a record that is out of date leads to a process that has ended, or that says no. Then whoever followed it takes it
away, as it was read.
"""

import asyncio
import hashlib
import logging
import os
import platform
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from apis.errors import StackError
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Put

_log = logging.getLogger(__name__)

_PAGE: Final = 1000
_AGAIN_S: Final = 10.0


class Record(msgspec.Struct):
    """`place` is what a process must share with the keeper to reach its `address`."""

    place: str
    address: str


@dataclass(frozen=True, slots=True)
class Found:
    """A record as it was read. Without an `address`, the keeper cannot be reached from here."""

    key: str
    version: int
    address: str | None


@dataclass(slots=True)
class _Own:
    """A record of this process's, and when it is to be renewed. It lives for `ttl_s` from when it was written."""

    key: str
    version: int
    idle_s: float
    renew_at: float


class Directory:
    """The records of this process's sessions, written and renewed, and those of others, found.

    A session may be idle for some time and then be used for `use_s`. Its record is written to outlive twice the one
    and the other, and again with a use after the first of that time: seldom.
    """

    def __init__(self, kv: KVStore, use_s: float) -> None:
        self._kv = kv
        self._use_s = use_s
        self._record = Record("", "")
        self._own: dict[tuple[str, str | None], _Own] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, address: str) -> None:
        """This process's sessions are used at `address`."""
        self._record = Record(_place(), address)

    async def close(self) -> None:
        """Wait until what was released is out of the store."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def claim(self, tenant: str, name: str, idle_s: float) -> bool:
        """Tell that this process keeps the session. False where another does. Raises StoreUnavailable."""
        key = _key(tenant, name)
        versions = await self._kv.write([self._put(key, idle_s, ABSENT)], durable=False)
        if versions is None:
            return False
        self._own[tenant, name] = _Own(key, versions[0], idle_s, time.time() + idle_s)
        return True

    async def find(self, tenant: str, name: str) -> Found | None:
        """The record of a session that this process does not keep."""
        key = _key(tenant, name)
        entry = await self._kv.get(key)
        return None if entry is None else self._found(key, entry)

    async def of(self, tenant: str) -> Sequence[Found]:
        """All records of a tenant's sessions that other processes keep."""
        found: list[Found] = []
        prefix, after = f"{tenant}/container/", ""
        while rows := await self._kv.scan(prefix, after=after, limit=_PAGE):
            after = rows[-1][0]
            found += [self._found(*row) for row in rows]
        return [each for each in found if each.address != self._record.address]

    async def forget(self, found: Sequence[Found]) -> None:
        """Take away records that turned out to be out of date, unless they have changed since."""
        for each in found:
            await self._kv.write([Delete(each.key, each.version)], durable=False)

    def touch(self, tenant: str, name: str | None) -> None:
        """A session of this process is used now."""
        own = self._own.get((tenant, name))
        if own is not None and time.time() >= own.renew_at:
            own.renew_at = time.time() + _AGAIN_S
            self._spawn(self._renew((tenant, name), own))

    def release(self, tenant: str, name: str | None) -> None:
        """A session of this process has ended."""
        own = self._own.pop((tenant, name), None)
        if own is not None:
            self._spawn(self._delete(own))

    async def _renew(self, identity: tuple[str, str | None], own: _Own) -> None:
        for expect in (own.version, ABSENT):  # gone where the clocks stood still for longer than it lives
            versions = await self._kv.write([self._put(own.key, own.idle_s, expect)], durable=False)
            if versions is not None:
                own.version, own.renew_at = versions[0], time.time() + own.idle_s
                break
        if self._own.get(identity) is not own:
            await self._delete(own)

    async def _delete(self, own: _Own) -> None:
        await self._kv.write([Delete(own.key, own.version)], durable=False)

    def _put(self, key: str, idle_s: float, expect: int) -> Put:
        return Put(key, msgspec.json.encode(self._record), 2 * idle_s + self._use_s, expect)

    def _found(self, key: str, entry: Entry) -> Found:
        try:
            record = msgspec.json.decode(entry.value, type=Record)
        except msgspec.MsgspecError:  # of another version of this server
            return Found(key, entry.version, None)
        return Found(key, entry.version, record.address if record.place == self._record.place else None)

    def _spawn(self, writing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(_quietly(writing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(writing: Coroutine[Any, Any, None]) -> None:
    """A record that cannot be written is out of date, which does no harm."""
    try:
        await writing
    except StackError as exc:
        _log.warning("what other processes know of this one's Python sessions is out of date: %s", exc.message)


def _key(tenant: str, name: str) -> str:
    # Hashed, because a client may name anything, and not all of it makes a key.
    return f"{tenant}/container/{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _place() -> str:
    """The same for processes that see the same files of one machine, as one user: its boot, and their mounts."""
    boot, mounts = platform.node(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
    return f"{boot} {mounts} {os.geteuid()}"
