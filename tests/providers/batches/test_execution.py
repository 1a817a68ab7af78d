"""The execution of batches without HTTP: turns of tenants, clients first, lost claims, validation of large files."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from apis.batches.batches import MAX_LINES, BatchOwner, LineAnswer
from apis.batches.spare_capacity import SpareCapacity
from apis.errors import InvalidRequest, StoreUnavailable
from apis.fair_share import FairShare
from apis.storage.kv_store import Delete, KVStore, Put
from apis.storage.lease import Lease, LeaseLost
from apis.storage.records import decode_record, delete_all, encode_record, scan_all
from providers.batches.execution import BatchBlock, BlockExecution, LineGate, LineLimits
from providers.batches.records import BatchRef, BatchState, BlockCounts, BlockRecord, build_block_name, new_batch_ref
from providers.batches.validation import MAX_ERRORS, BatchValidator, splice_fields
from providers.common.jobs import Claim, Job, claim_job
from providers.common.state.scan import decode_or_skip
from providers.common.state.worker_signs import WorkerSign
from providers.kv_store.memory import Memory
from tests.support.sdk.batch_files import batch_line
from tests.support.waiting import until, until_empty

ClaimedBlock = Claim[BatchBlock, BlockRecord]
LIMITS = LineLimits(max_attempts=3, retry_s=0.01)
SIGN_INTERVAL_S = 0.02


@dataclass
class Executor:
    """Answers each line after a turn of the loop, and records what it executed; `answer` may choose another answer."""

    clients: int = 0
    executed: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    running: int = 0
    most_running: int = 0
    wait_s: float = 0.0
    answer: Callable[[int], LineAnswer] = lambda _: LineAnswer(200, "req", b'{"ok": true}')

    async def may_execute(self, owner: BatchOwner) -> bool:
        return bool(owner.tenant)

    async def execute(self, endpoint: str, body: bytes, *, owner: BatchOwner, response_id: str) -> LineAnswer:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.executed.append((owner.tenant, {**json.loads(body), "id": response_id}))
        try:
            await asyncio.sleep(self.wait_s)
        finally:
            self.running -= 1
        return self.answer(len(self.executed))

    def interactive_requests(self) -> int:
        return self.clients


def line_gate(
    executor: Executor, places: int, *, several_tenants: bool = False, engine_priority: int | None = None
) -> LineGate:
    """Return a gate of that many places, of which two are for the time while clients are answered."""
    capacity = SpareCapacity(
        FairShare("lines", places, several_tenants=several_tenants),
        executor.interactive_requests,
        busy_places=2,
        engine_priority=engine_priority,
    )
    return LineGate(capacity, executor)


@pytest.fixture
async def kv() -> AsyncIterator[Memory]:
    store = Memory(Memory.Config())
    await store.start()
    yield store
    await store.close()


def state(**fields: Any) -> BatchState:
    now = int(time.time())
    return BatchState("file-1", "/v1/responses", "24h", now, now + 86_400, **fields)


async def store_block(kv: KVStore, tenant: str, count: int, **fields: Any) -> tuple[BatchRef, BatchState]:
    """Store a batch in progress with one block of lines."""
    ref, batch = new_batch_ref(tenant), state(status="in_progress", total=count)
    lines = b"\n".join(json.dumps(batch_line(f"{n}")).encode() for n in range(1, count + 1))
    block, name = BlockRecord(**fields), build_block_name(1, count)
    await kv.write(
        [
            ref.put(batch, 0),
            Put(f"{ref.data_prefix('input')}{name}", lines),
            Put(f"{ref.block_prefix}{name}", encode_record(block)),
        ]
    )
    return ref, batch


async def claim(
    kv: KVStore, ref: BatchRef, batch: BatchState, lease_s: float = 5, worker: str = "one"
) -> ClaimedBlock | None:
    rows = await kv.scan(ref.block_prefix)
    if not rows:
        return None
    key, entry = rows[0]
    name = key.removeprefix(ref.block_prefix)
    job = Job(ref.tenant, BatchBlock(ref, batch, name), f"{ref.lease_prefix}{name}", lease_s, key, entry)
    record = decode_or_skip(kv, key, entry, BlockRecord) or BlockRecord()
    return await claim_job(kv, job, record, WorkerSign(kv, SIGN_INTERVAL_S, name=worker))


def execution_of(kv: KVStore, claimed: ClaimedBlock, gate: LineGate, limits: LineLimits = LIMITS) -> BlockExecution:
    return BlockExecution(kv, claimed, gate, limits, WorkerSign(kv, SIGN_INTERVAL_S, name=claimed.record.worker))


async def run(kv: KVStore, claimed: ClaimedBlock, execution: BlockExecution) -> None:
    """Run the block, and give it back where it is not done."""
    try:
        async with claimed.lease.renew_in_background():
            await execution.run()
    finally:
        if not claimed.lease.is_relinquished:
            claimed.record.give_back(claimed.record.worker)
            await claimed.lease.release([Put(claimed.job.key, encode_record(claimed.record))])


async def results(kv: KVStore, ref: BatchRef) -> tuple[list[str], list[str]]:
    """Return the custom ids of the lines that succeeded, and the error codes of the others."""
    good = [json.loads(e.value)["custom_id"] async for _, e in scan_all(kv, ref.data_prefix("output"))]
    bad = [json.loads(e.value)["error"]["code"] async for _, e in scan_all(kv, ref.data_prefix("error"))]
    return good, bad


async def execute(kv: KVStore, claimed: ClaimedBlock | None, executor: Executor, limits: LineLimits = LIMITS) -> None:
    assert claimed is not None
    await run(kv, claimed, execution_of(kv, claimed, line_gate(executor, 8), limits))


async def test_clients_requests_leave_lines_a_share_only(kv: Memory) -> None:
    for clients, most in ((0, 8), (1, 2)):
        executor = Executor(clients=clients, wait_s=0.01)
        ref, batch = await store_block(kv, "t", 16)
        await execute(kv, await claim(kv, ref, batch), executor)
        assert executor.most_running == most
        assert (await results(kv, ref))[0] == [f"{n}" for n in range(1, 17)]


async def test_busy_places_go_round_the_tenants(kv: Memory) -> None:
    """Long lines of one tenant and one open request of a client stop no other tenant's batch."""
    loud, quiet = Executor(wait_s=60), Executor()
    clients = 0
    capacity = SpareCapacity(FairShare("lines", 32, several_tenants=True), lambda: clients, busy_places=8)
    executions: list[BlockExecution] = []
    for tenant, executor in (("loud", loud), ("quiet", quiet), ("third", quiet)):
        ref, batch = await store_block(kv, tenant, 16)
        claimed = await claim(kv, ref, batch)
        assert claimed is not None
        executions.append(execution_of(kv, claimed, LineGate(capacity, executor)))
    running = asyncio.create_task(executions[0].run())
    async with asyncio.timeout(10):
        await until(lambda: loud.running >= 16)
        clients = 1
        await asyncio.gather(executions[1].run(), executions[2].run())
    assert len(quiet.executed) == 32
    assert quiet.most_running <= 2 * 4
    executions[0].stop("batch_cancelled")
    await running


