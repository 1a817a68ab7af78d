"""Pool of Python sessions by tenant and name: bounded in number, and each ended when it is idle for long."""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from apis.fair_share import FairShare, Place
from apis.skills.bundle import SkillFile
from providers.common.recent import RecentEntries
from providers.tool_runtime.python.egress.settings import NetworkSettings, NetworkUse, SecretValue
from providers.tool_runtime.python.messages import SessionFailure
from providers.tool_runtime.python.session import PythonSession

_log = logging.getLogger(__name__)

_MAX_LOSS_REASONS: Final = 1000
_FIRST_USE_S: Final = 10.0
"""Seconds for which a new session that no one has used counts as in use: its creator is about to use it."""

SessionKey = tuple[str, str | None, int]
"""Tenant, name, and a number that distinguishes sessions without a name (0 for all others)."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of one session, which is ended `idle_s` after its last use. `label` is its name in listings; without a
    `network` nothing can be reached. The work folder of a workspace is another one."""

    idle_s: float
    memory_bytes: int
    label: str = "auto"
    network: NetworkSettings | None = None
    is_workspace: bool = False


@dataclass(frozen=True, slots=True)
class SessionContents:
    """Contents of a new session: files of skills, and the values of secrets, which are kept outside of it. A workspace
    has an `environment`, and begins with what `archive` holds and then with `files`, by name."""

    skill_files: Sequence[SkillFile] = ()
    secrets: Sequence[SecretValue] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Sequence[tuple[str, bytes]] = ()
    archive: bytes = b""


NO_CONTENTS: Final = SessionContents()


