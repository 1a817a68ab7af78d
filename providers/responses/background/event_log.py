"""EventLog: the events of a background response as numbered batches in a KVStore, for any number of readers.

    TENANT/event/ID/NUMBER       the events from NUMBER on, a line each: the type, a space, the JSON
    TENANT/event_reader/ID       present once the events of a response that has not ended may have been read

A batch begins where the one before it ended, so a reader that has the last number knows the key of the next batch. The
store is the truth; a wakeup is only a hint. Events without a reader can be taken back, so that a turn whose worker died
is run again: a reader is stored before it reads.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from openai.types.responses import ResponseStreamEvent

from apis.errors import InvalidRequest, Overloaded, StoreUnavailable
from apis.events import TERMINAL_EVENTS, LoggedEvent, event_to_json
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.lease import Lease
from apis.storage.records import PAGE_BYTES, delete_all, scan_all
from providers.responses.store.history_keys import run_key

ResultT = TypeVar("ResultT")
_PAGE_SIZE: Final = 64
"""Batches that one scan reads."""
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 0.5
"""Seconds between polls of a reader; they double from the first to this one while nothing is written."""
_MAX_OUTAGE_S: Final = 30.0
"""Seconds that a reader waits for an unavailable store before its stream fails."""


def event_key(tenant: str, response_id: str, number: int) -> str:
    """Return the key of the batch whose first event has this number."""
    return f"{tenant}/event/{response_id}/{number:08d}"


def reader_key(tenant: str, response_id: str) -> str:
    """Return the key that is present once the events of a running response may have been read."""
    return f"{tenant}/event_reader/{response_id}"


def encode_event_line(event: ResponseStreamEvent) -> bytes:
    """Return an event as a line of the log."""
    return b"%b %b\n" % (_encode_event_type(event.type), event_to_json(event))


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
    they need not read the store; and when it no longer executes the run. Readers in other processes poll."""

    def __init__(self) -> None:
        self._wakeups: dict[str, asyncio.Event] = {}
        self._newest_batches: dict[str, tuple[int, bytes]] = {}

    def wake(self, response_id: str, number: int = -1, batch: bytes = b"") -> None:
        """Wake the readers of a log, with the batch that was written and its number, if there is one. A reader that is
        not back from the last wakeup is handed none, so that it looks for all that it missed."""
        event = self._wakeups.pop(response_id, None)
        if event is not None and batch:
            self._newest_batches[response_id] = number, batch
        else:
            self._newest_batches.pop(response_id, None)
        if event is not None:
            event.set()

    def wake_all(self) -> None:
        for response_id in list(self._wakeups):
            self.wake(response_id)

    def next_wakeup(self, response_id: str) -> asyncio.Event:
        """Return the event that the next wakeup sets. Take it before reading the store, so that no wakeup is missed."""
        return self._wakeups.setdefault(response_id, asyncio.Event())

    def newest_batch(self, response_id: str, number: int) -> bytes | None:
        """Return the batch that begins with that number, if it is the newest one of this process."""
        newest = self._newest_batches.get(response_id)
        return newest[1] if newest is not None and newest[0] == number else None

    def remove_reader(self, response_id: str) -> None:
        """Drop the newest batch when a reader ends; other readers read the store once more."""
        self.wake(response_id)


