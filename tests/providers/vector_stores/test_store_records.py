"""Records of vector stores: a deleted store stays deleted, counts are in the store's record, and damage stays where it
is."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from apis.documents.vector_store_requests import (
    AddFile,
    AddFiles,
    CreateVectorStore,
    SearchStores,
    UpdateFile,
    UpdateVectorStore,
    VectorStoreFileListParams,
    VectorStoreListParams,
)
from apis.errors import NotFound, StorageCorrupt
from apis.storage.kv_store import Entry
from apis.storage.records import encode_record
from providers.common.jobs import JobRecord
from providers.vector_index.sqlite_vec import SQLiteVec
from providers.vector_stores import records
from providers.vector_stores.hybrid import HybridVectorStores
from providers.vector_stores.records import EXPIRING_PREFIX, FileRef, StoreRecord
from tests.providers.vector_stores.test_ingest import BOUND_S, Setting, T, settled
from tests.support.waiting import until_empty

DAY_S: Final = 86_400
DAMAGED_VALUES: Final = (b"\xff\xfejunk", b'[{"a":1}]')


class GatedIndex(SQLiteVec):
    """An index whose first removal of a whole store waits for a gate, while `is_gated`."""

    is_gated = False

    async def delete(self, store: str, file: str | None = None) -> None:
        if file is None and self.is_gated:
            self.is_gated = False
            self.began.set()
            await self.gate.wait()
        await super().delete(store, file)

    def arm(self) -> None:
        self.is_gated, self.began, self.gate = True, asyncio.Event(), asyncio.Event()


class Records(Setting):
    """The setting of the tests of ingestion, with a gated index."""

    def __init__(self, folder: Path, opened: AsyncExitStack) -> None:
        super().__init__(folder, opened)
        self.gated_index = GatedIndex(SQLiteVec.Config(path=str(folder / "vectors.db")))
        self.index = self.gated_index

    async def store_with(
        self, stores: HybridVectorStores, *texts: str, days: int | None = None
    ) -> tuple[str, list[str]]:
        """A store whose files are settled, and the ids of the files."""
        files = [await self.upload(text) for text in texts]
        request: dict[str, Any] = {"file_ids": files}
        if days is not None:
            request["expires_after"] = {"anchor": "last_active_at", "days": days}
        store = await stores.create(CreateVectorStore.model_validate(request), tenant=T)
        await settled(self, store.id)
        return store.id, files

    async def assert_counted(self, stores: HybridVectorStores, store_id: str) -> dict[str, int]:
        """The counts of a store are those of its files' records; returns them."""
        truth = StoreRecord(created_at=0, last_active_at=0, model="")
        await records.count_files(self.kv, T, store_id, truth)
        store = await stores.get(store_id, tenant=T)
        counts = store.file_counts.model_dump()
        assert store.usage_bytes == truth.usage_bytes
        assert truth.file_counts == {status: count for status, count in counts.items() if count and status != "total"}
        assert counts["total"] == truth.count_all()
        return counts


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Records]:
    async with AsyncExitStack() as opened:
        setting = Records(tmp_path, opened)
        opened.push_async_callback(setting.index.close)
        await setting.index.start()
        yield setting


async def sweep(stores: HybridVectorStores, store_id: str, file_id: str) -> None:
    """Sweep as the task in the background does, until the first pause."""
    task = asyncio.create_task(stores._sweep_stores())  # pyright: ignore[reportPrivateUsage] - it runs once an hour
    while not task.done() and EXPIRING_PREFIX in await sweep_marks(stores):  # noqa: ASYNC110 - a store sets no event
        await asyncio.sleep(0)
    task.cancel()


async def sweep_marks(stores: HybridVectorStores) -> str:
    kv = stores._kv  # pyright: ignore[reportPrivateUsage] - as above
    return " ".join(key for key, _ in await kv.scan(EXPIRING_PREFIX))


USES: Final[dict[str, Callable[[HybridVectorStores, str, str], Awaitable[Any]]]] = {
    "get": lambda stores, store_id, _: stores.get(store_id, tenant=T),
    "list files": lambda stores, store_id, _: stores.list_files(store_id, VectorStoreFileListParams(), tenant=T),
    "get file": lambda stores, store_id, file_id: stores.get_file(store_id, file_id, tenant=T),
    "update file": lambda stores, store_id, file_id: stores.update_file(
        store_id, file_id, UpdateFile(attributes={}), tenant=T
    ),
    "search": lambda stores, store_id, _: stores.search([store_id], SearchStores(query="whale"), tenant=T),
    "add file": lambda stores, store_id, file_id: stores.add_file(store_id, AddFile(file_id=file_id), tenant=T),
    "sweep": sweep,
}


