"""Journal: writes the log of a run that this process executes, and renews its lease while nothing is written."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from apis.events import INITIAL_EVENT_COUNT, ResponseStreamEvent
from apis.sink import Sink
from apis.storage.kv_store import ABSENT, Delete, Op, Put
from apis.ticks import wait_for_tick
from providers.responses.background.event_log import EventLog, NewLog, encode_event_line
from providers.responses.background.runs import RunLease
from providers.responses.events.response_events import assign_sequence_numbers
from providers.responses.run.checkpoint import Checkpoint, checkpoint_key, encode_checkpoint
from providers.responses.run.mailbox import mailbox_key

_BATCH_INTERVAL_S: Final = 0.1
"""Seconds between writes; events of this time share one. The first output is written at once."""
_BATCH_BYTES: Final = 64 * 1024
"""Bytes of events that are written at once, without waiting for the interval."""
_MAX_BUFFERED_BYTES: Final = 1024 * 1024
"""Bytes of unwritten events above which the model's stream waits for the store."""
_MAX_BATCH_BYTES: Final = 1024 * 1024
"""Bytes of one batch, which holds more only where a single event has more."""
_RENEW_INTERVAL_S: Final = 1.0
"""Longest time in seconds between two writes: a run that was cancelled elsewhere stops by then."""


