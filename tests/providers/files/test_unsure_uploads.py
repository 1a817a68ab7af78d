"""Uploads in parts where the outcome of a write is unknown: a part and the file are whole or not there at all."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from apis.documents.files import FileListParams
from apis.errors import InvalidRequest, StorageCorrupt, StoreUnavailable
from apis.storage.kv_store import Delete
from apis.uploads import CompleteUpload, CreateUpload
from providers.common.state.blobs import CHUNK_BYTES
from providers.files.kv import StoredFiles
from providers.kv_store.memory import Memory
from providers.uploads.kv import StoredUploads
from tests.support.unsure_store import OUTCOMES, UnsureStore

DATA = bytes(range(256)) * 1500


async def chunks(data: bytes) -> AsyncGenerator[bytes]:
    yield data


@dataclass
class Uploading:
    """Uploads over a store of unsure outcomes, and one that has begun."""

    store: UnsureStore
    files: StoredFiles
    uploads: StoredUploads
    upload_id: str

    async def add_part(self, data: bytes = DATA) -> str:
        return (await self.uploads.add_part(self.upload_id, chunks(data), tenant="t")).id

    async def complete(self, part_id: str) -> bytes:
        """Complete the upload with the part; return the content of the file."""
        request = CompleteUpload(part_ids=[part_id], md5=None)
        upload = await self.uploads.complete(self.upload_id, request, tenant="t")
        assert upload.file is not None
        return await self.files.read(upload.file.id, tenant="t")

    async def stored(self, kind: str) -> list[str]:
        return [key for key, _ in await self.store.scan(f"t/{kind}/")]


@pytest.fixture
async def uploading() -> Uploading:
    store = UnsureStore(Memory(Memory.Config()))
    files = StoredFiles(StoredFiles.Config(), store)
    uploads = StoredUploads(StoredUploads.Config(), store, files)
    request = CreateUpload(bytes=len(DATA), filename="a", mime_type="text/plain", purpose="user_data")
    return Uploading(store, files, uploads, (await uploads.create(request, tenant="t")).id)


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_part_is_whole_or_not_there(uploading: Uploading, outcome: str) -> None:
    """The chunks of a part that counts are never deleted."""
    uploading.store.watch("t/upload_part/", outcome)
    if outcome == "applied":
        assert await uploading.complete(await uploading.add_part()) == DATA
        return
    with pytest.raises(asyncio.CancelledError if outcome == "cancelled" else StoreUnavailable):
        await uploading.add_part()
    if outcome == "late":
        assert await uploading.store.finish() is None
    parts = await uploading.stored("upload_part")
    if outcome == "cancelled":
        assert await uploading.complete(parts[0].rpartition("/")[2]) == DATA
    else:
        assert (parts, await uploading.stored("upload_piece"), await uploading.stored("upload_guard")) == ([], [], [])


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_completed_upload_has_a_whole_file(uploading: Uploading, outcome: str) -> None:
    """Completing it again returns the same file, or makes it."""
    part_id = await uploading.add_part()
    uploading.store.watch("t/file/", outcome)
    if outcome == "applied":
        assert await uploading.complete(part_id) == DATA
    else:
        with pytest.raises(asyncio.CancelledError if outcome == "cancelled" else StoreUnavailable):
            await uploading.complete(part_id)
        if outcome == "late":
            assert await uploading.store.finish() is None
    assert await uploading.complete(part_id) == DATA
    assert len((await uploading.files.list(FileListParams(), tenant="t")).data) == 1


async def test_two_completions_at_once_make_one_file(uploading: Uploading) -> None:
    """The second one finds the upload completed and makes no file."""
    part_id = await uploading.add_part()
    results = await asyncio.gather(*[uploading.complete(part_id) for _ in range(5)], return_exceptions=True)
    assert DATA in results
    assert all(result == DATA or isinstance(result, InvalidRequest) for result in results)
    assert len(await uploading.stored("file")) == 1
    assert len(await uploading.stored("file_piece")) == -(-len(DATA) // CHUNK_BYTES)


async def test_a_part_that_lost_its_content_is_an_error(uploading: Uploading) -> None:
    """No file appears of which a part cannot be read."""
    part_id = await uploading.add_part()
    await uploading.store.write([Delete((await uploading.stored("upload_piece"))[-1])])
    with pytest.raises(StorageCorrupt):
        await uploading.complete(part_id)
    assert await uploading.stored("file") == []
    assert await uploading.stored("file_piece") == []
