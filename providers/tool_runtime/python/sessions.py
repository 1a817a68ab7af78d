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
from providers.tool_runtime.python.session import Session
from providers.tool_runtime.python.session_registry import Directory

_log = logging.getLogger(__name__)

_MAX_NOTES: Final = 1000

Key = tuple[str, str | None, int]
"""Tenant, name, and a number that keeps sessions without a name apart."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session is made with: it is ended `idle_s` after its last use. `label` is only shown."""

    idle_s: float
    memory_bytes: int
    label: str = "auto"


@dataclass(slots=True)
class Kept:
    """A session and its bookkeeping. `session` is None before its first use, and after its process has ended; `given`
    are the names of the files that came from outside."""

    terms: Terms
    session: Session | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    expiry: asyncio.TimerHandle | None = None
    given: set[str] = field(default_factory=set[str])


class Sessions:
    """Gives out sessions one user at a time. When all places are taken, the tenant with most idle sessions loses the
    one it has not used for longest. The `directory` hears of their use and their end."""

    def __init__(
        self,
        start: Callable[[Terms], Awaitable[Session]],
        max_sessions: int,
        patience_s: float,
        directory: Directory,
    ) -> None:
        self._start = start
        self._max_sessions = max_sessions
        self._patience_s = patience_s
        self._directory = directory
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self._lost: OrderedDict[Key, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._ending: set[asyncio.Task[None]] = set()

    def of(self, tenant: str) -> dict[str, Kept]:
        """The named sessions of a tenant."""
        return {name: kept for (owner, name, _), kept in self._kept.items() if owner == tenant and name is not None}

    def has(self, tenant: str, name: str) -> bool:
        """Whether this process keeps the session."""
        return (tenant, name, 0) in self._kept

    def create(self, tenant: str, name: str | None, terms: Terms) -> Key:
        """A place for a session; its process starts with its first use. Raises ToolFailed when all are in use."""
        key = (tenant, name, next(self._numbers) if name is None else 0)
        if key not in self._kept:
            if len(self._kept) >= self._max_sessions:
                self._make_room()
            self._kept[key] = Kept(terms)
            self._rest(key)
        return key

    @asynccontextmanager
    async def use(self, key: Key) -> AsyncGenerator[tuple[Session, str]]:
        """The session, for one user at a time, and why it is a new one where an earlier one of that name is gone.

        Raises NotFound when there is none, and ToolFailed when its other users take too long or it cannot start.
        """
        kept = self._kept.get(key)
        if kept is None:
            raise NotFound("There is no such Python session.")
        self._directory.touch(*key[:2])
        kept.users += 1
        if kept.expiry is not None:
            kept.expiry.cancel()
        self._kept.move_to_end(key)
        try:
            await self._acquire(kept)
            try:
                yield await self._running(key, kept), self._lost.pop(key, "")
            finally:
                self._put_back(key, kept)
                kept.lock.release()
        finally:
            kept.users -= 1
            self._rest(key)

    def drop(self, key: Key, reason: str = "") -> bool:
        """End a session. `reason` is kept for the next one of its name. False when there was none."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        if kept.expiry is not None:
            kept.expiry.cancel()
        if reason:
            self.mourn(key, reason)
        self._directory.release(*key[:2])
        if kept.session is not None:
            task = asyncio.ensure_future(kept.session.kill())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            _log.debug("a Python session was ended: %s", reason or "it was deleted")
        return True

    def mourn(self, key: Key, reason: str) -> None:
        """A session of that name is gone: the next one's first user is told why."""
        self._lost[key] = reason
        if len(self._lost) > _MAX_NOTES:
            self._lost.popitem(last=False)

    async def close(self) -> None:
        """End all sessions and wait until they have ended."""
        for key in list(self._kept):
            self.drop(key)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _acquire(self, kept: Kept) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await kept.lock.acquire()
        except TimeoutError:
            raise ToolFailed("Other calls keep this Python session busy; try again later.") from None

    async def _running(self, key: Key, kept: Kept) -> Session:
        if kept.session is None and self._kept.get(key) is kept:
            kept.session = await self._start(kept.terms)
        if kept.session is None or self._kept.get(key) is not kept:
            if kept.session is not None:
                await kept.session.kill()
            raise ToolFailed("This Python session was deleted.")
        return kept.session

    def _put_back(self, key: Key, kept: Kept) -> None:
        kept.used_at = time.time()
        if kept.session is not None and kept.session.over:
            kept.session = None
            kept.given.clear()
            _log.debug("a Python session ended while it was used")

    def _rest(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is None or kept.users:
            return
        if kept.expiry is not None:
            kept.expiry.cancel()
        loop = asyncio.get_running_loop()
        idle_s = kept.terms.idle_s
        kept.expiry = loop.call_later(idle_s, self.drop, key, f"it was not used for {idle_s / 60:g} minutes")

    def _make_room(self) -> None:
        idle: dict[str, deque[Key]] = {}
        for key, kept in self._kept.items():
            if not kept.users:
                idle.setdefault(key[0], deque()).append(key)
        if not idle:
            raise ToolFailed("All Python sessions of this server are in use; try again later.")
        self.drop(max(idle.values(), key=len)[0], "its place was needed for others")