class Journal(Sink[ResponseStreamEvent]):
    """Numbers events from `next_number` on and writes them in batches, together with the checkpoints of the run, of
    which `checkpoint_count` have been written before. `on_mail` is called once, when input for the response is in its
    mailbox. That the `new_log` is read is written with its first output."""

    def __init__(
        self,
        lease: RunLease,
        next_number: int,
        event_log: EventLog,
        checkpoint_count: int = 0,
        on_mail: Callable[[], None] = lambda: None,
        new_log: NewLog | None = None,
    ) -> None:
        self._lease = lease
        self._ref = lease.ref
        self._event_log = event_log
        self.next_number = next_number
        self._next_unwritten = next_number
        self._lines: list[bytes] = []
        self._buffered_bytes = 0
        self._checkpoint_count = checkpoint_count
        self._checkpoint_ops: list[Put] = []
        self._checkpoint_number = next_number
        self.is_running_calls = False
        """Hosted calls, which must not be interrupted, have started at the newest checkpoint."""
        self._is_write_due = asyncio.Event()
        """There is something to write, or the lease is to be renewed."""
        if next_number > INITIAL_EVENT_COUNT:  # input may have come before this worker
            self._is_write_due.set()
        self._is_pause_over = asyncio.Event()
        """The batch is full, or its tick has come."""
        self._has_space = asyncio.Event()
        self._is_stopping = False
        self._on_mail = on_mail
        self._new_log = new_log
        self.has_mail = False

    async def ready(self) -> None:
        """Wait while the store is too slow for the buffer."""
        while self._buffered_bytes >= _MAX_BUFFERED_BYTES:
            self._has_space.clear()
            await self._has_space.wait()

    def write(self, batch: Sequence[ResponseStreamEvent]) -> bool:
        """Number events and buffer them; return true while there is room for more."""
        self._buffer_events(batch)
        self._is_write_due.set()
        if self._buffered_bytes >= _BATCH_BYTES:
            self._is_pause_over.set()
        return self._buffered_bytes < _MAX_BUFFERED_BYTES

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Buffer a checkpoint; it counts the events before it."""
        checkpoint = msgspec.structs.replace(checkpoint, event_count=self.next_number)
        self._checkpoint_number = self.next_number
        self.is_running_calls = bool(checkpoint.running_indexes)
        key = checkpoint_key(self._ref.tenant, self._ref.id, self._checkpoint_count)
        self._checkpoint_ops.append(Put(key, encode_checkpoint(checkpoint), self._event_log.ttl_s))
        self._checkpoint_count += 1
        self._is_write_due.set()

    @property
    def is_at_checkpoint(self) -> bool:
        """No event has been added since the newest checkpoint, so that another worker can resume from it."""
        return self.next_number == self._checkpoint_number

    async def run(self) -> None:
        """Write until stopped. Raises LeaseLost."""
        while not self._is_stopping:
            await wait_for_tick(self._is_write_due, min(_RENEW_INTERVAL_S, self._lease.lease_s / 3))
            if self._is_stopping:
                return
            checkpoint_ops, self._checkpoint_ops = self._checkpoint_ops, []
            batches = self._take_batches()
            await self._write([*batches, *checkpoint_ops, *self._mark_reader()])
            self._has_space.set()
            if self._new_log is not None and not self._new_log.has_output:
                self._new_log.batches += [op.value for op in batches]
            if batches:
                self._event_log.announce(self._ref.tenant, self._ref.id, batches)
            if batches and self._next_unwritten > INITIAL_EVENT_COUNT:  # else the next batch is the first output
                # all journals share the tick, so that the store can commit their writes together
                await wait_for_tick(self._is_pause_over, _BATCH_INTERVAL_S)

    def _mark_reader(self) -> Sequence[Op]:
        """Return the write that comes with the first output of a new log, if that is read."""
        log = self._new_log
        if log is None or log.has_output or self._next_unwritten <= INITIAL_EVENT_COUNT:
            return ()
        log.has_output = True
        return [self._event_log.reader_op(self._ref.tenant, self._ref.id)] if log.is_read else ()

    def note_mail(self) -> None:
        """Take note that input for the response is in its mailbox."""
        if not self.has_mail:
            self.has_mail = True
            self._on_mail()

    async def _write(self, ops: Sequence[Op]) -> None:
        """Write as the holder of the lease, on the condition that the mailbox is empty as long as none came: so that
        input which another process stored is noticed without a read."""
        no_mail = Delete(mailbox_key(self._ref.tenant, self._ref.id), ABSENT)
        if self.has_mail or not await self._lease.write([*ops, no_mail]):
            self.note_mail()
            await self._lease.write(ops)

    def stop(self) -> None:
        """Let `run` end after its current write."""
        self._is_stopping = True
        self._is_write_due.set()
        self._is_pause_over.set()

    def remaining_ops(self) -> list[Op]:
        """Return the writes that are still missing. `run` must have ended."""
        return [*self._take_batches(), *self._checkpoint_ops, *self._mark_reader()]

    def final_ops(self, events: Sequence[ResponseStreamEvent]) -> list[Op]:
        """Return the writes that end the log and the lease; they belong in the write of the response. `run` must have
        ended."""
        self._buffer_events(events)
        deletes = [
            Delete(checkpoint_key(self._ref.tenant, self._ref.id, number)) for number in range(self._checkpoint_count)
        ]
        if self._new_log is not None:
            self._new_log.has_output = True  # nothing of a run that has ended is taken back
        return [*self._take_batches(), *deletes, *self._lease.end_ops()]

    def _buffer_events(self, events: Sequence[ResponseStreamEvent]) -> None:
        self.next_number = assign_sequence_numbers(events, self.next_number)
        for event in events:
            line = encode_event_line(event)
            self._lines.append(line)
            self._buffered_bytes += len(line)

    def _take_batches(self) -> list[Put]:
        """Return the writes of the buffered events, in one batch unless they are large: the ends of an answer of many
        megabytes repeat it several times."""
        lines, number = self._lines, self._next_unwritten
        self._lines, self._buffered_bytes, self._next_unwritten = [], 0, self.next_number
        self._is_write_due.clear()
        self._is_pause_over.clear()
        batches: list[Put] = []
        batch: list[bytes] = []
        size = 0
        for line in lines:
            if batch and size + len(line) > _MAX_BATCH_BYTES:
                batches.append(self._batch_op(number, batch))
                number, batch, size = number + len(batch), [], 0
            batch.append(line)
            size += len(line)
        return [*batches, self._batch_op(number, batch)] if batch else batches

    def _batch_op(self, number: int, lines: Sequence[bytes]) -> Put:
        return self._event_log.batch_op(self._ref.tenant, self._ref.id, number, lines)
