"""StoredFiles: files in the stack's own KVStore, in chunks that every store can hold."""

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing, suppress
from typing import Final

from openai.types.file_object import FileObject

from apis.documents.files import CreateFile, FileCommit, FileParts, PartCommit, commit_nothing
from apis.errors import StackError, StoreUnavailable
from apis.storage.kv_store import Op
from apis.storage.records import delete_all
from providers.common.state.blobs import StoredChunks, delete_blob, new_blob, read_chunks
from providers.files.recorded import MAX_UPLOAD_S, FileBytes, RecordedFiles, check_md5
from providers.files.records import UploadRecord, chunk_prefix, pending_key

_DELETE_BATCH: Final = 16


class _NewChunks(StoredChunks):
    """The chunks of a new file, which expire with it."""

    _size = 0

    async def write(self, data: AsyncIterable[bytes]) -> int:
        self._size = await super().write(data)
        return self._size

    def read(self) -> AsyncGenerator[bytes]:
        return read_chunks(self.kv, self.prefix, self._size)

    @property
    def guard_ttl_s(self) -> float | None:
        return self.ttl_s

    def build_ops(self, file_id: str, life_s: float | None) -> Sequence[Op]:
        return ()


class StoredFiles(RecordedFiles):
    """Files up to tens of megabytes, shared by all workers that share the store, and gone from it when deleted.

    A part of an upload is in chunks of its own, which expire with the upload, and is copied where it joins a file.
    """

    async def start(self) -> None:
        # neither an unreachable store nor a damaged entry may prevent the start: the next start sweeps
        with suppress(StackError):
            await self.sweep_pending()

    async def add_part(
        self,
        upload_id: str,
        part_id: str,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        life_s: float,
        commit: PartCommit,
    ) -> int:
        chunks = StoredChunks(self.kv, _part_prefix(tenant, upload_id, part_id), life_s)
        async with new_blob(self.kv, chunks, f"{tenant}/upload_guard/{upload_id}/{part_id}", ttl_s=life_s) as blob:
            size = await blob.write(data)
            await blob.publish(lambda: commit(size))
        return size

    async def join_parts(
        self, request: CreateFile, parts: FileParts, *, tenant: str, commit: FileCommit = commit_nothing
    ) -> FileObject:
        data = check_md5(self._read_parts(parts, tenant), parts.md5)
        return await self.create(request, data, tenant=tenant, source="parts", commit=commit)

    async def delete_parts(self, upload_id: str, part_ids: Sequence[str], *, tenant: str) -> None:
        await delete_all(self.kv, f"{tenant}/upload_piece/{upload_id}/", page_size=_DELETE_BATCH)

    def new_bytes(self, tenant: str, blob_id: str, life_s: float | None) -> FileBytes:
        ttl_s = None if life_s is None else life_s + MAX_UPLOAD_S
        return _NewChunks(self.kv, chunk_prefix(tenant, blob_id), ttl_s)

    async def read_bytes(self, file_id: str, record: UploadRecord, tenant: str) -> AsyncGenerator[bytes]:
        if record.object_store:
            raise StoreUnavailable(
                "The bytes of this file are in an object store, which is not the `files.provider` of this server."
            )
        async with aclosing(read_chunks(self.kv, chunk_prefix(tenant, file_id), record.size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def list_blobs(self, file_id: str, tenant: str) -> Sequence[str]:
        return (file_id,)

    def build_deletion_ops(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> Sequence[Op]:
        return ()

    async def delete_bytes(self, blob_ids: Sequence[str], tenant: str) -> None:
        for blob_id in blob_ids:
            await StoredChunks(self.kv, chunk_prefix(tenant, blob_id)).delete()

    async def delete_blobs(self, file_id: str, blob_ids: Sequence[str], tenant: str) -> None:
        chunks = StoredChunks(self.kv, chunk_prefix(tenant, file_id))
        await delete_blob(self.kv, chunks, pending_key(tenant, file_id))

    async def _read_parts(self, parts: FileParts, tenant: str) -> AsyncGenerator[bytes]:
        for part_id, size in parts.sizes.items():
            prefix = _part_prefix(tenant, parts.upload_id, part_id)
            async with aclosing(read_chunks(self.kv, prefix, size)) as chunks:
                async for chunk in chunks:
                    yield chunk


def _part_prefix(tenant: str, upload_id: str, part_id: str) -> str:
    return f"{tenant}/upload_piece/{upload_id}/{part_id}/"
