"""The Files promises, kept over each of the stores; and what only a clock and a dead process can show."""

import time

import pytest

from apis.documents.files import CreateFile, FileExpiry, FileListParams, Files
from apis.errors import InvalidRequest, NotFound
from apis.storage.kv_store import KVStore
from providers.files.kv import KV, MAX_UPLOAD_S, PENDING_PREFIX
from tests.conformance.files import MAX_BYTES, NEW, FilesPromises, pieces
from tests.conformance.kv_store import Backend

HOUR = FileExpiry(anchor="created_at", seconds=3600)


class OverAStore(FilesPromises):
    @pytest.fixture
    async def store(self, backend: Backend) -> KVStore:
        return await backend.open()

    @pytest.fixture
    async def files(self, store: KVStore) -> Files:
        files = KV(KV.Config(max_file_bytes=MAX_BYTES), store)
        await files.start()
        self.store_seen = store
        return files

    async def nothing_is_left(self, files: Files) -> None:
        assert [key for key, _ in await self.store_seen.scan("")] in ([], ["t/file_usage"])


class TestOverMemory(OverAStore):
    @pytest.fixture
    def backend(self, memory_backend: Backend) -> Backend:
        return memory_backend

    async def test_expired_is_gone_and_counts_no_more(self, backend: Backend, store: KVStore) -> None:
        files = KV(KV.Config(max_tenant_files=1), store)
        made = await files.create(CreateFile(purpose="user_data", expires_after=HOUR), pieces(b"x"), tenant="t")
        with pytest.raises(InvalidRequest):
            await files.create(NEW, pieces(b"y"), tenant="t")
        await backend.elapse(3601)
        with pytest.raises(NotFound):
            await files.get(made.id, tenant="t")
        assert (await files.list(FileListParams.model_validate({}), tenant="t")).data == []
        await files.create(NEW, pieces(b"y"), tenant="t")
        await backend.elapse(MAX_UPLOAD_S)
        assert len(await store.scan("t/file_piece/")) == 1

    async def test_what_a_dead_process_left_is_swept_and_what_lives_is_not(self, store: KVStore) -> None:
        files = KV(KV.Config(), store)
        kept = await files.create(NEW, pieces(b"kept"), tenant="t")
        for name, at in (("old", time.time() - 3 * MAX_UPLOAD_S), ("new", time.time()), ("deleted", 0.0)):
            await store.put(f"t/file_piece/{name}/000000", b"x")
            await store.put(f"{PENDING_PREFIX}t/{name}", b"%f" % at)
        await KV(KV.Config(), store).start()
        left = [key for key, _ in await store.scan("")]
        assert f"{PENDING_PREFIX}t/new" in left
        assert "t/file_piece/new/000000" in left
        assert not [key for key in left if "old" in key or "deleted" in key]
        assert await files.read(kept.id, tenant="t") == b"kept"


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
