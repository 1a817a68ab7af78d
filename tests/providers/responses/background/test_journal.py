"""When the journal of a background response writes: its first output at once, later output together with its tick."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from openai.types.responses import ResponseTextDeltaEvent

from providers.kv_store.memory import Memory
from providers.responses.background import journal as journal_module
from providers.responses.background.event_log import EventLog, LogWakeups
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
    lease = RunLease(log._kv, REF, LONG_S, LONG_S)  # pyright: ignore[reportPrivateUsage] - the log's own store
    assert await lease.acquire() is not None
    journal = Journal(lease, 2, log)
    writing = asyncio.create_task(journal.run())
    await journal.append([delta()])  # number 2, the last one of the initial events
    await written(log, 1)
    yield journal
    journal.stop()
    await writing


def delta() -> ResponseTextDeltaEvent:
    return ResponseTextDeltaEvent(
        type="response.output_text.delta",
        sequence_number=0,
        item_id="msg_1",
        output_index=0,
        content_index=0,
        delta="x",
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
    await journal.append([delta()])
    await written(log, 2)


async def test_later_output_waits_for_the_tick_or_a_full_batch(
    log: EventLog, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.append([delta()])
    await written(log, 2)
    await journal.append([delta()])
    await asyncio.sleep(0.05)
    assert len(await log.read_all(REF.id, tenant=REF.tenant)) == 2
    monkeypatch.setattr(journal_module, "_BATCH_BYTES", 1)
    await journal.append([delta()])
    await written(log, 4)