class EventLog:
    """The logs of one store; events are deleted `ttl_s` after they were written."""

    def __init__(self, kv: KVStore, wakeups: LogWakeups, *, ttl_s: float) -> None:
        self._kv = kv
        self.wakeups = wakeups
        self.ttl_s = ttl_s
        self.is_closing = False
        """Once true, the streams of readers end with Overloaded: they can continue on another server."""

    def batch_op(self, tenant: str, response_id: str, number: int, lines: Sequence[bytes]) -> Put:
        """Return the write of a batch whose first event has this number."""
        return Put(event_key(tenant, response_id, number), b"".join(lines), self.ttl_s)

    async def read_all(self, response_id: str, *, tenant: str) -> list[LoggedEvent]:
        """Return all events of a log that are written."""
        prefix = event_key(tenant, response_id, 0)[:-8]
        rows = scan_all(self._kv, prefix, page_size=_PAGE_SIZE)
        return [event async for _, entry in rows for event in decode_batch(entry.value)]

    def reader_op(self, tenant: str, response_id: str) -> Put:
        """Return the write that comes before the events of a running response are read."""
        return Put(reader_key(tenant, response_id), b"", self.ttl_s)

    async def add_reader(self, response_id: str, *, tenant: str) -> bool:
        """Store that events may be read from now on, unless the response has ended; return whether it has not."""
        if await self._kv.get(run_key(tenant, response_id)) is None:
            return False
        await self._kv.write([self.reader_op(tenant, response_id)])
        return True

    async def has_reader(self, response_id: str, *, tenant: str) -> bool:
        """Return whether events of the response may have been read before it ended."""
        return await self._kv.get(reader_key(tenant, response_id)) is not None

    async def rewind(self, lease: Lease, response_id: str, keep: int, *, tenant: str) -> bool:
        """Delete all events but the first `keep`, as the holder of the lease of the run; return False, and delete no
        more of them, if they may have been read. Raises LeaseLost."""
        prefix = event_key(tenant, response_id, 0)[:-8]
        unread = Delete(reader_key(tenant, response_id), ABSENT)
        while rows := await self._kv.scan(prefix, limit=_PAGE_SIZE, reverse=True):  # what is left is a whole log
            ops: list[Op] = []
            for key, entry in rows:
                number, lines = int(key[-8:]), entry.value.split(b"\n")[:-1]
                if number >= keep:
                    ops.append(Delete(key))
                elif number + len(lines) > keep:
                    ops.append(
                        self.batch_op(tenant, response_id, number, [b"%b\n" % each for each in lines[: keep - number]])
                    )
            if not ops:
                return True
            if not await lease.write([*ops, unread]):
                return False
        return True

    async def delete(self, response_id: str, *, tenant: str) -> None:
        await self._kv.write([Delete(reader_key(tenant, response_id))], durable=False)
        await delete_all(self._kv, event_key(tenant, response_id, 0)[:-8], page_size=_PAGE_SIZE)

    async def follow(
        self, response_id: str, starting_after: int, *, tenant: str
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events after number `starting_after`, then those to come, until the response has ended. The first
        batch is empty: the log exists.

        Raises InvalidRequest before it where there is no log, or it ended before that number.
        """
        first_number = starting_after + 1
        is_running = await self.add_reader(response_id, tenant=tenant)
        number = await self._find_first_batch(response_id, first_number, tenant, is_running=is_running)
        yield ()
        prefix = event_key(tenant, response_id, 0)[:-8]
        after = event_key(tenant, response_id, number - 1) if number else ""
        scan = partial(self._kv.scan, prefix, limit=_PAGE_SIZE, max_bytes=PAGE_BYTES)
        while rows := await self._retry_during_outage(partial(scan, after=after)):
            for after, entry in rows:
                if after != event_key(tenant, response_id, number):
                    return  # the log is being deleted
                events = decode_batch(entry.value)
                skip, number = max(0, first_number - number), number + len(events)
                if skip < len(events):
                    yield events[skip:]
                if events[-1].type in TERMINAL_EVENTS:
                    return
        async for events in self._tail(response_id, number, tenant):
            skip, number = max(0, first_number - number), number + len(events)
            if skip < len(events):
                yield events[skip:]

    async def _find_first_batch(self, response_id: str, sequence_number: int, tenant: str, *, is_running: bool) -> int:
        """Return the number that the batch of this event begins with; that of the last batch for an event to come."""
        prefix = event_key(tenant, response_id, 0)[:-8]
        bound = event_key(tenant, response_id, sequence_number + 1)
        rows = await self._kv.scan(prefix, before=bound, limit=1, reverse=True)
        if not rows:
            raise InvalidRequest(
                "This response cannot be streamed: it was not made with `background`, or too long ago.",
                param="stream",
                code="unsupported_value",
            )
        key, entry = rows[0]
        number = int(key[-8:])
        if not is_running and number + len(decode_batch(entry.value)) < sequence_number:
            raise InvalidRequest(
                f"The stream has ended before event {sequence_number - 1}.",
                param="starting_after",
                code="invalid_value",
            )
        return number

    async def _tail(self, response_id: str, number: int, tenant: str) -> AsyncGenerator[list[LoggedEvent]]:
        """Yield batch after batch from `number` on, as they are written."""
        key_of_run = run_key(tenant, response_id)
        pause_s = _MIN_POLL_S
        wakeup = self.wakeups.next_wakeup(response_id)
        is_writer_here = False  # this process wrote the last batch, and wakes the reader for the next one or the end
        try:
            while True:
                if self.is_closing:
                    raise Overloaded("This server is shutting down. Read on from the last event: another one answers.")
                is_woken, wakeup = wakeup.is_set(), self.wakeups.next_wakeup(response_id)
                batch, run = self.wakeups.newest_batch(response_id, number), None
                if batch is not None:
                    is_writer_here = True
                elif is_woken or not is_writer_here:
                    is_writer_here = False
                    keys = (event_key(tenant, response_id, number), key_of_run)
                    entry, run = await self._retry_during_outage(partial(self._kv.get_many, keys))
                    batch = entry.value if entry is not None else None
                if batch is not None:
                    events = decode_batch(batch)
                    number += len(events)
                    yield events
                    if events[-1].type in TERMINAL_EVENTS:
                        return
                    pause_s = _MIN_POLL_S
                elif is_writer_here:
                    await wakeup.wait()
                elif run is None:
                    return  # cancelled or deleted: the stream ends without an event
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await wakeup.wait()
                    pause_s = min(_MAX_POLL_S, 2 * pause_s)
        finally:
            self.wakeups.remove_reader(response_id)

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
