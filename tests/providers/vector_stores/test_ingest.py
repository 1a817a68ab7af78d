"""Work in the background, when processes die, share it, or are in each other's way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from apis.documents.files import CreateFile
from apis.documents.vector_index import Chunk, Search
from apis.documents.vector_store_requests import AddFile, CreateVectorStore, SearchStores, UpdateFile
from apis.errors import StoreUnavailable
from apis.provider import Provider
from apis.storage.kv_store import Op, Put
from apis.storage.records import encode_record
from providers.common.jobs import JobRecord
from providers.common.state.worker_signs import WorkerSign
from providers.fetcher.safe import GuardedFetcher
from providers.files.kv import StoredFiles
from providers.kv_store.memory import Memory
from providers.reader.child import ChildReader
from providers.vector_index.sqlite_vec import SQLiteVec
from providers.vector_stores import records as file_records
from providers.vector_stores.hybrid import HybridVectorStores
from providers.vector_stores.records import JOB_PREFIX, LEASE_PREFIX
from tests.support.models.hashing import DIMENSIONS, Hashing
from tests.support.waiting import until

BOUND_S = 30
LEASE_S = 0.2
T = "t"


class Watched(Memory):
    """A store that says when it was written to."""

    def __init__(self, config: Memory.Config) -> None:
        super().__init__(config)
        self.written = asyncio.Condition()

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        versions = await super().write(ops, durable=durable)
        async with self.written:
            self.written.notify_all()
        return versions

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a write after which this holds."""
        async with asyncio.timeout(BOUND_S), self.written:
            while not await holds():
                await self.written.wait()


class Setting:
    """One store and one index, and as many processes over them as are opened."""

    def __init__(self, folder: Path, opened: AsyncExitStack) -> None:
        self.kv = Watched(Memory.Config())
        self.files = StoredFiles(StoredFiles.Config(), self.kv)
        self.index = SQLiteVec(SQLiteVec.Config(path=str(folder / "vectors.db")))
        self._opened = opened

    async def open(self, model: Hashing | None = None) -> HybridVectorStores:
        config = HybridVectorStores.Config(embedding_model="hashing", lease_s=LEASE_S)
        reader = ChildReader(ChildReader.Config(), self.files, GuardedFetcher(GuardedFetcher.Config()))
        stores = HybridVectorStores(
            config, self.files, reader, self.index, model or Hashing(Provider.Config()), self.kv, None
        )
        self._opened.push_async_callback(stores.close)
        await stores.start()
        return stores

    async def upload(self, text: str) -> str:
        async def data() -> AsyncIterator[bytes]:
            yield text.encode()

        return (await self.files.create(CreateFile(filename="a.txt", purpose="assistants"), data(), tenant=T)).id

    async def indexed(self, store_id: str) -> list[str]:
        """Return the texts that the index has of a store, without reading the store's records."""
        hits = await self.index.search_vector(Search(f"{T}/{store_id}", 1000), [1.0] * DIMENSIONS)
        return sorted(each.text for each in hits)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as opened:
        setting = Setting(tmp_path, opened)
        opened.push_async_callback(setting.index.close)
        await setting.index.start()
        yield setting


async def settled(setting: Setting, store_id: str) -> None:
    async def holds() -> bool:
        records = await file_records.list_file_records(setting.kv, T, store_id)
        return all(record.status != "in_progress" for _, record in records)

    await setting.kv.until(holds)


def gated() -> Hashing:
    model = Hashing(Provider.Config())
    model.gate = asyncio.Event()
    return model


async def begun(model: Hashing) -> None:
    async with asyncio.timeout(BOUND_S):
        await model.waiting.wait()


async def test_what_a_dead_process_had_claimed_is_taken_up_when_its_lease_is_over(setting: Setting) -> None:
    first = await setting.open()
    store = await first.create(CreateVectorStore(), tenant=T)
    await first.close()
    file_id = await setting.upload("left behind")
    await first.add_file(store.id, AddFile(file_id=file_id), tenant=T)
    place = file_records.FileRef(T, store.id, file_id)
    job = Put(f"{JOB_PREFIX}{place}", encode_record(JobRecord(1, workers=["ended"])))
    await setting.kv.write([Put(f"{LEASE_PREFIX}{place}", b"", LEASE_S), job])
    second = await setting.open()
    await settled(setting, store.id)
    assert (await second.get_file(store.id, file_id, tenant=T)).status == "completed"
    assert await setting.indexed(store.id) == ["left behind"]
    assert await setting.kv.scan("~vs_") == []