@pytest.mark.parametrize("use", USES)
async def test_a_store_that_is_deleted_while_it_is_emptied_stays_deleted(setting: Records, use: str) -> None:
    """Every use of an expired store empties it, and none brings it back."""
    stores = await setting.open()
    store_id, [file_id] = await setting.store_with(stores, "a whale", days=1)
    stores.now = lambda: time.time() + 2 * DAY_S
    setting.gated_index.arm()
    using = asyncio.ensure_future(USES[use](stores, store_id, file_id))
    async with asyncio.timeout(BOUND_S):
        await setting.gated_index.began.wait()
        await stores.delete(store_id, tenant=T)
        setting.gated_index.gate.set()
        await asyncio.wait({using})
    if use != "sweep":
        assert isinstance(using.exception(), NotFound)
    assert (await stores.list(VectorStoreListParams(), tenant=T)).data == []
    assert [key for key, _ in await setting.kv.scan("") if "/vs" in key or "~vs" in key] == []


async def test_a_file_that_is_added_to_a_store_while_that_is_deleted_leaves_nothing(setting: Records) -> None:
    """The addition holds only for a store that is there."""
    stores = await setting.open()
    store_id, _ = await setting.store_with(stores)
    file_id = await setting.upload("late")
    get = setting.files.get

    async def delete_and_get(*args: Any, **kwargs: Any) -> Any:
        await stores.delete(store_id, tenant=T)
        return await get(*args, **kwargs)

    setting.files.get = delete_and_get  # type: ignore[method-assign]  # the step before the write
    with pytest.raises(NotFound):
        await stores.add_file(store_id, AddFile(file_id=file_id), tenant=T)
    assert [key for key, _ in await setting.kv.scan("") if "/vs" in key or "~vs" in key] == []


async def test_a_deletion_that_its_process_did_not_finish_is_finished_by_the_sweep(setting: Records) -> None:
    """Nothing remains of a deleted store, in the index neither."""
    stores = await setting.open()
    store_id, [_, file_id] = await setting.store_with(stores, "a whale", "a ship")
    setting.gated_index.arm()
    deleting = asyncio.create_task(stores.delete(store_id, tenant=T))
    async with asyncio.timeout(BOUND_S):
        await setting.gated_index.began.wait()
        deleting.cancel()
        await asyncio.wait({deleting})
        await sweep(stores, store_id, file_id)
    assert await setting.indexed(store_id) == []
    assert [key for key, _ in await setting.kv.scan("") if "/vs" in key or "~vs" in key] == []


async def test_the_counts_of_a_store_are_those_of_its_files(setting: Records) -> None:
    """Each change of a file's record changes the counts of its store in the same step."""
    stores = await setting.open()
    store_id, files = await setting.store_with(stores, "a whale", "a ship", "\0")
    assert await setting.assert_counted(stores, store_id) == {
        "in_progress": 0,
        "completed": 2,
        "failed": 1,
        "cancelled": 0,
        "total": 3,
    }
    await stores.update_file(store_id, files[0], UpdateFile(attributes={"a": 1}), tenant=T)
    await stores.add_file(store_id, AddFile(file_id=files[0]), tenant=T)
    await setting.assert_counted(stores, store_id)
    await settled(setting, store_id)
    await stores.update(store_id, UpdateVectorStore(name="other"), tenant=T)
    await stores.delete_file(store_id, files[1], tenant=T)
    assert (await setting.assert_counted(stores, store_id))["total"] == 2
    await setting.files.delete(files[2], tenant=T)
    await stores.forget_file(files[2], tenant=T)
    assert (await setting.assert_counted(stores, store_id))["failed"] == 0
    await stores.close()
    batch = await stores.add_files(store_id, AddFiles(file_ids=[await setting.upload("x") for _ in range(3)]), tenant=T)
    assert (await setting.assert_counted(stores, store_id))["in_progress"] == 3
    await stores.cancel_batch(store_id, batch.id, tenant=T)
    assert (await setting.assert_counted(stores, store_id))["cancelled"] == 3


async def test_a_store_and_a_page_of_stores_read_no_records_of_files(setting: Records) -> None:
    """The work of a GET does not grow with the files of the store."""
    stores = await setting.open()
    store_id, _ = await setting.store_with(stores, "a whale", "a ship")
    await stores.close()
    scan, prefixes = setting.kv.scan, list[str]()

    async def recording_scan(prefix: str, **options: Any) -> list[tuple[str, Entry]]:
        prefixes.append(prefix)
        return await scan(prefix, **options)

    setting.kv.scan = recording_scan  # type: ignore[method-assign]  # to see the reads
    added = AddFile(file_id=await setting.upload("more"))
    assert (await stores.get(store_id, tenant=T)).file_counts.total == 2
    assert (await stores.list(VectorStoreListParams(), tenant=T)).data[0].file_counts.completed == 2
    await stores.add_file(store_id, added, tenant=T)
    assert (await stores.get(store_id, tenant=T)).file_counts.total == 3
    assert prefixes == ["t/vs/"]


