"""Readers of the log of a background response: in the process that writes it, and in others."""

import asyncio
from collections.abc import Sequence

from apis.storage.kv_store import Delete, Entry, Put
from providers.common.state.event_logs import LogWakeups
from providers.kv_store.memory import Memory
from providers.responses.background.event_log import EventLog
from providers.responses.store.response_record import run_key

ID = "resp_1"
TENANT = "a"


class CountingStore(Memory):
    reads = 0

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        self.reads += 1
        return await super().get_many(keys)


class Writer:
    """Writes batches of events as a run does; its process is that of the readers only if it `wakes` them."""

    def __init__(self, store: Memory, log: EventLog) -> None:
        self._store = store
        self._log = log
        self._next = 0

    async def write(self, count: int = 2, *, wakes: bool = True, kind: str = "response.output_text.delta") -> None:
        lines = [b'%b {"sequence_number":%d}\n' % (kind.encode(), self._next + n) for n in range(count)]
        op = self._log.batch_op(TENANT, ID, self._next, lines)
        await self._store.write([op])
        if wakes:
            self._log.wakeups.wake(ID, self._next, op.value)
        self._next += count

    async def end(self, *, wakes: bool = True) -> None:
        await self.write(1, wakes=wakes, kind="response.completed")
        await self._store.write([Delete(run_key(TENANT, ID))])


async def opened() -> tuple[CountingStore, EventLog, Writer]:
    store = CountingStore(CountingStore.Config())
    await store.write([Put(run_key(TENANT, ID), b"{}")])
    log = EventLog(store, LogWakeups(), ttl_s=60)
    writer = Writer(store, log)
    await writer.write(2)
    return store, log, writer


async def read(log: EventLog, numbers: list[int], pause_s: float = 0.0) -> None:
    async for events in log.follow(ID, -1, tenant=TENANT):
        numbers += [int(event.data.rpartition(b":")[2][:-1]) for event in events]
        await asyncio.sleep(pause_s)


async def started(log: EventLog) -> tuple[list[int], asyncio.Task[None]]:
    """A reader that has caught up: the numbers of the events that it has read, and its task."""
    numbers: list[int] = []
    reading = asyncio.create_task(read(log, numbers))
    await asyncio.sleep(0.01)
    return numbers, reading


async def test_a_reader_in_the_process_that_writes_reads_the_store_only_at_the_beginning() -> None:
    store, log, writer = await opened()
    numbers, reading = await started(log)
    at_the_beginning = store.reads
    for _ in range(10):
        await writer.write()
        await asyncio.sleep(0.01)
    assert store.reads <= at_the_beginning + 1
    await writer.end()
    await asyncio.wait_for(reading, 1)
    assert numbers == [*range(23)]


async def test_a_slow_reader_misses_nothing_and_waits_for_nothing_that_is_written() -> None:
    _, log, writer = await opened()
    numbers: list[int] = []
    reading = asyncio.create_task(read(log, numbers, pause_s=0.02))
    await asyncio.sleep(0.05)
    await writer.write()
    await asyncio.sleep(0.01)  # the reader has that batch, and is not back yet
    for _ in range(5):  # it is handed the newest alone
        await writer.write()
    await asyncio.sleep(0.3)  # less than a reader waits that expects to be woken
    assert numbers == [*range(14)]
    await writer.end()
    await asyncio.wait_for(reading, 1)
    assert numbers == [*range(15)]


async def test_a_reader_goes_on_when_the_run_moves_to_another_process() -> None:
    _, log, writer = await opened()
    numbers, reading = await started(log)
    await writer.write()
    await asyncio.sleep(0.01)
    log.wakeups.wake(ID)  # as this process does when it no longer executes the run
    await asyncio.sleep(0.01)
    await writer.write(wakes=False)
    await asyncio.sleep(0.7)
    assert numbers == [*range(6)]
    await writer.write()  # and back
    await asyncio.sleep(0.01)
    assert numbers == [*range(8)]
    log.wakeups.wake(ID)
    await writer.end(wakes=False)
    await asyncio.wait_for(reading, 1)
    assert numbers == [*range(9)]


async def test_a_reader_ends_when_another_process_cancels_the_response() -> None:
    store, log, writer = await opened()
    numbers, reading = await started(log)
    await writer.write()
    await asyncio.sleep(0.01)
    await store.write([Delete(run_key(TENANT, ID))])
    log.wakeups.wake(ID)  # the lease is lost, so this process stops
    await asyncio.wait_for(reading, 1)
    assert numbers == [*range(4)]


async def test_readers_of_one_log_do_not_disturb_each_other() -> None:
    _, log, writer = await opened()
    fast, slow, short = list[int](), list[int](), list[int]()
    readings = [asyncio.create_task(read(log, numbers, pause_s)) for numbers, pause_s in ((fast, 0), (slow, 0.02))]
    leaving = asyncio.create_task(read(log, short))
    for number in range(20):
        await writer.write()
        if number == 5:
            leaving.cancel()
        await asyncio.sleep(0.01)
    await writer.end()
    await asyncio.wait_for(asyncio.gather(*readings), 5)
    assert fast == slow == [*range(43)]
    assert short == [*range(len(short))]