async def test_two_processes_share_the_work_and_do_none_of_it_twice(setting: Setting) -> None:
    models = [Hashing(Provider.Config()) for _ in range(2)]
    one, two = [await setting.open(model) for model in models]
    files = [await setting.upload(f"file number {i}") for i in range(8)]
    store = await one.create(CreateVectorStore(file_ids=files), tenant=T)
    two._ingest.wake()  # pyright: ignore[reportPrivateUsage] - else it would look a lease later
    await settled(setting, store.id)
    assert len(await setting.indexed(store.id)) == 8
    assert sum(sum(model.request_sizes) for model in models) == 8


async def test_a_file_taken_out_while_it_is_worked_on_stays_out(setting: Setting) -> None:
    model = gated()
    stores = await setting.open(model)
    file_id = await setting.upload("taken out")
    store = await stores.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
    await begun(model)
    await stores.delete_file(store.id, file_id, tenant=T)
    assert model.gate is not None
    model.gate.set()
    await settled(setting, store.id)
    assert await setting.indexed(store.id) == []
    assert not [key for key, _ in await setting.kv.scan("") if "vs_file" in key or "vs_text" in key or "vs_work" in key]


async def test_a_file_taken_out_by_another_process_stays_out(setting: Setting) -> None:
    model = gated()
    worker = await setting.open(model)
    file_id = await setting.upload("taken out")
    store = await worker.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
    await begun(model)
    other = await setting.open()
    await other.delete_file(store.id, file_id, tenant=T)
    assert model.gate is not None
    model.gate.set()

    async def nothing_waits() -> bool:
        return await setting.kv.scan("~vs_") == []

    await setting.kv.until(nothing_waits)
    assert await setting.indexed(store.id) == []


async def test_attributes_given_while_it_is_worked_on_are_those_it_has(setting: Setting) -> None:
    model = gated()
    stores = await setting.open(model)
    file_id = await setting.upload("attributed")
    store = await stores.create(CreateVectorStore(), tenant=T)
    await stores.add_file(store.id, AddFile(file_id=file_id, attributes={"old": 1}), tenant=T)
    await begun(model)
    await stores.update_file(store.id, file_id, UpdateFile(attributes={"new": True}), tenant=T)
    assert model.gate is not None
    model.gate.set()
    await settled(setting, store.id)
    new = {"type": "eq", "key": "new", "value": True}
    search = SearchStores.model_validate({"query": "attributed", "filters": new})
    (hit,) = await stores.search([store.id], search, tenant=T)
    assert hit.attributes == {"new": True}


async def end_of(setting: Setting, job: JobRecord) -> tuple[str, str | None]:
    """Return the status of a file that workers have left with this job, and the code of its error."""
    first = await setting.open()
    store = await first.create(CreateVectorStore(), tenant=T)
    await first.close()
    file_id = await setting.upload("poison")
    await first.add_file(store.id, AddFile(file_id=file_id), tenant=T)
    place = file_records.FileRef(T, store.id, file_id)
    await setting.kv.write([Put(f"{JOB_PREFIX}{place}", encode_record(job))])
    second = await setting.open()
    await settled(setting, store.id)
    file = await second.get_file(store.id, file_id, tenant=T)
    return file.status, file.last_error and file.last_error.code


@pytest.mark.parametrize(
    ("lost_workers", "end"), [(2, ("completed", None)), (3, ("completed", None)), (4, ("failed", "server_error"))]
)
async def test_a_file_survives_three_lost_workers(
    setting: Setting, lost_workers: int, end: tuple[str, str | None]
) -> None:
    """An attempt counts before it begins; a fourth worker is not lost over one file."""
    workers = [f"worker {number}" for number in range(lost_workers)]
    assert await end_of(setting, JobRecord(lost_workers, workers=workers)) == end