async def test_two_processes_that_change_one_store_lose_no_count(setting: Records) -> None:
    """Additions and results of several processes at once."""
    one, two = await setting.open(), await setting.open()
    store_id, _ = await setting.store_with(one)
    files = [await setting.upload(f"file {number}") for number in range(4)]
    await asyncio.gather(
        *[
            stores.add_file(store_id, AddFile(file_id=file_id), tenant=T)
            for stores, half in ((one, files[::2]), (two, files[1::2]))
            for file_id in half
        ],
        *[one.update(store_id, UpdateVectorStore(name=f"{number}"), tenant=T) for number in range(8)],
    )
    await settled(setting, store_id)
    assert (await setting.assert_counted(one, store_id))["completed"] == 4


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
@pytest.mark.parametrize("kind", ["job", "file", "store"])
async def test_a_damaged_record_of_one_tenant_stops_no_other_tenants_files(
    setting: Records, kind: str, damaged: bytes
) -> None:
    """The files of others become searchable, also those of a process that starts later."""
    first = await setting.open()
    await first.close()
    lost = await first.create(CreateVectorStore(), tenant="a")
    owner = FileRef("a", lost.id, "file-x")
    record = records.build_file_record(AddFile(file_id="file-x"), "x", 1.0)
    for key, value in (
        (owner.record_key, encode_record(record)),
        (owner.job_key, encode_record(JobRecord())),
        ({"job": owner.job_key, "file": owner.record_key, "store": f"a/vs/{lost.id}"}[kind], damaged),
    ):
        await setting.kv.put(key, value)
    stores = await setting.open()
    store_id, [file_id] = await setting.store_with(stores, "a whale")
    assert (await stores.get_file(store_id, file_id, tenant=T)).status == "completed"
    assert stores._ingest._watcher is not None  # pyright: ignore[reportPrivateUsage] - the watcher is alive
    assert not stores._ingest._watcher.done()  # pyright: ignore[reportPrivateUsage] - as above


@pytest.mark.parametrize("damaged", DAMAGED_VALUES)
async def test_an_owner_lists_the_others_and_deletes_what_is_damaged(setting: Records, damaged: bytes) -> None:
    """A damaged store and a damaged file are an error for their owner, and can be deleted by id."""
    stores = await setting.open()
    store_id, files = await setting.store_with(stores, "a whale", "a ship")
    lost_id, _ = await setting.store_with(stores, "lost")
    file_ref = FileRef(T, store_id, files[0])
    await setting.kv.put(file_ref.record_key, damaged)
    await setting.kv.put(f"{T}/vs/{lost_id}", damaged)
    assert [store.id for store in (await stores.list(VectorStoreListParams(), tenant=T)).data] == [store_id]
    listed = await stores.list_files(store_id, VectorStoreFileListParams(), tenant=T)
    assert [file.id for file in listed.data] == files[1:]
    hits = await stores.search([store_id], SearchStores(query="whale ship"), tenant=T)
    assert [hit.file_id for hit in hits] == files[1:]
    for call in (stores.get(lost_id, tenant=T), stores.get_file(store_id, files[0], tenant=T)):
        with pytest.raises(StorageCorrupt):
            await call
    await stores.delete_file(store_id, files[0], tenant=T)
    await stores.delete(lost_id, tenant=T)
    assert (await setting.assert_counted(stores, store_id))["completed"] == 1
    await setting.kv.put(f"{T}/vs/{store_id}", damaged)
    await stores.delete_all(tenant=T)
    assert await setting.indexed(store_id) == []
    assert not [key for key, _ in await setting.kv.scan("") if "/vs" in key]


async def test_a_damaged_expired_store_does_not_stop_the_sweep(setting: Records) -> None:
    """The other expired stores are emptied."""
    stores = await setting.open()
    damaged_id, _ = await setting.store_with(stores, days=1)
    store_id, _ = await setting.store_with(stores, "a whale", days=1)
    await setting.kv.put(f"{T}/vs/{damaged_id}", b"\xff")
    stores.now = lambda: time.time() + 2 * DAY_S
    task = asyncio.create_task(stores._sweep_stores())  # pyright: ignore[reportPrivateUsage] - it runs once an hour
    await until_empty(lambda: setting.indexed(store_id), within_s=BOUND_S)
    assert not task.done()
    task.cancel()


async def test_a_file_whose_content_is_damaged_has_failed(setting: Records) -> None:
    """Its owner sees the reason, and the job is not repeated for ever."""
    stores = await setting.open()
    file_id = await setting.upload("a whale")
    [(key, _)] = await setting.kv.scan(f"{T}/file_piece/{file_id}/")
    await setting.kv.put(key, b"x")
    store = await stores.create(CreateVectorStore(file_ids=[file_id]), tenant=T)
    await settled(setting, store.id)
    file = await stores.get_file(store.id, file_id, tenant=T)
    assert file.status == "failed"
    assert file.last_error is not None
    assert "damaged" in file.last_error.message