async def test_work_that_runs_alone_waits_for_all_other_and_takes_turns(kv: Memory) -> None:
    """While a line runs that may end the process no other does, and other tenants' come between two of them."""
    capacity = SpareCapacity(FairShare("lines", 8, several_tenants=True), lambda: 0, busy_places=2)
    running, order = 0, list[str]()

    async def work(tenant: str, *, alone: bool = False) -> None:
        nonlocal running
        async with capacity.admit(tenant, alone=alone):
            running += 1
            order.append(f"{tenant} alone" if alone else tenant)
            await asyncio.sleep(0.01)
            assert running == 1 or not alone
            running -= 1

    await asyncio.gather(work("a"), work("a"), *(work("a", alone=True) for _ in range(2)), work("b"), work("b"))
    assert order == ["a", "a", "b", "a alone", "b", "a alone"]


async def test_work_that_runs_alone_waits_for_other_suspects_of_the_process(kv: Memory) -> None:
    """A background response that may end the process would take the line down with it. Other lines go on."""
    capacity, suspects = SpareCapacity(FairShare("lines", 8), lambda: 0, busy_places=2), {"response"}
    capacity.isolate_from(suspects)
    order = list[str]()

    async def work(name: str, *, alone: bool = False) -> None:
        async with capacity.admit("a", alone=alone):
            assert capacity.is_running_alone == alone
            order.append(name)

    first = asyncio.create_task(work("alone", alone=True))
    await asyncio.sleep(0)
    await asyncio.gather(*(work("other") for _ in range(3)))
    assert order == ["other"] * 3
    suspects.clear()
    await first
    assert order[3:] == ["alone"]


