"""The Files promises, kept over each of the stores; and what only a clock and a dead process can show."""

import asyncio
import time

import pytest

from apis.documents.files import CreateFile, FileExpiry, FileListParams, Files
from apis.errors import InvalidRequest, NotFound, StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import KVStore
from providers.files.kv import StoredFiles
from providers.files.recorded import MAX_UPLOAD_S
from providers.files.records import PENDING_PREFIX
from tests.conformance.files import MAX_BYTES, NEW, FilesPromises, pieces
from tests.conformance.kv_store import Backend
from tests.support.unsure_store import OUTCOMES, UnsureStore

HOUR = FileExpiry(anchor="created_at", seconds=3600)


class OverAStore(FilesPromises):
    @pytest.fixture
    async def store(self, backend: Backend) -> KVStore:
        return await backend.open()

    @pytest.fixture
    async def files(self, store: KVStore) -> Files:
        files = StoredFiles(StoredFiles.Config(max_file_bytes=MAX_BYTES), store)
        await files.start()
        self.store_seen = store
        return files

    @pytest.mark.parametrize("outcome", OUTCOMES)
    async def test_a_file_is_whole_or_not_there_where_its_last_write_is_unsure(
        self, store: KVStore, outcome: str
    ) -> None:
        """After any exception the file is unknown and nothing of it is left, or its content is whole."""
        unsure = UnsureStore(store)
        self.store_seen = store
        files = StoredFiles(StoredFiles.Config(), unsure)
        unsure.watch("t/file/", outcome)
        data = b"x" * 600_000
        if outcome == "applied":
            assert (await files.create(NEW, pieces(data), tenant="t")).bytes == len(data)
        else:
            upload = asyncio.create_task(files.create(NEW, pieces(data), tenant="t"))
            with pytest.raises(asyncio.CancelledError if outcome == "cancelled" else StoreUnavailable):
                await upload
        if outcome == "late":
            assert await unsure.finish() is None
        listed = (await files.list(FileListParams(), tenant="t")).data
        assert len(listed) == (outcome in ("applied", "cancelled"))
        for file in listed:
            assert await files.read(file.id, tenant="t") == data
            await files.delete(file.id, tenant="t")
        await self.nothing_is_left(files)

    async def nothing_is_left(self, files: Files) -> None:
        assert [key for key, _ in await self.store_seen.scan("")] in ([], ["t/file_usage"])


class TestOverMemory(OverAStore):
    @pytest.fixture
    def backend(self, memory_backend: Backend) -> Backend:
        return memory_backend

    async def test_expired_is_gone_and_counts_no_more(self, backend: Backend, store: KVStore) -> None:
        files = StoredFiles(StoredFiles.Config(max_tenant_files=1), store)
        new_file = await files.create(CreateFile(purpose="user_data", expires_after=HOUR), pieces(b"x"), tenant="t")
        with pytest.raises(InvalidRequest):
            await files.create(NEW, pieces(b"y"), tenant="t")
        await backend.elapse(3601)
        with pytest.raises(NotFound):
            await files.get(new_file.id, tenant="t")
        assert (await files.list(FileListParams.model_validate({}), tenant="t")).data == []
        await files.create(NEW, pieces(b"y"), tenant="t")
        await backend.elapse(MAX_UPLOAD_S)
        assert len(await store.scan("t/file_piece/")) == 1

    async def test_what_a_dead_process_left_is_swept_and_what_lives_is_not(self, store: KVStore) -> None:
        files = StoredFiles(StoredFiles.Config(), store)
        old_file = await files.create(NEW, pieces(b"kept"), tenant="t")
        for name, at in (("old", time.time() - 3 * MAX_UPLOAD_S), ("new", time.time()), ("deleted", 0.0)):
            await store.put(f"t/file_piece/{name}/000000", b"x")
            await store.put(f"{PENDING_PREFIX}t/{name}", b"%f" % at)
        await StoredFiles(StoredFiles.Config(), store).start()
        remaining_keys = [key for key, _ in await store.scan("")]
        assert f"{PENDING_PREFIX}t/new" in remaining_keys
        assert "t/file_piece/new/000000" in remaining_keys
        assert not [key for key in remaining_keys if "old" in key or "deleted" in key]
        assert await files.read(old_file.id, tenant="t") == b"kept"

    @pytest.mark.parametrize("damaged", [b"\xff", b'{"a":1}'])
    async def test_a_damaged_pending_key_does_not_prevent_the_start(self, store: KVStore, damaged: bytes) -> None:
        """Everything else that dead processes have left is swept."""
        await store.put(f"{PENDING_PREFIX}t/aaa", damaged)
        await store.put("t/file_piece/old/000000", b"x")
        await store.put(f"{PENDING_PREFIX}t/old", b"0.0")
        await StoredFiles(StoredFiles.Config(), store).start()
        assert [key for key, _ in await store.scan("")] == [f"{PENDING_PREFIX}t/aaa"]

    @pytest.mark.parametrize("damaged", [b"\xff", b'{"a":1}'])
    async def test_an_owner_lists_and_deletes_around_damaged_records(self, store: KVStore, damaged: bytes) -> None:
        """The damaged file can be deleted by its id, and a damaged sum of the tenant's bytes is counted again."""
        files = StoredFiles(StoredFiles.Config(max_tenant_files=3), store)
        files_created = [await files.create(NEW, pieces(b"x"), tenant="t") for _ in range(3)]
        files_created.sort(key=lambda file: file.id)  # those of one millisecond are in no order
        await store.put(f"t/file/{files_created[1].id}", damaged)
        for limit in (1, 10):
            listed = (await files.list(FileListParams(limit=limit), tenant="t")).data
            assert [file.id for file in listed] == [files_created[2].id, files_created[0].id][:limit]
        with pytest.raises(StorageCorrupt):
            await files.get(files_created[1].id, tenant="t")
        await store.put("t/file_usage", damaged)
        await files.delete(files_created[1].id, tenant="t")
        await files.create(NEW, pieces(b"x"), tenant="t")
        with pytest.raises(InvalidRequest):
            await files.create(NEW, pieces(b"x"), tenant="t")


class TestOverSQLite(OverAStore):
    @pytest.fixture
    def backend(self, sqlite_backend: Backend) -> Backend:
        return sqlite_backend


class TestOverRedis(OverAStore):
    @pytest.fixture
    def backend(self, redis_backend: Backend) -> Backend:
        return redis_backend


class TestOverPostgres(OverAStore):
    @pytest.fixture
    def backend(self, postgres_backend: Backend) -> Backend:
        return postgres_backend
