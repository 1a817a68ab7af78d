"""Event logs: numbered events in batches in a KVStore, for any number of readers.

    PREFIX/NUMBER       the events from NUMBER on, a line each: the type, a space, the JSON

A batch begins where the one before it ended, so a reader that has the last number knows the key of the next batch. The
store is the truth; a wakeup is only a hint.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from apis.errors import Overloaded, StoreUnavailable
from apis.events import LoggedEvent
from apis.storage.kv_store import KVStore
from apis.storage.records import PAGE_BYTES

ResultT = TypeVar("ResultT")
_PAGE_SIZE: Final = 64
"""Batches that one scan reads."""
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 0.5
"""Seconds between polls of a reader; they double from the first to this one while nothing is written."""
_MAX_OUTAGE_S: Final = 30.0
"""Seconds that a reader waits for an unavailable store before its stream fails."""


def batch_key(prefix: str, number: int) -> str:
    """Return the key of the batch whose first event has this number."""
    return f"{prefix}{number:08d}"


def encode_line(event_type: str, data: bytes) -> bytes:
    """Return an event, whose JSON is `data`, as a line of a log."""
    return b"%b %b\n" % (_encode_event_type(event_type), data)


def decode_batch(batch: bytes) -> list[LoggedEvent]:
    """Return the events of a batch, in order."""
    return [_decode_event(line) for line in batch.split(b"\n")[:-1]]


def _decode_event(line: bytes) -> LoggedEvent:
    name, _, data = line.partition(b" ")
    return LoggedEvent(_decode_event_type(name), data)


@functools.cache
def _encode_event_type(event_type: str) -> bytes:
    return event_type.encode()


@functools.cache
def _decode_event_type(event_type: bytes) -> str:
    return event_type.decode()


class LogWakeups:
    """Wakes the readers of this process when this process writes to a log, and hands them the newest batch, so that
    they need not read the store; and when it no longer writes to it. Readers in other processes poll."""

    def __init__(self) -> None:
        self._wakeups: dict[str, asyncio.Event] = {}
        self._newest_batches: dict[str, tuple[int, bytes]] = {}

    def wake(self, log_id: str, number: int = -1, batch: bytes = b"") -> None:
        """Wake the readers of a log, with the batch that was written and its number, if there is one. A reader that is
        not back from the last wakeup is handed none, so that it looks for all that it missed."""
        event = self._wakeups.pop(log_id, None)
        if event is not None and batch:
            self._newest_batches[log_id] = number, batch
        else:
            self._newest_batches.pop(log_id, None)
        if event is not None:
            event.set()

    def wake_all(self) -> None:
        for log_id in list(self._wakeups):
            self.wake(log_id)

    def next_wakeup(self, log_id: str) -> asyncio.Event:
        """Return the event that the next wakeup sets. Take it before reading the store, so that no wakeup is missed."""
        return self._wakeups.setdefault(log_id, asyncio.Event())

    def newest_batch(self, log_id: str, number: int) -> bytes | None:
        """Return the batch that begins with that number, if it is the newest one of this process."""
        newest = self._newest_batches.get(log_id)
        return newest[1] if newest is not None and newest[0] == number else None

    def remove_reader(self, log_id: str) -> None:
        """Drop the newest batch when a reader ends; other readers read the store once more."""
        self.wake(log_id)


@dataclass(frozen=True, slots=True)
class Log:
    """One log: the id by which its readers are woken, the prefix of its keys, and a key that is present as long as
    events may come. `ends_with` says of a type whether an event of it is the last one. With `has_many_writers`,
    a batch of this process says nothing about who writes the next one."""

    id: str
    prefix: str
    life_key: str
    ends_with: Callable[[str], bool]
    has_many_writers: bool = False


class LogReader:
    """Reads the logs of one store."""

    def __init__(self, kv: KVStore, wakeups: LogWakeups) -> None:
        self._kv = kv
        self.wakeups = wakeups
        self.is_closing = False
        """Once true, the streams of readers end with Overloaded: they can continue on another server."""

    async def find_batch(self, prefix: str, number: int) -> tuple[int, int] | None:
        """Return the numbers of the first event of the batch that holds event `number`, and of the one after its last;
        those of the last batch for an event to come. None if there is no batch before that number."""
        rows = await self._kv.scan(prefix, before=batch_key(prefix, number + 1), limit=1, reverse=True)
        if not rows:
            return None
        key, entry = rows[0]
        first = int(key[-8:])
        return first, first + len(decode_batch(entry.value))

    async def read(self, log: Log, first_number: int, batch_number: int) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events from `first_number` on, which is in the batch that begins with `batch_number` or after it,
        then those to come, until the last one, or until the life key is gone."""
        number = batch_number
        after = batch_key(log.prefix, number - 1) if number else ""
        scan = partial(self._kv.scan, log.prefix, limit=_PAGE_SIZE, max_bytes=PAGE_BYTES)
        while rows := await self._retry_during_outage(partial(scan, after=after)):
            for after, entry in rows:
                if after != batch_key(log.prefix, number):
                    return  # the log is being deleted
                events = decode_batch(entry.value)
                skip, number = max(0, first_number - number), number + len(events)
                if skip < len(events):
                    yield events[skip:]
                if log.ends_with(events[-1].type):
                    return
        async with aclosing(self.tail(log, number)) as batches:
            async for events in batches:
                skip, number = max(0, first_number - number), number + len(events)
                if skip < len(events):
                    yield events[skip:]

    async def tail(
        self, log: Log, number: int, wakeup: asyncio.Event | None = None
    ) -> AsyncGenerator[list[LoggedEvent]]:
        """Yield batch after batch from `number` on, as they are written. With `wakeup`, the one that the caller took
        before, this process writes them."""
        pause_s = _MIN_POLL_S
        is_writer_here = wakeup is not None  # and wakes the reader for the next batch or the end
        wakeup = wakeup or self.wakeups.next_wakeup(log.id)
        try:
            while True:
                if self.is_closing:
                    raise Overloaded("This server is shutting down. Read on from the last event: another one answers.")
                is_woken, wakeup = wakeup.is_set(), self.wakeups.next_wakeup(log.id)
                batch, life = self.wakeups.newest_batch(log.id, number), None
                if batch is not None:
                    is_writer_here = not log.has_many_writers
                elif is_woken or not is_writer_here:
                    is_writer_here = False
                    keys = (batch_key(log.prefix, number), log.life_key)
                    entry, life = await self._retry_during_outage(partial(self._kv.get_many, keys))
                    batch = entry.value if entry is not None else None
                if batch is not None:
                    events = decode_batch(batch)
                    number += len(events)
                    yield events
                    if log.ends_with(events[-1].type):
                        return
                    pause_s = _MIN_POLL_S
                elif is_writer_here:
                    await wakeup.wait()
                elif life is None:
                    return  # cancelled or deleted: the stream ends without an event
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await wakeup.wait()
                    pause_s = min(_MAX_POLL_S, 2 * pause_s)
        finally:
            self.wakeups.remove_reader(log.id)

    async def _retry_during_outage(self, operation: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of a read, which is repeated during a short outage of the store."""
        deadline = time.monotonic() + _MAX_OUTAGE_S
        while True:
            try:
                return await operation()
            except StoreUnavailable:
                if self.is_closing or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_MAX_POLL_S)
