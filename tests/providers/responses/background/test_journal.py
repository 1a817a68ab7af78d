"""When the journal of a background response writes: its first output at once, later output together with its tick."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from openai.types.responses import ResponseTextDeltaEvent

from apis.storage.kv_store import Put
from providers.common.state.event_logs import LogWakeups
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory
from providers.responses.background import journal as journal_module
from providers.responses.background.event_log import EventLog
from providers.responses.background.journal import Journal
from providers.responses.background.runs import ResponseRef, RunLease

REF = ResponseRef("a", "resp_1")
LONG_S = 600.0


@pytest.fixture
async def log(monkeypatch: pytest.MonkeyPatch) -> EventLog:
    """A log whose journals wait for a tick that does not come."""
    monkeypatch.setattr(journal_module, "_BATCH_INTERVAL_S", LONG_S)
    return EventLog(Memory(Memory.Config()), LogWakeups(), ttl_s=LONG_S)


@pytest.fixture
async def journal(log: EventLog) -> AsyncGenerator[Journal]:
    """A journal that has written the initial events."""
    kv = log._kv  # pyright: ignore[reportPrivateUsage] - the log's own store
    lease = RunLease(kv, REF, LONG_S, LONG_S, WorkerSign(kv, LONG_S))
    assert await lease.acquire() is not None
    journal = Journal(lease, 2, log)
    writing = asyncio.create_task(journal.run())
    await journal.put([delta()])  # number 2, the last one of the initial events
    await written(log, 1)
    yield journal
    journal.stop()
    await writing


def delta(text: str = "x") -> ResponseTextDeltaEvent:
    return ResponseTextDeltaEvent(
        type="response.output_text.delta",
        sequence_number=0,
        item_id="msg_1",
        output_index=0,
        content_index=0,
        delta=text,
        logprobs=[],
    )


async def written(log: EventLog, count: int) -> None:
    """Wait until the log holds that many events."""
    async with asyncio.timeout(5):
        while True:
            wakeup = log.wakeups.next_wakeup(REF.id)
            if len(await log.read_all(REF.id, tenant=REF.tenant)) >= count:
                return
            await wakeup.wait()


async def test_the_first_output_does_not_wait_for_the_tick(log: EventLog, journal: Journal) -> None:
    await journal.put([delta()])
    await written(log, 2)


async def test_later_output_waits_for_the_tick_or_a_full_batch(
    log: EventLog, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.put([delta()])
    await written(log, 2)
    await journal.put([delta()])
    await asyncio.sleep(0.05)
    assert len(await log.read_all(REF.id, tenant=REF.tenant)) == 2
    monkeypatch.setattr(journal_module, "_BATCH_BYTES", 1)
    await journal.put([delta()])
    await written(log, 4)


async def test_the_ends_of_a_large_answer_are_no_single_value(log: EventLog, journal: Journal) -> None:
    """The store takes values of 64 MiB, and an answer of 16 is repeated by the events that end it."""
    ops = journal.final_ops([delta("y" * 700_000) for _ in range(4)])
    batches = [op for op in ops if isinstance(op, Put)]
    assert [int(op.key[-8:]) for op in batches] == [3, 4, 5, 6]
    assert max(len(op.value) for op in batches) < 1024 * 1024
    await log._kv.write(batches)  # pyright: ignore[reportPrivateUsage] - the log's own store
    assert len(await log.read_all(REF.id, tenant=REF.tenant)) == 5