async def test_places_go_round_the_tenants(kv: Memory) -> None:
    executor = Executor(wait_s=0.002)
    gate = line_gate(executor, 2, several_tenants=True)
    executions: list[BlockExecution] = []
    for tenant in ("loud", "loud", "loud", "quiet"):
        ref, batch = await store_block(kv, tenant, 16)
        claimed = await claim(kv, ref, batch)
        assert claimed is not None
        executions.append(execution_of(kv, claimed, gate))
    await asyncio.gather(*(execution.run() for execution in executions))
    order = [tenant for tenant, _ in executor.executed]
    assert order[:32].count("quiet") == 16


async def test_a_block_goes_on_where_its_worker_was_killed(kv: Memory) -> None:
    ref, batch = await store_block(kv, "t", 16)
    first = await claim(kv, ref, batch, lease_s=0.05)
    assert await claim(kv, ref, batch) is None
    executor = Executor()
    executor.answer = lambda count: LineAnswer(200, "req", b"{}")
    gate = line_gate(executor, 1)
    assert first is not None
    execution = execution_of(kv, first, gate)
    lines = await execution._load_lines()  # pyright: ignore[reportPrivateUsage]  # as much as the killed worker did
    for number in (1, 2, 3):
        await execution._run_line(number, lines[number])  # pyright: ignore[reportPrivateUsage]  # the same
    await asyncio.sleep(0.06)
    second = Executor()
    await execute(kv, await claim(kv, ref, batch), second)
    assert len(second.executed) == 13
    assert (await results(kv, ref))[0] == [f"{n}" for n in range(1, 17)]
    assert await kv.scan(ref.block_prefix) == []
    assert await kv.scan(ref.data_prefix("input")) == []
    [(_, progress)] = await kv.scan(ref.data_prefix("progress"))
    assert decode_record(progress, BlockCounts).completed == 16


async def test_a_line_whose_result_the_store_has_lost_is_executed_again(kv: Memory) -> None:
    """A fail-over to a replica that misses the last writes: no line is counted as done without its result."""
    ref, batch = await store_block(kv, "t", 3)
    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    [(lease_key, lease)] = await kv.scan(ref.lease_prefix)
    executor = Executor()
    execution = execution_of(kv, claimed, line_gate(executor, 1))
    lines = await execution._load_lines()  # pyright: ignore[reportPrivateUsage]  # as much as it did before the fail-over
    await execution._run_line(1, lines[1])  # pyright: ignore[reportPrivateUsage]  # the same
    for kind in ("output", "progress"):
        await delete_all(kv, ref.data_prefix(kind))
    await kv.put(lease_key, lease.value)
    with pytest.raises(LeaseLost):
        await execution._run_line(2, lines[2])  # pyright: ignore[reportPrivateUsage]  # the same
    assert await results(kv, ref) == ([], [])
    await kv.write([Delete(lease_key)])  # it expires
    await execute(kv, await claim(kv, ref, batch), Executor())
    assert await results(kv, ref) == (["1", "2", "3"], [])


async def test_a_line_is_stored_as_begun_while_it_is_executed(kv: Memory) -> None:
    """Attempts are counted in the store before they begin."""
    ref, batch = await store_block(kv, "t", 4)
    stored: list[list[int]] = []

    class Looking(Executor):
        async def execute(self, endpoint: str, body: bytes, *, owner: BatchOwner, response_id: str) -> LineAnswer:
            [(_, entry)] = await kv.scan(ref.block_prefix)
            stored.append(decode_record(entry, BlockRecord).begun)
            return await super().execute(endpoint, body, owner=owner, response_id=response_id)

    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    await run(kv, claimed, execution_of(kv, claimed, line_gate(Looking(), 1)))
    assert stored == [[1], [2], [3], [4]]


