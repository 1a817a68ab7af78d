"""Batches that end the processes which validate or finish them."""

import asyncio
import time
from typing import Any, cast

from apis.batches.batches import LineExecutor
from apis.batches.spare_capacity import SpareCapacity
from apis.fair_share import FairShare
from apis.storage.kv_store import Put
from providers.batches.control import BatchControl
from providers.batches.execution import LineGate
from providers.batches.records import BatchRef, BatchState, new_batch_ref
from providers.common.state.worker_signs import WorkerSign
from tests.support.sdk.batch_files import batch_line, read_results, upload_lines, wait_for_end
from tests.support.servers.serving import Served, serving

MORE: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05, "lease_s": 0.5}}


async def add_batch(served: Served, *lost: str, **fields: Any) -> BatchRef:
    """Store a batch of one line as a process left it that ended."""
    file_id = await upload_lines(served.client, [batch_line("one")])
    ref, now = new_batch_ref("default"), int(time.time())
    lives: dict[str, Any] = {"controller": "ended", "lost_controllers": [*lost], **fields}
    record = BatchState(file_id, "/v1/responses", "24h", now, now + 86_400, **lives)
    await served.stack.kv_store.write([ref.put(record, 0), Put(ref.active_key, b"")])
    return ref


async def store_batch(served: Served, *lost: str, **fields: Any) -> Any:
    """Store a batch of one line as a process left it that ended; return it at its end."""
    ref = await add_batch(served, *lost, **fields)
    return await wait_for_end(served.client, await served.client.batches.retrieve(ref.id))


async def test_a_batch_that_ends_each_process_which_validates_it_fails() -> None:
    """S1: the steps of a batch as a whole are counted in the store before they begin, as its lines are."""
    async with serving(more=MORE) as served:
        batch = await store_batch(served, "first", "second")
        assert batch.status == "failed"
        assert [error.code for error in batch.errors.data] == ["worker_lost"]
        batch = await store_batch(served, "first")
        assert batch.status == "completed"
        assert [line["custom_id"] for line in await read_results(served.client, batch.output_file_id)] == ["one"]


async def test_a_batch_that_ends_each_process_which_writes_its_files_fails() -> None:
    """S1: as one that is validated does."""
    async with serving(more=MORE) as served:
        batch = await store_batch(served, "first", "second", status="finalizing", total=1)
        assert batch.status == "failed"
        assert not await served.stack.kv_store.scan("/batch_active/")


async def test_a_batch_whose_slow_processes_live_goes_on() -> None:
    """S1: a process that did not renew its lease in time, and lives, has not been ended by the batch."""
    async with serving(more=MORE) as served:
        slow = WorkerSign(served.stack.kv_store, 0.5, name="slow")
        slow.start()
        batch = await store_batch(served, "slow", "second")
        await slow.close()
        assert batch.status == "completed"


async def test_the_last_process_that_a_batch_may_cost_does_nothing_else_that_may_end_it() -> None:
    """S1: else a batch would fail for a background response that ends processes."""
    async with serving(more={"files": MORE["files"]}) as served:
        kv, events = served.stack.kv_store, served.stack.responses.event_queue()
        assert served.stack.files is not None
        sign = WorkerSign(kv, 0.5, name="present")
        limits: dict[str, Any] = {"lease_s": 10, "max_line_bytes": 10_000}
        control = BatchControl(kv, served.stack.files, served.stack.inference, events, sign, **limits)
        capacity, suspects = SpareCapacity(FairShare("lines", 4), lambda: 0, busy_places=1), {"response"}
        capacity.isolate_from(suspects)
        gate = LineGate(capacity, cast("LineExecutor", None))
        first, last = await add_batch(served), await add_batch(served, "first")
        assert await control.advance(first, gate)
        advancing = asyncio.create_task(control.advance(last, gate))
        await asyncio.sleep(0.2)
        # it waits, and has not begun: were this process to end, the batch would not be blamed
        waiting = await control.load(last)
        assert waiting is not None
        assert (waiting[0].status, waiting[0].controller) == ("validating", "ended")
        suspects.clear()
        assert await advancing
        validated = await control.load(last)
        assert validated is not None
        assert validated[0].status == "in_progress"
