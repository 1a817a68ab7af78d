"""The Files promises over an object store: a folder, and a server that speaks the protocol of S3."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apis.documents.files import CreateFile, FileExpiry, FileListParams, FileParts, Files
from apis.errors import ConfigError, InvalidRequest, NotFound, StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.lease import Lease
from providers.files.blob_objects import OBJECT_BYTES, blob_key
from providers.files.object_claim import CLAIM_NAME
from providers.files.object_store import ObjectStoreFiles
from providers.files.objects import Objects
from providers.kv_store.memory import Memory
from tests.conformance.files import MAX_BYTES, NEW, FilesPromises, pieces
from tests.conformance.kv_store import Backend
from tests.support.servers.s3_server import S3Server
from tests.support.unsure_store import OUTCOMES, UnsureStore

FAST: dict[str, Any] = {"max_retries": 1, "retry_timeout_s": 5, "orphan_grace_s": 0, "sweep_interval_s": 3600}


async def names_in(objects: Objects) -> list[str]:
    names = [each.name async for page in objects.list() for each in page]
    return sorted(name for name in names if name != CLAIM_NAME)


async def sweep(files: ObjectStoreFiles) -> None:
    """Look at all objects once, as the leader of all processes does."""
    lease = Lease(files.kv, "test", 60)
    await lease.acquire(expect=None)
    await files.orphans.work(lease)


async def no_ops(_size: int) -> list[Op]:
    return []


class OverObjects(FilesPromises):
    @pytest.fixture
    def place(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> KVStore:
        return Memory(Memory.Config())

    @pytest.fixture
    async def files(self, place: dict[str, Any], store: KVStore) -> AsyncIterator[Files]:
        config = ObjectStoreFiles.Config(max_file_bytes=MAX_BYTES, **FAST, **place)
        files = ObjectStoreFiles(config, store)
        self.store_seen, self.objects_seen = store, Objects(config)
        await files.start()
        yield files
        await files.close()

    async def nothing_is_left(self, files: Files) -> None:
        kinds = ("/file_store/", "/file_sweep/", "/worker_sign/")
        keys = [key for key, _ in await self.store_seen.scan("") if not key.startswith(kinds)]
        assert keys in ([], ["t/file_usage"])
        assert await names_in(self.objects_seen) == []

    @pytest.mark.parametrize("outcome", OUTCOMES)
    async def test_a_file_is_whole_or_not_there_where_its_last_write_is_unsure(
        self, place: dict[str, Any], store: KVStore, outcome: str
    ) -> None:
        unsure = UnsureStore(store)
        config = ObjectStoreFiles.Config(**FAST, **place)
        files, self.store_seen, self.objects_seen = ObjectStoreFiles(config, unsure), store, Objects(config)
        unsure.watch("t/file/", outcome)
        if outcome == "applied":
            assert (await files.create(NEW, pieces(b"x" * 600_000), tenant="t")).bytes == 600_000
        else:
            upload = asyncio.create_task(files.create(NEW, pieces(b"x" * 600_000), tenant="t"))
            with pytest.raises(asyncio.CancelledError if outcome == "cancelled" else StoreUnavailable):
                await upload
        if outcome == "late":
            assert await unsure.finish() is None
        listed = (await files.list(FileListParams(), tenant="t")).data
        assert len(listed) == (outcome in ("applied", "cancelled"))
        for file in listed:
            assert await files.read(file.id, tenant="t") == b"x" * 600_000
            await files.delete(file.id, tenant="t")
        await self.nothing_is_left(files)

    async def test_parts_become_a_file_where_they_are(self, files: Files) -> None:
        assert isinstance(files, ObjectStoreFiles)
        data = bytes(range(256)) * (OBJECT_BYTES // 256 + 5000)
        ids = [f"part_{number:044x}" for number in range(3)]
        for part_id, part in zip(ids, (data, b"unused", b"end"), strict=True):
            await files.add_part("u", part_id, pieces(part), tenant="t", life_s=3600, commit=no_ops)
        written = await names_in(files.objects)
        assert len(written) == 4
        wrong = FileParts("u", {ids[0]: len(data), ids[2]: 3}, "0" * 32)
        with pytest.raises(InvalidRequest):
            await files.join_parts(NEW, wrong, tenant="t")
        right = FileParts("u", wrong.sizes, hashlib.md5(data + b"end", usedforsecurity=False).hexdigest())
        file = await files.join_parts(NEW, right, tenant="t")
        await files.delete_parts("u", ids, tenant="t")
        assert await names_in(files.objects) == [name for name in written if ids[1] not in name]
        assert await files.read(file.id, tenant="t") == data + b"end"
        await files.delete(file.id, tenant="t")
        await self.nothing_is_left(files)

    async def test_a_damaged_object_or_record_fails_its_file_alone(self, files: Files, store: KVStore) -> None:
        assert isinstance(files, ObjectStoreFiles)
        new = [await files.create(NEW, pieces(b"x" * 100), tenant="t") for _ in range(4)]
        await files.objects.delete_folder(f"t-t/{new[0].id}")
        await files.objects.delete_folder(f"t-t/{new[1].id}")
        await files.objects.put(f"t-t/{new[1].id}/000000", b"y" * 100)
        await store.put(blob_key("t", new[2].id), b"\xff")
        for file in new[:3]:
            with pytest.raises(StorageCorrupt):
                await files.read(file.id, tenant="t")
        assert await files.read(new[3].id, tenant="t") == b"x" * 100
        assert len((await files.list(FileListParams(), tenant="t")).data) == 4
        for file in new:
            await files.delete(file.id, tenant="t")
        await self.nothing_is_left(files)

    async def test_a_folder_belongs_to_one_store(self, files: Files, place: dict[str, Any]) -> None:
        other = ObjectStoreFiles(ObjectStoreFiles.Config(**FAST, **place), Memory(Memory.Config()))
        with pytest.raises(ConfigError, match="another kv_store"):
            await other.start()
        with pytest.raises(StoreUnavailable):
            await other.create(NEW, pieces(b"x"), tenant="t")
        await other.close()

    async def test_a_folder_that_another_store_took_over_is_neither_swept_nor_written(
        self, files: Files, place: dict[str, Any]
    ) -> None:
        """Its claim was deleted while this server ran, or the object store has no conditional writes."""
        assert isinstance(files, ObjectStoreFiles)
        await files.objects.delete_folder("")  # all there is: the claim
        other = ObjectStoreFiles(ObjectStoreFiles.Config(**FAST, **place), Memory(Memory.Config()))
        file = await other.create(NEW, pieces(b"x" * 100), tenant="t")
        with pytest.raises(StoreUnavailable, match="another server"):
            await sweep(files)
        assert await other.read(file.id, tenant="t") == b"x" * 100
        with pytest.raises(StoreUnavailable, match="another server"):
            await files.create(NEW, pieces(b"x"), tenant="t")
        await other.close()

    async def test_the_bytes_of_a_tenant_are_deleted_and_of_no_other(self, files: Files) -> None:
        assert isinstance(files, ObjectStoreFiles)
        tenants = ("t", "T", "t2", "t/x", "ü", "T" * 100, "T" * 101, "T" * 200, "T" * 201)
        for tenant in tenants:
            await files.create(NEW, pieces(b"x"), tenant=tenant)
        for number, tenant in enumerate(tenants, 1):
            await files.delete_outside_of_store(tenant=tenant)
            assert len(await names_in(files.objects)) == len(tenants) - number

    async def test_a_store_that_has_lost_its_records_deletes_no_object(self, files: Files, store: KVStore) -> None:
        """A Redis that was restarted without its data; a backup of it has the records."""
        assert isinstance(files, ObjectStoreFiles)
        file = await files.create(NEW, pieces(b"x" * 100), tenant="t")
        backup = [Put(key, entry.value) for key, entry in await store.scan("")]
        await store.write([Delete(op.key) for op in backup])
        with pytest.raises(StoreUnavailable, match="lost the records"):
            await sweep(files)
        await store.write(backup)
        await sweep(files)
        assert await files.read(file.id, tenant="t") == b"x" * 100


class TestOverAFolder(OverObjects):
    @pytest.fixture
    def place(self, tmp_path: Path) -> dict[str, Any]:
        return {"url": f"file://{tmp_path}/fi les"}

    async def test_expired_files_are_swept(self, memory_backend: Backend, place: dict[str, Any]) -> None:
        store = await memory_backend.open()
        files = ObjectStoreFiles(ObjectStoreFiles.Config(**FAST, **place), store)
        hour = FileExpiry(anchor="created_at", seconds=3600)
        file = await files.create(CreateFile(purpose="user_data", expires_after=hour), pieces(b"x"), tenant="t")
        await files.create(NEW, pieces(b"y"), tenant="t")
        await memory_backend.elapse(3601)
        with pytest.raises(NotFound):
            await files.get(file.id, tenant="t")
        await sweep(files)
        assert len(await names_in(files.objects)) == 1

    async def test_what_a_write_that_was_cut_off_left_is_swept(
        self, store: KVStore, place: dict[str, Any], tmp_path: Path
    ) -> None:
        """A file system has it next to the object, under a name that no listing has. Foreign files stay."""
        hasty, patient = (
            ObjectStoreFiles(
                ObjectStoreFiles.Config.model_validate({**FAST, **place, "orphan_grace_s": grace_s}), store
            )
            for grace_s in (0, 3600)
        )
        file = await patient.create(NEW, pieces(b"x" * 100), tenant="t")
        [name] = await names_in(patient.objects)
        root = tmp_path / "fi les"
        cut, fresh = root / f"{name}#1", root / f"{name}#2"
        foreign = [root / "notes#1", root / f"{name}#x", (root / name).parent / "000001x#1"]
        for path in (cut, fresh, *foreign):
            path.write_bytes(b"x")
            os.utime(path, (0, 0))
        fresh.touch()
        await sweep(patient)
        assert [path.exists() for path in (cut, fresh)] == [False, True]
        await sweep(hasty)
        assert [path.exists() for path in (cut, fresh, *foreign)] == [False, False, True, True, True]
        assert await patient.read(file.id, tenant="t") == b"x" * 100


class TestOverS3(OverObjects):
    @pytest.fixture
    def place(self, s3_server: S3Server) -> dict[str, Any]:
        return {"url": f"s3://{s3_server.new_bucket()}/some/prefix", "endpoint": s3_server.url}
