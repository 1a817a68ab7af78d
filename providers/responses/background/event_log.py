"""The log of a background response's events: numbered batches in a KVStore, read by whoever wants, live or later.

    TENANT/event/ID/NUMBER       the events from NUMBER on, a line each: the type, a space, the JSON

A batch begins where the one before it ended, so whoever knows the last number knows the key of what comes next.
The log is the truth; being woken is only a hint.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import orjson
from openai.types.responses import ResponseStreamEvent

from apis.errors import InvalidRequest, Overloaded, StoreUnavailable
from apis.events import LoggedEvent
from apis.storage.kv_store import KVStore
from apis.storage.records import delete_all, scan_all

ResultT = TypeVar("ResultT")
TERMINAL_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_FLAT_EVENT_TYPES: Final = frozenset(
    f"response.{name}.delta" for name in ("output_text", "reasoning_text", "function_call_arguments")
)
_PAGE_SIZE: Final = 64
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 0.5
_MAX_OUTAGE_S: Final = 30.0


def event_key(tenant: str, response_id: str, number: int) -> str:
    """Of the batch whose first event has this number."""
    return f"{tenant}/event/{response_id}/{number:08d}"


def encode_event_line(event: ResponseStreamEvent) -> bytes:
    """An event as the log keeps it."""
    model: Any = event
    if event.type in _FLAT_EVENT_TYPES:
        # nearly all events are these; as plain fields they cost a third of what the model's serializer takes
        data = orjson.dumps(model.__dict__, default=_model_to_dict)
    else:
        data = model.__pydantic_serializer__.to_json(model, by_alias=True, exclude_unset=True)
    return b"%b %b\n" % (_encode_event_type(event.type), data)


def decode_batch(batch: bytes) -> list[LoggedEvent]:
    """The events of a batch, in order."""
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


def _model_to_dict(model: Any) -> dict[str, Any]:
    return model.to_dict()


class LogWakeups:
    """Wakes the readers of this process when a log of this process grows, and spares them the look into the store.
    Readers elsewhere poll."""

    def __init__(self) -> None:
        self._wakeups: dict[str, asyncio.Event] = {}
        self._newest_batches: dict[str, tuple[int, bytes]] = {}

    def wake(self, response_id: str, number: int = -1, batch: bytes = b"") -> None:
        """The batch that begins with that number has been written; without one, something else has changed."""
        event = self._wakeups.pop(response_id, None)
        if event is not None:
            if batch:
                self._newest_batches[response_id] = number, batch
            event.set()

    def wake_all(self) -> None:
        for response_id in list(self._wakeups):
            self.wake(response_id)

    def next_wakeup(self, response_id: str) -> asyncio.Event:
        """What the next wake sets: to be asked for before looking, so that no wake is missed."""
        return self._wakeups.setdefault(response_id, asyncio.Event())

    def newest_batch(self, response_id: str, number: int) -> bytes | None:
        """The batch that begins with that number, if it is the one written here last."""
        newest = self._newest_batches.get(response_id)
        return newest[1] if newest is not None and newest[0] == number else None

    def remove_reader(self, response_id: str) -> None:
        """A reader has gone: nothing is kept for others, who look once more."""
        self.wake(response_id)
        self._newest_batches.pop(response_id, None)


class EventLog:
    """Reads the logs of one store."""

    def __init__(self, kv: KVStore, wakeups: LogWakeups, run_key: Callable[[str, str], str]) -> None:
        """`run_key` names the record that is there for as long as a response may still get events."""
        self._kv = kv
        self._wakeups = wakeups
        self._run_key = run_key
        self.is_closing = False
        """Once true, readers are let go: they can go on elsewhere."""

    async def read_all(self, response_id: str, *, tenant: str) -> list[LoggedEvent]:
        """Return all events that are stored."""
        prefix = event_key(tenant, response_id, 0)[:-8]
        rows = scan_all(self._kv, prefix, page_size=_PAGE_SIZE)
        return [event async for _, entry in rows for event in decode_batch(entry.value)]

    async def delete(self, response_id: str, *, tenant: str) -> None:
        await delete_all(self._kv, event_key(tenant, response_id, 0)[:-8], page_size=_PAGE_SIZE)

    async def follow(
        self, response_id: str, starting_after: int, *, tenant: str
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """The events after number `starting_after`, then those to come, until the response is at its end. The first
        batch is empty and says that there is a log.

        Raises InvalidRequest before it, where there is none or it does not reach as far.
        """
        wanted = starting_after + 1
        number = await self._find_first_batch(response_id, wanted, tenant)
        yield ()
        prefix = event_key(tenant, response_id, 0)[:-8]
        after = event_key(tenant, response_id, number - 1) if number else ""
        while rows := await self._retry_during_outage(partial(self._kv.scan, prefix, after=after, limit=_PAGE_SIZE)):
            for after, entry in rows:
                if after != event_key(tenant, response_id, number):
                    return  # the rest is being forgotten
                events = decode_batch(entry.value)
                skip, number = max(0, wanted - number), number + len(events)
                if skip < len(events):
                    yield events[skip:]
                if events[-1].type in TERMINAL_EVENTS:
                    return
        async for events in self._tail(response_id, number, tenant):
            skip, number = max(0, wanted - number), number + len(events)
            if skip < len(events):
                yield events[skip:]

    async def _find_first_batch(self, response_id: str, sequence_number: int, tenant: str) -> int:
        """The number that the batch of event `wanted` begins with, or the last batch if it is still to come."""
        prefix = event_key(tenant, response_id, 0)[:-8]
        bound = event_key(tenant, response_id, sequence_number + 1)
        run = await self._kv.get(self._run_key(tenant, response_id))
        found = await self._kv.scan(prefix, before=bound, limit=1, reverse=True)
        if not found:
            raise InvalidRequest(
                "This response cannot be streamed: it was not made with `background`, or too long ago.",
                param="stream",
                code="unsupported_value",
            )
        key, entry = found[0]
        number = int(key[-8:])
        if run is None and number + len(decode_batch(entry.value)) < sequence_number:
            raise InvalidRequest(
                f"The stream has ended before event {sequence_number - 1}.",
                param="starting_after",
                code="invalid_value",
            )
        return number

    async def _tail(self, response_id: str, number: int, tenant: str) -> AsyncGenerator[list[LoggedEvent]]:
        """Batch after batch from `number` on, as they are written."""
        run_key = self._run_key(tenant, response_id)
        pause_s = _MIN_POLL_S
        try:
            while True:
                if self.is_closing:
                    raise Overloaded("This server is shutting down. Read on from the last event: another one answers.")
                woken = self._wakeups.next_wakeup(response_id)
                batch, run = self._wakeups.newest_batch(response_id, number), None
                if batch is None:
                    keys = (event_key(tenant, response_id, number), run_key)
                    found, run = await self._retry_during_outage(partial(self._kv.get_many, keys))
                    batch = found.value if found is not None else None
                if batch is not None:
                    events = decode_batch(batch)
                    number += len(events)
                    yield events
                    if events[-1].type in TERMINAL_EVENTS:
                        return
                    pause_s = _MIN_POLL_S
                elif run is None:
                    return  # cancelled or deleted: no event tells of that
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await woken.wait()
                    pause_s = min(_MAX_POLL_S, 2 * pause_s)
        finally:
            self._wakeups.remove_reader(response_id)

    async def _retry_during_outage(self, operation: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The store's answer, through an outage if it is short."""
        deadline = time.monotonic() + _MAX_OUTAGE_S
        while True:
            try:
                return await operation()
            except StoreUnavailable:
                if self.is_closing or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_MAX_POLL_S)