async def test_a_line_that_has_cost_two_workers_fails_alone(kv: Memory) -> None:
    """The lines that ran when a worker ended are executed one at a time, so that the next one has one cause."""
    ref, batch = await store_block(kv, "t", 6, begun=[1, 2, 3], worker="ended")
    first = await claim(kv, ref, batch, lease_s=0.05)
    assert first is not None
    assert first.record.losses == {1: ["ended"], 2: ["ended"], 3: ["ended"]}
    executor = Executor(wait_s=60)
    execution = execution_of(kv, first, line_gate(executor, 8))
    running = asyncio.create_task(execution._run_lines())  # pyright: ignore[reportPrivateUsage]  # `run` would release the lease
    async with asyncio.timeout(5):
        await until(lambda: executor.executed)
        await asyncio.sleep(0.1)  # time for any other line to begin
        assert [body["input"] for _, body in executor.executed] == ["1"]
        running.cancel()
        await until_empty(lambda: kv.scan(ref.lease_prefix))
    again = Executor(wait_s=0.001)
    await execute(kv, await claim(kv, ref, batch, worker="two"), again)
    assert [body["input"] for _, body in again.executed] == ["2", "3", "4", "5", "6"]
    assert await results(kv, ref) == (["2", "3", "4", "5", "6"], ["worker_lost"])


async def test_lines_that_lost_their_lease_in_an_outage_are_not_to_blame(kv: Memory) -> None:
    """A worker that goes on has not been ended by its lines."""
    ref, batch = await store_block(kv, "t", 3, begun=[1, 2], losses={1: ["ended"]}, worker="one")
    claimed = await claim(kv, ref, batch, worker="one")
    assert claimed is not None
    assert claimed.record.losses == {1: ["ended"]}
    await execute(kv, claimed, Executor())
    assert await results(kv, ref) == (["1", "2", "3"], [])


async def test_lines_whose_slow_workers_live_are_not_to_blame(kv: Memory) -> None:
    """A worker that did not renew its lease in time, and lives, has not been ended by its lines."""
    slow = WorkerSign(kv, SIGN_INTERVAL_S, name="slow")
    losses = {1: ["ended", "slow"], 2: ["slow", "slow"], 3: ["ended", "ended too"]}
    ref, batch = await store_block(kv, "t", 3, losses=losses, worker="ended")
    slow.start()
    await execute(kv, await claim(kv, ref, batch), Executor())
    await slow.close()
    assert await results(kv, ref) == (["1", "2"], ["worker_lost"])


async def test_a_line_that_waits_for_its_next_attempt_is_not_to_blame(kv: Memory) -> None:
    """Another line ends the worker meanwhile."""
    ref, batch = await store_block(kv, "t", 1)
    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    busy = LineAnswer(503, "req", b"{}", is_transient=True, retry_after_s=60)
    execution = execution_of(kv, claimed, line_gate(Executor(answer=lambda _: busy), 8))
    running = asyncio.create_task(execution.run())
    begun = [[0]]
    async with asyncio.timeout(5):
        while begun[-1:] != [[]] or [1] not in begun:
            begun.append(decode_record((await kv.scan(ref.block_prefix))[0][1], BlockRecord).begun)
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})


async def test_want_of_capacity_is_retried_under_other_ids(kv: Memory) -> None:
    ref, batch = await store_block(kv, "t", 1)
    executor = Executor()
    busy = LineAnswer(503, "req", b'{"error": {}}', is_transient=True)
    executor.answer = lambda count: busy if count < 3 else LineAnswer(200, "req", b"{}")
    await execute(kv, await claim(kv, ref, batch), executor)
    assert len({body["id"] for _, body in executor.executed}) == 3
    assert await results(kv, ref) == (["1"], [])
    ref, batch = await store_block(kv, "t", 1)
    executor = Executor(answer=lambda _: busy)
    await execute(kv, await claim(kv, ref, batch), executor)
    assert len(executor.executed) == 3
    [(_, entry)] = await kv.scan(ref.data_prefix("error"))
    assert json.loads(entry.value)["response"]["status_code"] == 503


async def test_an_outage_of_the_store_fails_no_line(kv: Memory) -> None:
    answers = itertools.count(1)

    def raise_second(_: int) -> LineAnswer:
        if next(answers) == 2:
            raise StoreUnavailable("away")
        return LineAnswer(200, "req", b"{}")

    ref, batch = await store_block(kv, "t", 3)
    with pytest.raises(StoreUnavailable):
        await execute(kv, await claim(kv, ref, batch), Executor(answer=raise_second))
    await execute(kv, await claim(kv, ref, batch), Executor())
    assert await results(kv, ref) == (["1", "2", "3"], [])


