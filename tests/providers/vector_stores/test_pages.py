"""Pages of a vector store's files: each reads what it shows, in the order in which the files were added."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from apis.documents.vector_store_requests import AddFile, CreateVectorStore, VectorStoreFileListParams
from apis.storage.kv_store import Entry, Put
from apis.storage.records import encode_record
from providers.kv_store.memory import Memory
from providers.vector_stores import records
from providers.vector_stores.objects import paginate_records
from providers.vector_stores.pages import read_file_page
from providers.vector_stores.records import FileRecord, FileRef
from tests.providers.vector_stores.test_ingest import Setting, T, settled
from tests.providers.vector_stores.test_ingest import setting as setting

FILES = 2000
STORE_ID = "vs_1"
STATUSES: Sequence[records.FileStatus] = ("in_progress", "completed", "cancelled", "failed")


class Counting(Memory):
    """A store that counts the entries that are read of it."""

    read_entries = 0

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        self.read_entries += len(keys)
        return await super().get_many(keys)

    async def scan(self, *args: Any, **fields: Any) -> list[tuple[str, Entry]]:
        rows = await super().scan(*args, **fields)
        self.read_entries += len(rows)
        return rows


async def filled(file_count: int) -> tuple[Counting, list[tuple[str, FileRecord]]]:
    """A store of records with that many files, and these, which were added in another order than that of their ids."""
    kv, rng = Counting(Memory.Config()), random.Random(7)
    files: list[tuple[str, FileRecord]] = []
    for number in rng.sample(range(file_count), file_count):
        status = rng.choice(STATUSES)
        created_at = 1_790_000_000.25 + len(files) // 3 * 1e-6  # some at the same time
        record = FileRecord(
            created_at=created_at, generation="g", filename="a", max_tokens=800, overlap_tokens=400, status=status
        )
        file_ref = FileRef(T, STORE_ID, f"file-{number:05}")
        await kv.write([op for op in records.build_add_ops(file_ref, record) if op.key != file_ref.job_key])
        if len(files) % 20 == 0:  # it was added before, and its record was damaged when it was added again
            earlier = msgspec.structs.replace(record, created_at=record.created_at - 5e-6)
            await kv.put(records.file_order_key(file_ref, earlier), b"")
        files.append((file_ref.file_id, record))
    return kv, files


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_reads_as_many_records_as_it_shows(order: str) -> None:
    """A page of 20 of 2,000 files costs a bounded number of reads, wherever it begins."""
    kv, files = await filled(FILES)
    ids = [file_id for file_id, _ in files]
    for cursors in ({}, {"after": ids[1000]}, {"before": ids[1000]}, {"after": ids[900], "before": ids[1100]}):
        kv.read_entries = 0
        params = VectorStoreFileListParams.model_validate({"limit": 20, "order": order, **cursors})
        page = await read_file_page(kv, T, STORE_ID, params)
        assert page.data == paginate_records(files, params).data
        assert kv.read_entries <= 2 * 2 * 21 + 2, cursors


async def test_pages_are_those_of_the_sorted_list() -> None:
    """Each order, cursor and filter gives what a look at all records gives."""
    kv, files = await filled(60)
    rng = random.Random(8)
    for _ in range(400):
        status = rng.choice([None, None, *STATUSES])
        page_files = [file for file in files if status in (None, file[1].status)]
        cursors = ["file-unknown", "file/unknown", *(file_id for file_id, _ in page_files)]
        after, before = (rng.choice([None, rng.choice(cursors)]) for _ in range(2))
        fields = {"limit": rng.randint(1, 30), "order": rng.choice(["asc", "desc"]), "filter": status}
        params = VectorStoreFileListParams.model_validate({"after": after, "before": before, **fields})
        expected = paginate_records(page_files, params)
        page = await read_file_page(kv, T, STORE_ID, params)
        assert (page.data, page.has_more) == (expected.data, expected.has_more), params


async def test_a_cursor_holds_its_position_when_its_file_leaves_the_filter() -> None:
    """A file that is completed while its client pages through those in progress does not send it to the beginning."""
    kv, files = await filled(60)
    running = [file for file in files if file[1].status == "in_progress"]
    file_id, record = running[5]
    completed = records.build_outcome(record, "completed")
    await kv.write([Put(FileRef(T, STORE_ID, file_id).record_key, encode_record(completed))])
    params = VectorStoreFileListParams(after=file_id, order="asc", filter="in_progress", limit=3)
    assert (await read_file_page(kv, T, STORE_ID, params)).data == running[6:9]


async def test_an_added_file_is_listed_once_and_a_removed_one_no_more(setting: Setting) -> None:
    """The place in the order is written and deleted together with the file."""
    stores = await setting.open()
    first, second = sorted([await setting.upload(text) for text in ("first", "second")])  # of one time: by their ids
    store = await stores.create(CreateVectorStore(file_ids=[first, second]), tenant=T)

    async def listed() -> list[str]:
        params = VectorStoreFileListParams(order="asc")
        return [file.id for file in (await stores.list_files(store.id, params, tenant=T)).data]

    async def order_keys() -> int:
        return len(await setting.kv.scan(f"{T}/vs_file_order/"))

    assert await listed() == [first, second]
    await settled(setting, store.id)
    await stores.add_file(store.id, AddFile(file_id=first), tenant=T)
    assert (await listed(), await order_keys()) == ([second, first], 2)
    await stores.delete_file(store.id, second, tenant=T)
    assert (await listed(), await order_keys()) == ([first], 1)
    await stores.delete(store.id, tenant=T)
    assert await order_keys() == 0
