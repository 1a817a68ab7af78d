"""LeasedJobs on each shared store: workers that are killed, slow or closed in the middle of a job."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import msgspec
import pytest

from apis.storage.kv_store import ABSENT, Delete, KVStore, Put
from apis.storage.records import decode_record, encode_record
from providers.common.jobs import MAX_UNRETURNED, Job, JobRecord
from providers.common.state.worker_signs import WorkerSign
from tests.support.servers.forked_process import ForkedProcess, forked_process
from tests.support.servers.job_worker import (
    DEATHS_KEY,
    LEASE_S,
    PREFIX,
    PracticeWorker,
    add_jobs,
    end_key,
    lease_key,
    open_store,
)
from tests.support.waiting import until

BOUND_S = 60
PROGRAM = "import asyncio; from tests.support.servers.job_worker import main; asyncio.run(main())"


@pytest.fixture
async def kv(shared_store: dict[str, Any]) -> AsyncGenerator[KVStore]:
    store = await open_store(shared_store)
    yield store
    await store.close()


def worker_process(section: dict[str, Any]) -> AbstractAsyncContextManager[ForkedProcess]:
    return forked_process(PROGRAM, msgspec.json.encode(section).decode(), stderr=2)


async def read_ends(kv: KVStore, *names: str) -> list[str]:
    """Return the ends of these jobs once they all have one."""

    async def have_ended() -> bool:
        return None not in await kv.get_many([end_key(name) for name in names])

    await until(have_ended, BOUND_S)
    return [entry.value.decode() for entry in await kv.get_many([end_key(name) for name in names]) if entry]


async def read_record(kv: KVStore, name: str) -> JobRecord:
    entry = await kv.get(PREFIX + name)
    assert entry is not None
    return decode_record(entry, JobRecord)


async def wait_for_lease(kv: KVStore, name: str) -> None:
    async def is_held() -> bool:
        return await kv.get(lease_key(name)) is not None

    await until(is_held, BOUND_S)


async def test_a_job_that_ends_its_workers_fails_alone(shared_store: dict[str, Any], kv: KVStore) -> None:
    """After three processes; the jobs that ran with it, of its tenant and of another, are done."""
    good = [f"{tenant}/good-{number}" for tenant in "ab" for number in range(6)]
    await add_jobs(kv, "a/poison", *good)

    async def keep_running() -> None:
        while True:
            async with worker_process(shared_store) as process:
                await process.wait()

    restarting = asyncio.create_task(keep_running())
    try:
        poison, *ends = await read_ends(kv, "a/poison", *good)
    finally:
        restarting.cancel()
        await asyncio.wait({restarting})
    assert poison == "failed:3 4"
    assert {end.partition(" ")[0] for end in ends} == {"done"}
    assert len(await kv.scan(DEATHS_KEY)) == 3
    assert await kv.scan(PREFIX) == []


async def test_the_job_of_a_killed_worker_is_run_by_another(shared_store: dict[str, Any], kv: KVStore) -> None:
    await add_jobs(kv, "a/held")
    async with worker_process(shared_store):
        await wait_for_lease(kv, "a/held")
    assert (await read_record(kv, "a/held")).attempts == 1
    async with PracticeWorker(kv) as worker:
        worker.queue.may_end.set()
        assert await read_ends(kv, "a/held") == ["done 2"]


async def test_a_worker_that_closes_gives_its_jobs_back_at_once(kv: KVStore) -> None:
    await add_jobs(kv, "a/held")
    async with PracticeWorker(kv, lease_s=3600):
        await wait_for_lease(kv, "a/held")
    record = await read_record(kv, "a/held")
    assert (record.attempts, record.handovers, record.workers) == (1, 1, [])
    async with PracticeWorker(kv) as worker:
        worker.queue.may_end.set()
        assert await read_ends(kv, "a/held") == ["done 2"]


async def test_a_worker_that_drains_ends_its_jobs_and_claims_no_more(kv: KVStore) -> None:
    await add_jobs(kv, "a/held")
    async with PracticeWorker(kv) as worker:
        await wait_for_lease(kv, "a/held")
        draining = asyncio.create_task(worker.jobs.drain())
        await asyncio.sleep(0)
        await add_jobs(kv, "a/new")
        worker.jobs.wake()
        await asyncio.sleep(0.2)
        assert not draining.done()
        worker.queue.may_end.set()
        await draining
        assert await read_ends(kv, "a/held") == ["done 1"]
        assert (await read_record(kv, "a/new")).attempts == 0


@pytest.mark.parametrize(("living", "end"), [(["one", "two"], "done 6"), ([], "failed:3 6")])
async def test_workers_that_live_are_not_lost(kv: KVStore, living: Sequence[str], end: str) -> None:
    """A worker that did not renew its lease in time, and lives, has not been ended by the job."""
    async with AsyncExitStack() as signs:
        for name in living:
            sign = WorkerSign(kv, LEASE_S, name=name)
            sign.start()
            signs.push_async_callback(sign.close)
        await add_jobs(kv, "a/good", record=JobRecord(5, 0, ["one", "two", "three"]))
        async with PracticeWorker(kv):
            assert await read_ends(kv, "a/good") == [end]


async def test_a_job_that_fails_out_of_order_ends_after_some_attempts(kv: KVStore) -> None:
    """A bug is no loss of a worker, and is not tried for ever."""
    await add_jobs(kv, "a/faulty", "a/good", record=JobRecord(MAX_UNRETURNED - 1))
    async with PracticeWorker(kv) as worker:
        end, _ = await read_ends(kv, "a/faulty", "a/good")
        assert end == f"failed:0 {MAX_UNRETURNED + 1}"
        assert worker.queue.begun.count("a/faulty") == 1


async def test_an_error_delays_the_next_attempt_and_counts_for_nothing(kv: KVStore) -> None:
    await add_jobs(kv, "a/late", record=JobRecord())
    began_at = asyncio.get_running_loop().time()
    async with PracticeWorker(kv, lease_s=1):
        await wait_for_lease(kv, "a/late")

        async def is_given_back() -> bool:
            return (await read_record(kv, "a/late")).handovers == 1

        await until(is_given_back, BOUND_S)
        assert (await read_record(kv, "a/late")).workers == []
        assert await read_ends(kv, "a/late") == ["done 2"]
    assert asyncio.get_running_loop().time() - began_at > 0.9


async def test_a_job_that_is_not_ended_goes_back(kv: KVStore) -> None:
    await add_jobs(kv, "a/returned")
    async with PracticeWorker(kv, lease_s=3600):
        assert await read_ends(kv, "a/returned") == ["done 2"]


async def test_a_job_that_was_removed_does_not_come_back(kv: KVStore) -> None:
    """Its worker, which is stopped, stores nothing about it."""
    await add_jobs(kv, "a/held")
    async with PracticeWorker(kv) as worker:
        await wait_for_lease(kv, "a/held")
        await kv.write([Delete(f"{PREFIX}a/held")])
        await worker.jobs.cancel([lease_key("a/held")], BOUND_S)
        assert worker.jobs.claims == []
        assert await kv.get_many([f"{PREFIX}a/held", lease_key("a/held")]) == [None, None]


async def test_a_flood_of_one_tenant_delays_another_by_one_job(kv: KVStore) -> None:
    await add_jobs(kv, *(f"a/held-{number}" for number in range(8)))
    async with PracticeWorker(kv, places=2) as worker:
        await wait_for_lease(kv, "a/held-0")
        await add_jobs(kv, "b/held")
        worker.jobs.wake()
        await until(lambda: len(worker.queue.begun) > 1, BOUND_S)
        assert worker.queue.begun == ["a/held-0", "b/held"]
        worker.queue.may_end.set()
        await read_ends(kv, *(f"a/held-{number}" for number in range(8)))


async def test_tenants_take_turns_for_places_that_are_free(kv: KVStore) -> None:
    await add_jobs(kv, *(f"{tenant}/held-{number}" for tenant in "ab" for number in range(4)))
    async with PracticeWorker(kv, places=4) as worker:

        async def have_begun() -> bool:
            return len(worker.queue.begun) == 4

        await until(have_begun, BOUND_S)
        assert [name[0] for name in worker.queue.begun] == ["a", "b", "a", "b"]


async def test_a_job_that_is_stopped_as_it_begins_is_given_back(kv: KVStore) -> None:
    """A task that is cancelled before its first step would give nothing back."""
    await add_jobs(kv, "a/held")
    worker = PracticeWorker(kv, lease_s=3600)
    [job] = [each async for each in worker.queue.list_waiting()]
    claim = await worker.queue.claim(job, worker.sign)
    assert claim is not None
    worker.jobs.start_job(claim, None)
    await worker.jobs.cancel([job.lease_key], BOUND_S)
    assert (await read_record(kv, "a/held")).workers == []
    assert await kv.get(job.lease_key) is None


async def start_new(worker: PracticeWorker, name: str) -> list[int] | None:
    """Add a job as one that the worker runs from now on; return the versions of what was written."""
    queue = worker.queue
    job = Job(name.partition("/")[0], name, lease_key(name), queue.lease_s, PREFIX + name)
    place = worker.jobs.reserve(job)
    assert place is not None
    ops = [Put("/practice_note", b""), Put(job.key, encode_record(JobRecord()), None, ABSENT)]
    return await worker.jobs.start_new(job, JobRecord(), ops, place)


async def test_a_new_job_is_run_by_the_process_that_adds_it(kv: KVStore) -> None:
    """It is leased from the write on that adds it, and not looked for. Its attempts are counted as those of others."""
    async with PracticeWorker(kv, lease_s=3600) as worker:
        versions = await start_new(worker, "a/held")
        entries = await kv.get_many(["/practice_note", f"{PREFIX}a/held", lease_key("a/held")])
        assert versions == [entry.version for entry in entries[:2] if entry is not None]
        assert entries[2] is not None
        assert (await read_record(kv, "a/held")).workers == [worker.sign.name]
        worker.queue.may_end.set()
        assert await read_ends(kv, "a/held") == ["done 1"]


async def test_a_new_job_whose_lease_is_held_is_not_added(kv: KVStore) -> None:
    async with PracticeWorker(kv, places=1) as worker:
        await kv.put(lease_key("a/good"), b"other token 1")
        assert await start_new(worker, "a/good") is None
        assert await kv.get_many(["/practice_note", f"{PREFIX}a/good"]) == [None, None]
        await add_jobs(kv, "a/good-2")  # the only place is free again
        assert await read_ends(kv, "a/good-2") == ["done 1"]


async def test_no_new_job_takes_a_place_that_others_wait_for(kv: KVStore) -> None:
    await add_jobs(kv, "a/held-1", "b/held-2")
    async with PracticeWorker(kv, places=1, lease_s=3600) as worker:
        await until(lambda: len(worker.queue.begun) == 1, BOUND_S)
        job = Job("c", "c/good", lease_key("c/good"), 3600, f"{PREFIX}c/good")
        worker.queue.may_end.set()  # from now on the place is free at times
        await until(lambda: len(worker.queue.begun) == 2 or worker.jobs.reserve(job) is not None, BOUND_S)
        assert worker.queue.begun == ["a/held-1", "b/held-2"]


async def test_a_new_job_is_left_to_others_by_a_worker_that_stops(kv: KVStore) -> None:
    worker = PracticeWorker(kv, lease_s=3600)
    job = Job("a", "a/held", lease_key("a/held"), 3600, f"{PREFIX}a/held")
    place = worker.jobs.reserve(job)
    assert place is not None
    await worker.jobs.stop_claiming()
    await worker.jobs.start_new(job, JobRecord(), [Put(job.key, encode_record(JobRecord()))], place)
    assert worker.jobs.reserve(job) is None
    assert await kv.get(job.lease_key) is None
    assert (await read_record(kv, "a/held")).workers == []


async def test_two_workers_run_no_job_twice(shared_store: dict[str, Any], kv: KVStore) -> None:
    names = [f"{tenant}/good-{number}" for tenant in "ab" for number in range(10)]
    other = await open_store(shared_store)
    try:
        await add_jobs(kv, *names)
        async with PracticeWorker(kv, lease_s=30) as one, PracticeWorker(other, lease_s=30) as two:
            assert await read_ends(kv, *names) == ["done 1"] * 20
            assert sorted([*one.queue.begun, *two.queue.begun]) == sorted(names)
    finally:
        await other.close()


async def test_a_job_whose_attempts_are_damaged_is_done_like_others(kv: KVStore) -> None:
    """The attempts that were lost count as one."""
    await kv.put(f"{PREFIX}a/damaged", b"\xffjunk")
    await add_jobs(kv, "a/good", "b/good")
    async with PracticeWorker(kv, places=1):
        assert await read_ends(kv, "a/damaged", "a/good", "b/good") == ["done 2", "done 1", "done 1"]
