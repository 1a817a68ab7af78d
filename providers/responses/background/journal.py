"""Journal: writes the log of a run that this process holds, and keeps its lease while there is nothing to write."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from openai.types.responses import ResponseStreamEvent

from apis.storage.kv_store import Delete, Op, Put
from providers.responses.background.event_log import LogWakeups, encode_event_line, event_key
from providers.responses.background.runs import RunLease
from providers.responses.run.checkpoint import Checkpoint, checkpoint_key, encode_checkpoint
from providers.responses.run.pending_response import assign_sequence_numbers

_BATCH_INTERVAL_S: Final = 0.05
_BATCH_BYTES: Final = 64 * 1024
_MAX_BUFFERED_BYTES: Final = 1024 * 1024
_RENEW_INTERVAL_S: Final = 1.0
"""How often the store is told that the run goes on: a cancelled one stops by then."""


class Journal:
    """Numbers events on from `number` and writes them: what is ready every 50 ms or 64 KiB goes in one write. Of the
    run's steps, so many have been noted before."""

    def __init__(
        self, lease: RunLease, next_number: int, events_ttl_s: float, wakeups: LogWakeups, checkpoint_count: int = 0
    ) -> None:
        self._lease = lease
        self._ref = lease.ref
        self.next_number = next_number
        self._next_unwritten = next_number
        self._ttl_s = events_ttl_s
        self._wakeups = wakeups
        self._lines: list[bytes] = []
        self._buffered_bytes = 0
        self._checkpoint_count = checkpoint_count
        self._checkpoint_ops: list[Put] = []
        self._checkpoint_number = next_number
        self.is_running_calls = False
        """Whether calls that must not be broken off have begun at the step."""
        self._has_data = asyncio.Event()
        self._has_full_batch = asyncio.Event()
        self._has_space = asyncio.Event()
        self._is_stopping = False

    async def append(self, events: Sequence[ResponseStreamEvent]) -> None:
        """Take events; waits while the store is far behind."""
        self._buffer_events(events)
        self._has_data.set()
        if self._buffered_bytes >= _BATCH_BYTES:
            self._has_full_batch.set()
        while self._buffered_bytes >= _MAX_BUFFERED_BYTES:
            self._has_space.clear()
            await self._has_space.wait()

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a step that the run has come to."""
        checkpoint.event_count = self._checkpoint_number = self.next_number
        self.is_running_calls = bool(checkpoint.running_indexes)
        key = checkpoint_key(self._ref.tenant, self._ref.id, self._checkpoint_count)
        self._checkpoint_ops.append(Put(key, encode_checkpoint(checkpoint), self._ttl_s))
        self._checkpoint_count += 1
        self._has_data.set()

    @property
    def is_at_checkpoint(self) -> bool:
        """Whether nothing has been told since a step, from which somebody else can go on."""
        return self.next_number == self._checkpoint_number

    async def run(self) -> None:
        """Write until stopped. Raises LeaseLost."""
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_INTERVAL_S, self._lease.lease_s / 3)):
                    await self._has_data.wait()
            if self._is_stopping:
                return
            noted, self._checkpoint_ops = self._checkpoint_ops, []
            op = self._take_batch()
            await self._lease.write([op, *noted] if op else noted)
            self._has_space.set()
            if op is not None:
                self._wakeups.wake(self._ref.id, int(op.key[-8:]), op.value)
                # to a tick that all journals share, so that the store can commit their writes together
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BATCH_INTERVAL_S - loop.time() % _BATCH_INTERVAL_S):
                        await self._has_full_batch.wait()

    def stop(self) -> None:
        """Let `run` come to its end after the write that it is in."""
        self._is_stopping = True
        self._has_data.set()
        self._has_full_batch.set()

    def remaining_ops(self) -> list[Op]:
        """What has not been written yet. `run` must have ended."""
        op = self._take_batch()
        return [*([op] if op else []), *self._checkpoint_ops]

    def final_ops(self, events: Sequence[ResponseStreamEvent]) -> list[Op]:
        """What ends the log, with the lease's end: to be written with the response. `run` must have ended."""
        self._buffer_events(events)
        op = self._take_batch()
        steps = [
            Delete(checkpoint_key(self._ref.tenant, self._ref.id, number)) for number in range(self._checkpoint_count)
        ]
        return [*([op] if op else []), *steps, *self._lease.end_ops()]

    def _buffer_events(self, events: Sequence[ResponseStreamEvent]) -> None:
        self.next_number = assign_sequence_numbers(events, self.next_number)
        for event in events:
            line = encode_event_line(event)
            self._lines.append(line)
            self._buffered_bytes += len(line)

    def _take_batch(self) -> Put | None:
        lines, number = self._lines, self._next_unwritten
        self._lines, self._buffered_bytes, self._next_unwritten = [], 0, self.next_number
        self._has_data.clear()
        self._has_full_batch.clear()
        return Put(event_key(self._ref.tenant, self._ref.id, number), b"".join(lines), self._ttl_s) if lines else None
