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

_SCAN_PAGE_SIZE: Final = 1000
_RENEW_RETRY_S: Final = 10.0


class SessionRecord(msgspec.Struct, rename={"host_scope": "place"}):
    """`place` is what a process must share with the keeper to reach its `address`."""

    host_scope: str
    address: str


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """A record as it was read. Without an `address`, the keeper cannot be reached from here."""

    key: str
    version: int
    address: str | None


@dataclass(slots=True)
class _OwnRecord:
    """A record of this process's, and when it is to be renewed. It lives for `ttl_s` from when it was written."""

    key: str
    version: int
    idle_s: float
    renew_at: float


class SessionRegistry:
    """The records of this process's sessions, written and renewed, and those of others, found.

    A session may be idle for some time and then be used for `use_s`. Its record is written to outlive twice the one
    and the other, and again with a use after the first of that time: seldom.
    """

    def __init__(self, kv: KVStore, max_use_s: float) -> None:
        self._kv = kv
        self._max_use_s = max_use_s
        self._record = SessionRecord("", "")
        self._own_records: dict[tuple[str, str | None], _OwnRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def publish_at(self, address: str) -> None:
        """This process's sessions are used at `address`."""
        self._record = SessionRecord(_host_scope(), address)

    async def close(self) -> None:
        """Wait until what was released is out of the store."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def claim_session(self, tenant: str, name: str, idle_s: float) -> bool:
        """Tell that this process keeps the session. False where another does. Raises StoreUnavailable."""
        key = _session_key(tenant, name)
        versions = await self._kv.write([self._build_put(key, idle_s, ABSENT)], durable=False)
        if versions is None:
            return False
        self._own_records[tenant, name] = _OwnRecord(key, versions[0], idle_s, time.time() + idle_s)
        return True

    async def find_session(self, tenant: str, name: str) -> RegistryEntry | None:
        """The record of a session that this process does not keep."""
        key = _session_key(tenant, name)
        entry = await self._kv.get(key)
        return None if entry is None else self._parse_entry(key, entry)

    async def list_other_entries(self, tenant: str) -> Sequence[RegistryEntry]:
        """All records of a tenant's sessions that other processes keep."""
        found: list[RegistryEntry] = []
        prefix, after = f"{tenant}/container/", ""
        while rows := await self._kv.scan(prefix, after=after, limit=_SCAN_PAGE_SIZE):
            after = rows[-1][0]
            found += [self._parse_entry(*row) for row in rows]
        return [each for each in found if each.address != self._record.address]

    async def delete_entries(self, entries: Sequence[RegistryEntry]) -> None:
        """Take away records that turned out to be out of date, unless they have changed since."""
        for each in entries:
            await self._kv.write([Delete(each.key, each.version)], durable=False)

    def mark_used(self, tenant: str, name: str | None) -> None:
        """A session of this process is used now."""
        own = self._own_records.get((tenant, name))
        if own is not None and time.time() >= own.renew_at:
            own.renew_at = time.time() + _RENEW_RETRY_S
            self._spawn(self._renew_record((tenant, name), own))

    def release_session(self, tenant: str, name: str | None) -> None:
        """A session of this process has ended."""
        own = self._own_records.pop((tenant, name), None)
        if own is not None:
            self._spawn(self._delete_record(own))

    async def _renew_record(self, identity: tuple[str, str | None], own_record: _OwnRecord) -> None:
        for expect in (own_record.version, ABSENT):  # gone where the clocks stood still for longer than it lives
            versions = await self._kv.write([self._build_put(own_record.key, own_record.idle_s, expect)], durable=False)
            if versions is not None:
                own_record.version, own_record.renew_at = versions[0], time.time() + own_record.idle_s
                break
        if self._own_records.get(identity) is not own_record:
            await self._delete_record(own_record)

    async def _delete_record(self, own_record: _OwnRecord) -> None:
        await self._kv.write([Delete(own_record.key, own_record.version)], durable=False)

    def _build_put(self, key: str, idle_s: float, expect: int) -> Put:
        return Put(key, msgspec.json.encode(self._record), 2 * idle_s + self._max_use_s, expect)

    def _parse_entry(self, key: str, entry: Entry) -> RegistryEntry:
        try:
            record = msgspec.json.decode(entry.value, type=SessionRecord)
        except msgspec.MsgspecError:  # of another version of this server
            return RegistryEntry(key, entry.version, None)
        return RegistryEntry(
            key, entry.version, record.address if record.host_scope == self._record.host_scope else None
        )

    def _spawn(self, write: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(_log_store_errors(write))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _log_store_errors(write: Coroutine[Any, Any, None]) -> None:
    """A record that cannot be written is out of date, which does no harm."""
    try:
        await write
    except StackError as exc:
        _log.warning("what other processes know of this one's Python sessions is out of date: %s", exc.message)


def _session_key(tenant: str, name: str) -> str:
    # Hashed, because a client may name anything, and not all of it makes a key.
    return f"{tenant}/container/{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _host_scope() -> str:
    """The same for processes that see the same files of one machine, as one user: its boot, and their mounts."""
    boot, mounts = platform.node(), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
    return f"{boot} {mounts} {os.geteuid()}"
