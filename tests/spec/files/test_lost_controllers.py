"""Batches that end the processes which validate or finish them."""

import asyncio
import time
from typing import Any, cast

from apis.batches.batches import LineExecutor
from apis.batches.spare_capacity import SpareCapacity
from apis.fair_share import FairShare
from apis.storage.kv_store import Put
from apis.storage.records import decode_record, encode_record
from providers.batches.control import BatchControl
from providers.batches.execution import LineGate
from providers.batches.records import BatchRef, BatchState, new_batch_ref
from providers.batches.workers import ControlQueue
from providers.common.jobs import Job, JobRecord, LeasedJobs
from providers.common.state.worker_signs import WorkerSign
from tests.support.sdk.batch_files import batch_line, read_results, upload_lines, wait_for_end
from tests.support.servers.serving import Served, serving

MORE: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05, "lease_s": 0.5}}


async def add_batch(served: Served, *lost: str, **fields: Any) -> BatchRef:
    """Store a batch of one line as a process left it that ended."""
    file_id = await upload_lines(served.client, [batch_line("one")])
    ref, now = new_batch_ref("default"), int(time.time())
    record = BatchState(file_id, "/v1/responses", "24h", now, now + 86_400, **fields)
    job = JobRecord(len(lost) + 1, 0, [*lost, "ended"])
    await served.stack.kv_store.write([ref.put(record, 0), Put(ref.active_key, encode_record(job))])
    return ref


async def store_batch(served: Served, *lost: str, **fields: Any) -> Any:
    """Store a batch of one line as a process left it that ended; return it at its end."""
    ref = await add_batch(served, *lost, **fields)
    return await wait_for_end(served.client, await served.client.batches.retrieve(ref.id))


async def test_a_batch_that_ends_each_process_which_validates_it_fails() -> None:
    """The steps of a batch as a whole are counted in the store before they begin, as its lines are."""
    async with serving(more=MORE) as served:
        batch = await store_batch(served, "first", "second")
        assert batch.status == "failed"
        assert [error.code for error in batch.errors.data] == ["worker_lost"]
        batch = await store_batch(served, "first")
        assert batch.status == "completed"
        assert [line["custom_id"] for line in await read_results(served.client, batch.output_file_id)] == ["one"]


async def test_a_batch_that_ends_each_process_which_writes_its_files_fails() -> None:
    """A batch that is being validated fails in the same way."""
    async with serving(more=MORE) as served:
        batch = await store_batch(served, "first", "second", status="finalizing", total=1)
        assert batch.status == "failed"
        assert not await served.stack.kv_store.scan("/batch_active/")


async def test_a_batch_whose_slow_processes_live_goes_on() -> None:
    """A process that did not renew its lease in time, and lives, has not been ended by the batch."""
    async with serving(more=MORE) as served:
        slow = WorkerSign(served.stack.kv_store, 0.5, name="slow")
        slow.start()
        batch = await store_batch(served, "slow", "second")
        await slow.close()
        assert batch.status == "completed"


async def test_the_last_process_that_a_batch_may_cost_does_nothing_else_that_may_end_it() -> None:
    """Else a batch would fail for a background response that ends processes."""
    async with serving(more={"files": MORE["files"]}) as served:
        kv, webhooks = served.stack.kv_store, served.stack.webhooks
        assert served.stack.files is not None
        sign = WorkerSign(kv, 0.5, name="present")
        control = BatchControl(kv, served.stack.files, served.stack.inference, webhooks, max_line_bytes=10_000)
        capacity, suspects = SpareCapacity(FairShare("lines", 4), lambda: 0, busy_places=1), {"response"}
        capacity.isolate_from(suspects)
        gate = LineGate(capacity, cast("LineExecutor", None))
        queue = ControlQueue(kv, control, gate, FairShare("batches", 4), sign, lambda: None)
        jobs = LeasedJobs(queue, sign, poll_s=0.05)
        first, last = await add_batch(served), await add_batch(served, "first")
        refs = [first, last]
        entries = await kv.get_many([ref.active_key for ref in refs])
        queue.waiting = [
            Job(ref.tenant, ref, ref.control_key, 10, ref.active_key, entry)
            for ref, entry in zip(refs, entries, strict=True)
        ]
        jobs.start()
        try:
            await wait_for_status(control, first, "in_progress")
            await asyncio.sleep(0.2)
            # it waits, and has not begun: were this process to end, the batch would not be blamed
            await wait_for_status(control, last, "validating")
            entry = await kv.get(last.active_key)
            assert entry is not None
            assert decode_record(entry, JobRecord).workers == ["first", "ended"]
            assert await kv.get(last.control_key) is not None
            suspects.clear()
            await wait_for_status(control, last, "in_progress")
        finally:
            await jobs.close(5)


async def wait_for_status(control: BatchControl, ref: BatchRef, status: str) -> None:
    async with asyncio.timeout(10):
        while (loaded := await control.load(ref)) is None or loaded[0].status != status:  # noqa: ASYNC110 - a store sets no event
            await asyncio.sleep(0.01)
