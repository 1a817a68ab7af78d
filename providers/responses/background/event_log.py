"""EventLog: the events of a background response, in a log of the store.

    TENANT/event/ID/NUMBER       a batch of events (providers/common/state/event_logs.py)
    TENANT/event_reader/ID       present once the events of a response that has not ended may have been read

Events without a reader can be taken back, so that a turn whose worker died is run again: a reader is stored before it
reads.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from openai.types.responses import Response

from apis.errors import InvalidRequest
from apis.events import TERMINAL_EVENTS, LoggedEvent, ResponseStreamEvent, event_to_json
from apis.storage.kv_store import ABSENT, Delete, KVStore, Op, Put
from apis.storage.lease import Lease
from apis.storage.records import delete_all, scan_all
from providers.common.state.event_logs import Log, LogReader, LogWakeups, batch_key, decode_batch, encode_line
from providers.responses.store.response_record import run_key

_PAGE_SIZE: Final = 64
"""Batches that one scan reads."""


def event_prefix(tenant: str, response_id: str) -> str:
    """Return the prefix of the keys of a response's log."""
    return f"{tenant}/event/{response_id}/"


def reader_key(tenant: str, response_id: str) -> str:
    """Return the key that is present once the events of a running response may have been read."""
    return f"{tenant}/event_reader/{response_id}"


def encode_event_line(event: ResponseStreamEvent) -> bytes:
    """Return an event as a line of the log."""
    return encode_line(event.type, event_to_json(event))


@dataclass(slots=True)
class NewLog:
    """The log of a run that this process has added: the response in its first events, and its batches until it
    `has_output`. A reader before that, which `is_read` notes, is stored with the first output."""

    response: Response
    batches: list[bytes]
    is_read: bool = False
    has_output: bool = False


class EventLog(LogReader):
    """The logs of one store; events are deleted `ttl_s` after they were written."""

    def __init__(self, kv: KVStore, wakeups: LogWakeups, *, ttl_s: float) -> None:
        super().__init__(kv, wakeups)
        self.ttl_s = ttl_s

    def batch_op(self, tenant: str, response_id: str, number: int, lines: Sequence[bytes]) -> Put:
        """Return the write of a batch whose first event has this number."""
        return Put(batch_key(event_prefix(tenant, response_id), number), b"".join(lines), self.ttl_s)

    def announce(self, tenant: str, response_id: str, ops: Sequence[Op]) -> None:
        """Wake the readers of a log, with the batches among operations that were written."""
        prefix = event_prefix(tenant, response_id)
        batches = [op for op in ops if isinstance(op, Put) and op.key.startswith(prefix)]
        for op in batches:
            self.wakeups.wake(response_id, int(op.key[-8:]), op.value)
        if not batches:
            self.wakeups.wake(response_id)

    async def read_all(self, response_id: str, *, tenant: str) -> list[LoggedEvent]:
        """Return all events of a log that are written."""
        prefix = event_prefix(tenant, response_id)
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
        prefix = event_prefix(tenant, response_id)
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
        await delete_all(self._kv, event_prefix(tenant, response_id), page_size=_PAGE_SIZE)

    async def follow(
        self, response_id: str, starting_after: int, *, tenant: str
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield the events after number `starting_after`, then those to come, until the response has ended. The first
        batch is empty: the log exists.

        Raises InvalidRequest before it where there is no log, or it ended before that number.
        """
        first_number = starting_after + 1
        is_running = await self.add_reader(response_id, tenant=tenant)
        prefix = event_prefix(tenant, response_id)
        batch = await self.find_batch(prefix, first_number)
        if batch is None:
            raise InvalidRequest(
                "This response cannot be streamed: it was not made with `background`, or too long ago.",
                param="stream",
                code="unsupported_value",
            )
        if not is_running and batch[1] < first_number:
            raise InvalidRequest(
                f"The stream has ended before event {starting_after}.",
                param="starting_after",
                code="invalid_value",
            )
        yield ()
        async with aclosing(self.read(_log_of(tenant, response_id), first_number, batch[0])) as batches:
            async for events in batches:
                yield events

    async def follow_new(
        self, new_log: NewLog, response_id: str, *, tenant: str
    ) -> AsyncGenerator[Sequence[LoggedEvent]]:
        """Yield all events of a log without output, as `follow` does, without a read of the store."""
        new_log.is_read = True
        wakeup = self.wakeups.next_wakeup(response_id)
        yield ()
        events = [event for batch in new_log.batches for event in decode_batch(batch)]
        yield events
        async with aclosing(self.tail(_log_of(tenant, response_id), len(events), wakeup)) as batches:
            async for events in batches:
                yield events


def _log_of(tenant: str, response_id: str) -> Log:
    prefix, life_key = event_prefix(tenant, response_id), run_key(tenant, response_id)
    return Log(response_id, prefix, life_key, TERMINAL_EVENTS.__contains__)