@pytest.mark.parametrize(("attempts", "end"), [(9, ("completed", None)), (10, ("failed", "server_error"))])
async def test_slow_workers_that_live_are_not_lost_over_a_file(
    setting: Setting, attempts: int, end: tuple[str, str | None]
) -> None:
    """A worker that did not renew its lease in time, and lives, has not been ended by the file."""
    async with AsyncExitStack() as living:
        for name in ("slow", "slow too"):
            sign = WorkerSign(setting.kv, LEASE_S, name=name)
            sign.start()
            living.push_async_callback(sign.close)
        workers = ["ended", "ended too", "ended as well", "slow", "slow too"]
        assert await end_of(setting, JobRecord(attempts, workers=workers)) == end


async def test_an_outage_of_the_index_is_no_attempt_at_the_file(setting: Setting, tmp_path: Path) -> None:
    """Only attempts that may be the file's fault are counted."""
    outages = 4

    class Failing(SQLiteVec):
        async def upsert(self, store: str, chunks: Sequence[Chunk]) -> None:
            nonlocal outages
            if outages:
                outages -= 1
                raise StoreUnavailable("The index is away.")
            await super().upsert(store, chunks)

    setting.index = Failing(SQLiteVec.Config(path=str(tmp_path / "vectors.db")))
    await setting.index.start()
    try:
        stores = await setting.open()
        file_id = await setting.upload("patience")
        store = await stores.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
        await settled(setting, store.id)
        assert (await stores.get_file(store.id, file_id, tenant=T)).status == "completed"
        assert outages == 0
        await stores.close()
    finally:
        await setting.index.close()


async def test_a_file_of_blanks_is_searchable_at_once(setting: Setting) -> None:
    """White space between two words costs as much as words."""
    stores = await setting.open()
    file_id = await setting.upload(f"a{' ' * 4_000_000}b \t\n")
    store = await stores.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
    async with asyncio.timeout(BOUND_S):
        await settled(setting, store.id)
    assert (await stores.get_file(store.id, file_id, tenant=T)).status == "completed"
    content = await stores.file_content(store.id, file_id, tenant=T)
    assert content[0].text is not None
    assert content[0].text.endswith("b")
    assert await setting.indexed(store.id) == ["a", "b"]


async def test_several_stores_are_searched_together(setting: Setting) -> None:
    stores = await setting.open()
    ids = [
        (await stores.create(CreateVectorStore(file_ids=[await setting.upload(text)]), tenant=T)).id
        for text in ("red apples", "green apples", "blue whales")
    ]
    for each in ids:
        await settled(setting, each)
    hits = await stores.search(ids, SearchStores(query="whales", max_num_results=2), tenant=T)
    assert len(hits) == 2
    assert hits[0].content[0].text == "blue whales"


async def test_a_worker_that_stalled_past_its_lease_neither_renews_nor_deletes_the_claim_of_another(
    setting: Setting,
) -> None:
    model = gated()
    stalled = await setting.open(model)
    file_id = await setting.upload("claimed twice")
    store = await stalled.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
    await begun(model)
    claim = f"{LEASE_PREFIX}{file_records.FileRef(T, store.id, file_id)}"
    version = await setting.kv.put(claim, b"another worker", ttl_s=BOUND_S)
    await asyncio.sleep(LEASE_S)  # several renewals are due in this time
    entry = await setting.kv.get(claim)
    assert entry is not None, "the stalled worker deleted the claim"
    assert (entry.value, entry.version) == (b"another worker", version), "the stalled worker renewed the claim"
    assert model.gate is not None
    model.gate.set()
    await until(lambda: not stalled._ingest.claims, within_s=BOUND_S)  # pyright: ignore[reportPrivateUsage] - no event says that a task ended
    entry = await setting.kv.get(claim)
    assert entry is not None, "the stalled worker deleted the claim"
    assert entry.version == version
    assert (await stalled.get_file(store.id, file_id, tenant=T)).status == "in_progress"