class UseLock:
    """Lets in users who share a session, or one that has it alone, in the order in which they came."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._user_count = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()

    @asynccontextmanager
    async def share(self) -> AsyncGenerator[None]:
        """Let other users in that share the session, too."""
        async with self._turn:
            self._user_count += 1
            self._is_unused.clear()
        try:
            yield
        finally:
            self._user_count -= 1
            if not self._user_count:
                self._is_unused.set()

    @asynccontextmanager
    async def have_alone(self) -> AsyncGenerator[None]:
        """Wait for the users that are there, and let none in."""
        async with self._turn:
            await self._is_unused.wait()
            yield


@dataclass(slots=True)
class SessionEntry:
    """Place of a session in the pool. `session` is None before its first use."""

    settings: SessionSettings
    place: Place
    contents: SessionContents
    session: PythonSession | None = None
    start_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    use_lock: UseLock = field(default_factory=UseLock)
    user_count: int = 0
    created_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    expiry_timer: asyncio.TimerHandle | None = None
    uploaded_names: set[str] = field(default_factory=set[str])
    record_written_at: float = field(default_factory=time.time)
    first_use_deadline: float | None = field(default_factory=lambda: time.monotonic() + _FIRST_USE_S)
    network_use: NetworkUse = field(default_factory=NetworkUse)

    @property
    def is_idle(self) -> bool:
        """True if the session may be ended to make room: it has no user, and its first use is over or overdue."""
        is_awaited = self.first_use_deadline is not None and time.monotonic() < self.first_use_deadline
        return not (self.user_count or is_awaited)

    def claim_record_renewal(self) -> float:
        """Return `idle_s` when it has passed since the session's record was written, which the caller then renews,
        and else 0."""
        if time.time() < self.record_written_at + self.settings.idle_s:
            return 0.0
        self.record_written_at = time.time()
        return self.settings.idle_s


class PythonSessionPool:
    """Lends each session to users that share it, or to one at a time.

    A tenant with as many sessions as its share loses its own idle session that it has not used for longest when it
    creates another one. Where all places are taken, so does the tenant that has most, for one that has fewer.
    """

    def __init__(
        self,
        start_session: Callable[[SessionKey, SessionEntry], Awaitable[PythonSession]],
        places: FairShare,
        lock_timeout_s: float,
    ) -> None:
        self._start_session = start_session
        self._places = places
        self._lock_timeout_s = lock_timeout_s
        self._entries: OrderedDict[SessionKey, SessionEntry] = OrderedDict()
        self._loss_reasons = RecentEntries[SessionKey, str](_MAX_LOSS_REASONS)
        self._numbers = itertools.count(1)
        self._kill_tasks: set[asyncio.Task[None]] = set()

    def list_entries(self, tenant: str) -> dict[str, SessionEntry]:
        """Return the named sessions of a tenant."""
        return {
            name: entry for (owner, name, _), entry in self._entries.items() if owner == tenant and name is not None
        }

    def get_entry(self, tenant: str, name: str) -> SessionEntry | None:
        """Return a named session, or None."""
        return self._entries.get((tenant, name, 0))

    def get_loss_reason(self, tenant: str, name: str) -> str:
        """Return why an earlier session of this name is gone, or "" where that is not known."""
        return self._loss_reasons.get((tenant, name, 0), "")

    def create_session(
        self,
        tenant: str,
        name: str | None,
        settings: SessionSettings,
        loss_reason: str = "",
        contents: SessionContents = NO_CONTENTS,
    ) -> SessionKey:
        """Reserve a place for a session, whose process starts with its first use.

        Raise SessionFailure when all that the tenant may have are in use. `loss_reason` says why an earlier one is
        gone, where the pool itself does not know better.
        """
        key = (tenant, name, next(self._numbers) if name is None else 0)
        if key not in self._entries:
            if settings.is_workspace:  # its owner knows what is lost
                self._loss_reasons.pop(key, None)
            self._entries[key] = SessionEntry(settings, self._take_place(tenant), contents)
            if loss_reason and key not in self._loss_reasons:
                self.record_loss(key, loss_reason)
            self._schedule_expiry(key)
        return key

    @asynccontextmanager
    async def use_session(
        self, key: SessionKey, *, is_shared: bool = False
    ) -> AsyncGenerator[tuple[PythonSession, str]]:
        """Lend the session, alone or with others that share it, with the reason why an earlier one of that name is
        gone, or "".

        Raise SessionFailure when there is none, its other users take too long, or it cannot start.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise SessionFailure("no_session", "There is no such Python session.")
        entry.user_count += 1
        if entry.expiry_timer is not None:
            entry.expiry_timer.cancel()
        self._entries.move_to_end(key)
        try:
            async with AsyncExitStack() as stack:
                await self._acquire_lock(entry, stack, is_shared=is_shared)
                try:
                    yield await self._ensure_started(key, entry), self._loss_reasons.pop(key, "")
                finally:
                    self._finish_use(key, entry)
        finally:
            entry.user_count -= 1
            entry.first_use_deadline = None
            self._schedule_expiry(key)

    def end_session(self, key: SessionKey, reason: str = "") -> bool:
        """End a session and record the `reason` for the next one of its name. Return False when there was none."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._end_entry(key, reason)
        entry.place.release()
        return True

    async def close(self) -> None:
        """End all sessions and wait until they have ended."""
        for key in list(self._entries):
            self.end_session(key)
        if self._kill_tasks:
            await asyncio.wait(self._kill_tasks)

    def _end_entry(self, key: SessionKey, reason: str) -> None:
        """End a session without releasing its place."""
        entry = self._entries.pop(key)
        if entry.expiry_timer is not None:
            entry.expiry_timer.cancel()
        if reason:
            self.record_loss(key, reason)
        if entry.session is not None:
            task = asyncio.ensure_future(entry.session.kill())
            self._kill_tasks.add(task)
            task.add_done_callback(self._kill_tasks.discard)
            _log.debug("a Python session was ended: %s", reason or "it was deleted")

    def record_loss(self, key: SessionKey, reason: str) -> None:
        """Record why an earlier session of this name is gone, for the next program in it."""
        self._loss_reasons[key] = reason

    async def _acquire_lock(self, entry: SessionEntry, stack: AsyncExitStack, *, is_shared: bool) -> None:
        use = entry.use_lock.share() if is_shared else entry.use_lock.have_alone()
        try:
            async with asyncio.timeout(self._lock_timeout_s):
                await stack.enter_async_context(use)
        except TimeoutError:
            raise SessionFailure("unavailable", "Other calls keep this Python session busy; try again later.") from None

    async def _ensure_started(self, key: SessionKey, entry: SessionEntry) -> PythonSession:
        async with entry.start_lock:
            if entry.session is None and self._entries.get(key) is entry:
                entry.session = await self._start_session(key, entry)
        if entry.session is None or self._entries.get(key) is not entry:
            if entry.session is not None:
                await entry.session.kill()
            raise SessionFailure("unavailable", "This Python session was deleted.")
        return entry.session

    def _finish_use(self, key: SessionKey, entry: SessionEntry) -> None:
        """Take a session back. One whose first process has ended has lost its files: there is no such session now."""
        entry.last_used_at = time.time()
        if entry.session is not None and entry.session.has_ended and self._entries.get(key) is entry:
            self.end_session(key, "its first process ended while it was used")

    def _schedule_expiry(self, key: SessionKey) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.user_count:
            return
        if entry.expiry_timer is not None:
            entry.expiry_timer.cancel()
        loop = asyncio.get_running_loop()
        idle_s = entry.settings.idle_s
        entry.expiry_timer = loop.call_later(
            idle_s, self.end_session, key, f"it was not used for {idle_s / 60:g} minutes"
        )

    def _take_place(self, tenant: str) -> Place:
        """Return a place, for which an idle session may end. Raise SessionFailure when there is none."""
        end_idle_use = {
            entry.place: partial(self._end_entry, key, "its place was needed for others")
            for key, entry in self._entries.items()  # the one unused for longest first
            if entry.is_idle
        }
        place = self._places.acquire_or_reclaim(tenant, end_idle_use)
        if place is None:
            raise SessionFailure(
                "unavailable", "All Python sessions of this server that you may have are in use; try again later."
            )
        return place
