"""Batches that end the processes which validate or finish them."""

import time
from typing import Any

from apis.storage.kv_store import Put
from providers.batches.records import BatchState, new_batch_ref
from providers.common.state.worker_signs import WorkerSign
from tests.support.sdk.batch_files import batch_line, read_results, upload_lines, wait_for_end
from tests.support.servers.serving import Served, serving

MORE: dict[str, Any] = {"files": {"provider": "kv"}, "batches": {"provider": "leased", "poll_s": 0.05, "lease_s": 0.5}}


async def store_batch(served: Served, *lost: str, **fields: Any) -> Any:
    """Store a batch of one line as a process left it that ended; return it at its end."""
    file_id = await upload_lines(served.client, [batch_line("one")])
    ref, now = new_batch_ref("default"), int(time.time())
    lives: dict[str, Any] = {"controller": "ended", "lost_controllers": [*lost], **fields}
    record = BatchState(file_id, "/v1/responses", "24h", now, now + 86_400, **lives)
    await served.stack.kv_store.write([ref.put(record, 0), Put(ref.active_key, b"")])
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