async def test_a_drained_block_ends_what_it_began_and_returns_the_rest(kv: Memory) -> None:
    ref, batch = await store_block(kv, "t", 16)
    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    executor = Executor(wait_s=0.05)
    execution = execution_of(kv, claimed, line_gate(executor, 4))
    running = asyncio.create_task(run(kv, claimed, execution))
    await until(lambda: executor.running >= 4)
    execution.stop("drain")
    await running
    assert len(executor.executed) == 4
    assert len((await results(kv, ref))[0]) == 4
    again = Executor()
    await execute(kv, await claim(kv, ref, batch), again)
    assert len(again.executed) == 12
    assert (await results(kv, ref))[0] == [f"{n}" for n in range(1, 17)]


async def test_a_cancelled_block_names_every_line_once(kv: Memory) -> None:
    ref, batch = await store_block(kv, "t", 16)
    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    executor = Executor(wait_s=0.01)
    execution = execution_of(kv, claimed, line_gate(executor, 3))
    running = asyncio.create_task(execution.run())
    await asyncio.sleep(0.025)
    execution.stop("batch_cancelled")
    await running
    good, bad = await results(kv, ref)
    assert len(good) + len(bad) == 16
    assert set(bad) == {"batch_cancelled"}
    assert await kv.scan(ref.block_prefix) == []


async def test_lines_that_the_store_has_damaged_fail(kv: Memory) -> None:
    ref, batch = await store_block(kv, "t", 2)
    await kv.write([Delete(f"{ref.data_prefix('input')}{build_block_name(1, 2)}")])
    executor = Executor()
    await execute(kv, await claim(kv, ref, batch), executor)
    assert await results(kv, ref) == ([], ["storage_corrupt"] * 2)
    assert await kv.scan(ref.block_prefix) == []


async def test_a_tenant_above_its_quota_gets_errors(kv: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(tenant: str) -> None:
        raise InvalidRequest(f"{tenant} has stored too much.", code="storage_quota_exceeded")

    monkeypatch.setattr(kv, "require_room", refuse)
    ref, batch = await store_block(kv, "t", 2)
    executor = Executor()
    await execute(kv, await claim(kv, ref, batch), executor)
    assert await results(kv, ref) == ([], ["storage_quota_exceeded"] * 2)


async def test_the_engines_priority_is_added_to_bodies_without_one(kv: Memory) -> None:
    assert json.loads(splice_fields(b'{"a": 1}', {"priority": 7})) == {"priority": 7, "a": 1}
    assert json.loads(splice_fields(b" { } ", {"priority": 7})) == {"priority": 7}
    ref, batch = await store_block(kv, "t", 1)
    executor = Executor()
    claimed = await claim(kv, ref, batch)
    assert claimed is not None
    await run(kv, claimed, execution_of(kv, claimed, line_gate(executor, 8, engine_priority=9)))
    assert executor.executed[0][1]["priority"] == 9


async def validate(kv: KVStore, chunks: AsyncGenerator[bytes]) -> BatchValidator:
    ref = new_batch_ref("t")
    lease = Lease(kv, ref.control_key, 30)
    await lease.acquire()
    validator = BatchValidator(ref, state(), lease, {"scripted"}, 10_000)
    await validator.run(chunks)
    return validator


async def test_lines_are_found_wherever_chunks_end(kv: Memory) -> None:
    data = "\r\n".join(json.dumps(batch_line(f"ü{n}")) for n in range(50)).encode()

    async def cut(size: int) -> AsyncGenerator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    for size in (1, 7, 64, 10_000):
        validator = await validate(kv, cut(size))
        assert (validator.line_count, validator.errors) == (50, [])


async def test_a_file_of_faults_reports_a_bounded_number(kv: Memory) -> None:
    async def faults() -> AsyncGenerator[bytes]:
        for _ in range(10_000):
            yield b"{\n"

    assert len((await validate(kv, faults())).errors) == MAX_ERRORS


async def test_a_line_without_an_end_is_refused_before_it_is_whole(kv: Memory) -> None:
    pulled = 0

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal pulled
        while True:
            pulled += 1
            yield b"x" * 5_000

    validator = await validate(kv, endless())
    assert [(error.code, error.line) for error in validator.errors] == [("line_too_long", 1)]
    assert pulled == 3


async def test_one_request_too_many_fails_the_batch(kv: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_LINES == 50_000
    monkeypatch.setattr("providers.batches.validation.MAX_LINES", 20)

    async def lines() -> AsyncGenerator[bytes]:
        for number in range(21):
            yield json.dumps(batch_line(f"{number}")).encode() + b"\n"

    validator = await validate(kv, lines())
    assert [error.code for error in validator.errors] == ["too_many_requests"]
