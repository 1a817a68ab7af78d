"""Journal: writes the log of a run that this process holds, and keeps its lease while there is nothing to write."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from openai.types.responses import ResponseStreamEvent

from apis.storage.kv_store import Delete, Op, Put
from providers.responses.background.event_log import Wakers, event_key, write_line
from providers.responses.background.runs import Lease
from providers.responses.run.checkpoint import Step, step_key, write_step
from providers.responses.run.pending_response import number_on

_GATHER_S: Final = 0.05
_GATHER_BYTES: Final = 64 * 1024
_FULL_BYTES: Final = 1024 * 1024
_RENEW_S: Final = 1.0
"""How often the store is told that the run goes on: a cancelled one stops by then."""


class Journal:
    """Numbers events on from `number` and writes them: what is ready every 50 ms or 64 KiB goes in one write. Of the
    run's steps, so many have been noted before."""

    def __init__(self, lease: Lease, number: int, events_ttl_s: float, wakers: Wakers, steps: int = 0) -> None:
        self._lease = lease
        self._ref = lease.ref
        self.number = number
        self._written = number
        self._ttl_s = events_ttl_s
        self._wakers = wakers
        self._lines: list[bytes] = []
        self._bytes = 0
        self._steps = steps
        self._noted: list[Put] = []
        self._step_at = number
        self.calls_run = False
        """Whether calls that must not be broken off have begun at the step."""
        self._some = asyncio.Event()
        self._much = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False

    async def append(self, events: Sequence[ResponseStreamEvent]) -> None:
        """Take events; waits while the store is far behind."""
        self._take(events)
        self._some.set()
        if self._bytes >= _GATHER_BYTES:
            self._much.set()
        while self._bytes >= _FULL_BYTES:
            self._room.clear()
            await self._room.wait()

    def note(self, step: Step) -> None:
        """Take a step that the run has come to."""
        step.events = self._step_at = self.number
        self.calls_run = bool(step.running)
        key = step_key(self._ref.tenant, self._ref.id, self._steps)
        self._noted.append(Put(key, write_step(step), self._ttl_s))
        self._steps += 1
        self._some.set()

    @property
    def at_step(self) -> bool:
        """Whether nothing has been told since a step, from which somebody else can go on."""
        return self.number == self._step_at

    async def run(self) -> None:
        """Write until stopped. Raises LeaseLost."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_S, self._lease.lease_s / 3)):
                    await self._some.wait()
            if self._stopping:
                return
            noted, self._noted = self._noted, []
            op = self._gathered()
            await self._lease.write([op, *noted] if op else noted)
            self._room.set()
            if op is not None:
                self._wakers.wake(self._ref.id, int(op.key[-8:]), op.value)
                # to a tick that all journals share, so that the store can commit their writes together
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER_S - loop.time() % _GATHER_S):
                        await self._much.wait()

    def stop(self) -> None:
        """Let `run` come to its end after the write that it is in."""
        self._stopping = True
        self._some.set()
        self._much.set()

    def rest(self) -> list[Op]:
        """What has not been written yet. `run` must have ended."""
        op = self._gathered()
        return [*([op] if op else []), *self._noted]

    def last(self, events: Sequence[ResponseStreamEvent]) -> list[Op]:
        """What ends the log, with the lease's end: to be written with the response. `run` must have ended."""
        self._take(events)
        op = self._gathered()
        steps = [Delete(step_key(self._ref.tenant, self._ref.id, number)) for number in range(self._steps)]
        return [*([op] if op else []), *steps, *self._lease.end_ops()]

    def _take(self, events: Sequence[ResponseStreamEvent]) -> None:
        self.number = number_on(events, self.number)
        for event in events:
            line = write_line(event)
            self._lines.append(line)
            self._bytes += len(line)

    def _gathered(self) -> Put | None:
        lines, number = self._lines, self._written
        self._lines, self._bytes, self._written = [], 0, self.number
        self._some.clear()
        self._much.clear()
        return Put(event_key(self._ref.tenant, self._ref.id, number), b"".join(lines), self._ttl_s) if lines else None
