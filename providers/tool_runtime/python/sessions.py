"""The Python sessions that one process keeps at a time: by tenant and name, a bounded number, none idle for long."""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from apis.errors import NotFound, ToolFailed
from providers.tool_runtime.python.session import PythonSession
from providers.tool_runtime.python.session_registry import SessionRegistry

_log = logging.getLogger(__name__)

_MAX_LOSS_REASONS: Final = 1000

SessionKey = tuple[str, str | None, int]
"""Tenant, name, and a number that keeps sessions without a name apart."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session is made with: it is ended `idle_s` after its last use. `label` is only shown."""

    idle_s: float
    memory_bytes: int
    label: str = "auto"


@dataclass(slots=True)
class SessionEntry:
    """A session and its bookkeeping. `session` is None before its first use, and after its process has ended; `given`
    are the names of the files that came from outside."""

    settings: SessionSettings
    session: PythonSession | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    user_count: int = 0
    created_at: float = field(default_factory=time.time)
    last_used_at: float = field(default_factory=time.time)
    expiry_timer: asyncio.TimerHandle | None = None
    uploaded_names: set[str] = field(default_factory=set[str])


class PythonSessionPool:
    """Gives out sessions one user at a time. When all places are taken, the tenant with most idle sessions loses the
    one it has not used for longest. The `directory` hears of their use and their end."""

    def __init__(
        self,
        start_session: Callable[[SessionSettings], Awaitable[PythonSession]],
        max_sessions: int,
        lock_timeout_s: float,
        registry: SessionRegistry,
    ) -> None:
        self._start_session = start_session
        self._max_sessions = max_sessions
        self._lock_timeout_s = lock_timeout_s
        self._registry = registry
        self._entries: OrderedDict[SessionKey, SessionEntry] = OrderedDict()
        self._loss_reasons: OrderedDict[SessionKey, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._kill_tasks: set[asyncio.Task[None]] = set()

    def list_entries(self, tenant: str) -> dict[str, SessionEntry]:
        """The named sessions of a tenant."""
        return {name: kept for (owner, name, _), kept in self._entries.items() if owner == tenant and name is not None}

    def has_session(self, tenant: str, name: str) -> bool:
        """Whether this process keeps the session."""
        return (tenant, name, 0) in self._entries

    def create_session(self, tenant: str, name: str | None, settings: SessionSettings) -> SessionKey:
        """A place for a session; its process starts with its first use. Raises ToolFailed when all are in use."""
        key = (tenant, name, next(self._numbers) if name is None else 0)
        if key not in self._entries:
            if len(self._entries) >= self._max_sessions:
                self._evict_idle_session()
            self._entries[key] = SessionEntry(settings)
            self._schedule_expiry(key)
        return key

    @asynccontextmanager
    async def use_session(self, key: SessionKey) -> AsyncGenerator[tuple[PythonSession, str]]:
        """The session, for one user at a time, and why it is a new one where an earlier one of that name is gone.

        Raises NotFound when there is none, and ToolFailed when its other users take too long or it cannot start.
        """
        kept = self._entries.get(key)
        if kept is None:
            raise NotFound("There is no such Python session.")
        self._registry.mark_used(*key[:2])
        kept.user_count += 1
        if kept.expiry_timer is not None:
            kept.expiry_timer.cancel()
        self._entries.move_to_end(key)
        try:
            await self._acquire_lock(kept)
            try:
                yield await self._ensure_started(key, kept), self._loss_reasons.pop(key, "")
            finally:
                self._finish_use(key, kept)
                kept.lock.release()
        finally:
            kept.user_count -= 1
            self._schedule_expiry(key)

    def end_session(self, key: SessionKey, reason: str = "") -> bool:
        """End a session. `reason` is kept for the next one of its name. False when there was none."""
        kept = self._entries.pop(key, None)
        if kept is None:
            return False
        if kept.expiry_timer is not None:
            kept.expiry_timer.cancel()
        if reason:
            self.record_loss(key, reason)
        self._registry.release_session(*key[:2])
        if kept.session is not None:
            task = asyncio.ensure_future(kept.session.kill())
            self._kill_tasks.add(task)
            task.add_done_callback(self._kill_tasks.discard)
            _log.debug("a Python session was ended: %s", reason or "it was deleted")
        return True

    def record_loss(self, key: SessionKey, reason: str) -> None:
        """A session of that name is gone: the next one's first user is told why."""
        self._loss_reasons[key] = reason
        if len(self._loss_reasons) > _MAX_LOSS_REASONS:
            self._loss_reasons.popitem(last=False)

    async def close(self) -> None:
        """End all sessions and wait until they have ended."""
        for key in list(self._entries):
            self.end_session(key)
        if self._kill_tasks:
            await asyncio.wait(self._kill_tasks)

    async def _acquire_lock(self, entry: SessionEntry) -> None:
        try:
            async with asyncio.timeout(self._lock_timeout_s):
                await entry.lock.acquire()
        except TimeoutError:
            raise ToolFailed("Other calls keep this Python session busy; try again later.") from None

    async def _ensure_started(self, key: SessionKey, entry: SessionEntry) -> PythonSession:
        if entry.session is None and self._entries.get(key) is entry:
            entry.session = await self._start_session(entry.settings)
        if entry.session is None or self._entries.get(key) is not entry:
            if entry.session is not None:
                await entry.session.kill()
            raise ToolFailed("This Python session was deleted.")
        return entry.session

    def _finish_use(self, key: SessionKey, entry: SessionEntry) -> None:
        entry.last_used_at = time.time()
        if entry.session is not None and entry.session.has_ended:
            entry.session = None
            entry.uploaded_names.clear()
            _log.debug("a Python session ended while it was used")

    def _schedule_expiry(self, key: SessionKey) -> None:
        kept = self._entries.get(key)
        if kept is None or kept.user_count:
            return
        if kept.expiry_timer is not None:
            kept.expiry_timer.cancel()
        loop = asyncio.get_running_loop()
        idle_s = kept.settings.idle_s
        kept.expiry_timer = loop.call_later(
            idle_s, self.end_session, key, f"it was not used for {idle_s / 60:g} minutes"
        )

    def _evict_idle_session(self) -> None:
        idle: dict[str, deque[SessionKey]] = {}
        for key, kept in self._entries.items():
            if not kept.user_count:
                idle.setdefault(key[0], deque()).append(key)
        if not idle:
            raise ToolFailed("All Python sessions of this server are in use; try again later.")
        self.end_session(max(idle.values(), key=len)[0], "its place was needed for others")
