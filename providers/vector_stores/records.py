"""The records of vector stores, their files and batches, in a KVStore."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from apis.documents.vector_index import VectorIndex
from apis.documents.vector_store_requests import AddFile, ChunkSizes, StaticChunking
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.storage.keys import MAX_RECORD_ID_CHARS, is_safe_id
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Op, Put
from apis.storage.records import decode_record, delete_all, encode_record, scan_all
from providers.common.jobs import JobRecord
from providers.common.state.blobs import write_chunks
from providers.common.state.scan import decode_or_skip, scan_records

JOB_PREFIX: Final = "~vs_work/"
LEASE_PREFIX: Final = "~vs_claim/"
EXPIRING_PREFIX: Final = "~vs_expiring/"
"""No tenant's name begins with a tilde, so these keys are no tenant's."""

_TEXT_PAGE_SIZE: Final = 16

FileStatus = Literal["in_progress", "completed", "cancelled", "failed"]
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class StoreRecord(
    msgspec.Struct,
    omit_defaults=True,
    kw_only=True,
):
    """A vector store. `model` is the embedding model of all its vectors; times are seconds since the epoch.
    `index_id` is the identity of the index that has its chunks. `file_counts` are the numbers of its files by status,
    and `usage_bytes` the sum of theirs: each write of a file's record changes both in the same step."""

    created_at: float
    last_active_at: float
    model: str
    dimensions: int | None = None
    name: str = ""
    description: str | None = None
    metadata: dict[str, str] | None = None
    expires_days: int | None = None
    is_emptied: bool = False
    index_id: str = ""
    file_counts: dict[FileStatus, int] = {}
    usage_bytes: int = 0

    def count_file(self, old: "FileRecord | None", new: "FileRecord | None") -> None:
        """Count a file whose record changes from `old` to `new`; None stands for no record."""
        for record, step in ((old, -1), (new, 1)):
            if record is not None:
                self.file_counts[record.status] = self.file_counts.get(record.status, 0) + step
                self.usage_bytes += step * record.usage_bytes

    def count_all(self) -> int:
        """Return the number of files."""
        return sum(self.file_counts.values())

    @property
    def expires_at(self) -> float | None:
        return None if self.expires_days is None else self.last_active_at + self.expires_days * 86400


class FileRecord(
    msgspec.Struct,
    omit_defaults=True,
    kw_only=True,
):
    """A file in a store. Each time the file is added it gets another `generation`."""

    created_at: float
    generation: str
    filename: str
    max_tokens: int
    overlap_tokens: int
    status: FileStatus = "in_progress"
    error: tuple[str, str] | None = None
    attributes: dict[str, str | bool | int | float] = {}
    usage_bytes: int = 0


class BatchRecord(
    msgspec.Struct,
    omit_defaults=True,
    kw_only=True,
):
    """A batch of files that were added together."""

    created_at: float
    file_ids: list[str]
    was_cancelled: bool = False


class FileRef(msgspec.Struct, frozen=True):
    """A file in a vector store of a tenant, and the keys of its records."""

    tenant: str
    store_id: str
    file_id: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.store_id}/{self.file_id}"

    @property
    def record_key(self) -> str:
        return f"{self.tenant}/vs_file/{self.store_id}/{self.file_id}"

    @property
    def job_key(self) -> str:
        return f"{JOB_PREFIX}{self}"

    @property
    def lease_key(self) -> str:
        return f"{LEASE_PREFIX}{self}"

    @property
    def index_namespace(self) -> str:
        """The name of the vector store in the index."""
        return f"{self.tenant}/{self.store_id}"

    @property
    def reverse_key(self) -> str:
        return f"{self.tenant}/vs_of/{self.file_id}/{self.store_id}"

    @property
    def text_prefix(self) -> str:
        return f"{self.tenant}/vs_text/{self.store_id}/{self.file_id}/"


async def require_index(index: VectorIndex, store_id: str, store: StoreRecord) -> None:
    """Raise Unsupported for a store whose chunks are in an index that this machine does not have."""
    if store.index_id != await index.identity():
        raise Unsupported(
            f"The vector store '{store_id}' is indexed in a file of another machine of this deployment, or in one that "
            "was replaced. Send what is for it to that machine, or add its files to a new vector store.",
            code="vector_store_elsewhere",
        )


def new_id(prefix: str, now: float) -> str:
    """Return a random id that sorts by its creation time."""
    return f"{prefix}_{int(now * 1000):012x}{secrets.token_hex(16)}"


def store_key(tenant: str, store_id: str) -> str:
    return f"{tenant}/vs/{store_id}"


def batch_key(tenant: str, store_id: str, batch_id: str) -> str:
    return f"{tenant}/vs_batch/{store_id}/{batch_id}"


async def load_record(kv: KVStore, key: str, record_type: type[RecordT], kind_name: str) -> tuple[RecordT, int]:
    """Return the record and its version. Raises NotFound, which names the kind of object."""
    entry = await load_entry(kv, key, kind_name)
    return decode_record(entry, record_type), entry.version


async def load_entry(kv: KVStore, key: str, kind_name: str) -> Entry:
    """Return the entry of a record, which may be damaged. Raises NotFound, which names the kind of object."""
    kind, _, path = key.partition("/")[2].partition("/")
    is_safe = is_safe_id(key.rpartition("/")[2], MAX_RECORD_ID_CHARS)
    # an id with a slash in it would name a record of another kind or store
    entry = await kv.get(key) if is_safe and path.count("/") == (0 if kind == "vs" else 1) else None
    if entry is None:
        raise not_found(kind_name, key.rpartition("/")[2])
    return entry


def not_found(kind_name: str, object_id: str) -> NotFound:
    """Return the error for an id that the tenant has no object of."""
    is_safe = is_safe_id(object_id, MAX_RECORD_ID_CHARS)
    return NotFound(
        f"No {kind_name} found with id '{object_id[:64]}'." if is_safe else f"No {kind_name} has such an id."
    )


def file_order_prefix(tenant: str, store_id: str) -> str:
    return f"{tenant}/vs_file_order/{store_id}/"


def file_order_key(file_ref: FileRef, record: FileRecord) -> str:
    """Return the key by which the files of a store are listed: it sorts by the time at which they were added."""
    prefix = file_order_prefix(file_ref.tenant, file_ref.store_id)
    return f"{prefix}{round(record.created_at * 1e6):016d}/{file_ref.file_id}"


def file_prefix(tenant: str, store_id: str) -> str:
    return f"{tenant}/vs_file/{store_id}/"


async def list_file_records(kv: KVStore, tenant: str, store_id: str) -> list[tuple[str, FileRecord]]:
    """Return the readable files of a store, with their ids."""
    prefix = file_prefix(tenant, store_id)
    return [(row.key[len(prefix) :], row.record) async for row in scan_records(kv, prefix, FileRecord)]


async def load_files(kv: KVStore, tenant: str, store_id: str, file_ids: Sequence[str]) -> list[tuple[str, FileRecord]]:
    """Return the readable ones of these files of a store, with their ids, in their order."""
    keys = [FileRef(tenant, store_id, file_id).record_key for file_id in file_ids]
    files: list[tuple[str, FileRecord]] = []
    for file_id, key, entry in zip(file_ids, keys, await kv.get_many(keys), strict=True):
        record = None if entry is None else decode_or_skip(kv, key, entry, FileRecord)
        if record is not None:
            files.append((file_id, record))
    return files


async def count_files(kv: KVStore, tenant: str, store_id: str, store: StoreRecord) -> None:
    """Set the counts of a store from the records of its files."""
    store.file_counts, store.usage_bytes = {}, 0
    for _, record in await list_file_records(kv, tenant, store_id):
        store.count_file(None, record)


async def load_store_and_files(
    kv: KVStore, tenant: str, store_id: str, file_ids: Sequence[str]
) -> tuple[StoreRecord, int, list[tuple[FileRecord | None, int]]]:
    """Return a store with counts, and files of it, each with the version of its record. A file whose record is damaged
    is None and not among the counts. Raises NotFound for the store."""
    store, version = await load_record(kv, store_key(tenant, store_id), StoreRecord, "vector store")
    keys = [FileRef(tenant, store_id, file_id).record_key for file_id in file_ids]
    files: list[tuple[FileRecord | None, int]] = []
    is_damaged = False
    for key, entry in zip(keys, await kv.get_many(keys) if keys else (), strict=True):
        record = None if entry is None else decode_or_skip(kv, key, entry, FileRecord)
        is_damaged = is_damaged or (entry is not None and record is None)
        files.append((record, ABSENT if entry is None else entry.version))
    if is_damaged:
        await count_files(kv, tenant, store_id, store)
    return store, version, files


async def store_text(kv: KVStore, file_ref: FileRef, text: str) -> None:
    """Store the extracted text of a file, in place of an earlier one."""

    async def read_text() -> AsyncGenerator[bytes]:
        yield text.encode()

    await delete_text(kv, file_ref)
    await write_chunks(kv, file_ref.text_prefix, read_text())


async def load_text(kv: KVStore, file_ref: FileRef) -> str:
    """Return the extracted text of a file; empty if there is none yet."""
    chunks = [entry.value async for _, entry in scan_all(kv, file_ref.text_prefix, page_size=_TEXT_PAGE_SIZE)]
    return b"".join(chunks).decode()


async def delete_text(kv: KVStore, file_ref: FileRef) -> None:
    """Delete the extracted text of a file."""
    await delete_all(kv, file_ref.text_prefix, page_size=_TEXT_PAGE_SIZE, durable=True)


async def delete_store_texts(kv: KVStore, tenant: str, store_id: str) -> None:
    """Delete the extracted texts of all files of a store."""
    await delete_all(kv, f"{tenant}/vs_text/{store_id}/", page_size=_TEXT_PAGE_SIZE, durable=True)


def build_store_ops(tenant: str, store_id: str, store: StoreRecord, version: int) -> Sequence[Op]:
    """Return the operations that write the store's record on the condition of its version; one that can expire is
    marked for the sweep."""
    put = Put(store_key(tenant, store_id), encode_record(store), expect=version)
    return [put, *build_expiry_ops(tenant, store_id, store)]


def build_expiry_ops(tenant: str, store_id: str, store: StoreRecord) -> Sequence[Op]:
    """Return the operation that marks a store for the sweep, if it can expire."""
    return () if store.expires_days is None else (Put(f"{EXPIRING_PREFIX}{tenant}/{store_id}", b""),)


def build_file_record(request: AddFile, filename: str, created_at: float) -> FileRecord:
    """Return the record of a file that is to be made searchable."""
    chunking = request.chunking_strategy
    sizes = chunking.static if isinstance(chunking, StaticChunking) else ChunkSizes()
    return FileRecord(
        created_at=created_at,
        generation=secrets.token_hex(8),
        filename=filename,
        max_tokens=sizes.max_chunk_size_tokens,
        overlap_tokens=sizes.chunk_overlap_tokens,
        attributes=request.attributes or {},
    )


def build_add_ops(file_ref: FileRef, record: FileRecord) -> Sequence[Op]:
    """Return the operations that add the file, with the job that makes it searchable."""
    return (
        Put(file_ref.record_key, encode_record(record)),
        Put(file_order_key(file_ref, record), b""),
        Put(file_ref.reverse_key, b""),
        Put(file_ref.job_key, encode_record(JobRecord())),
    )


def build_remove_ops(file_ref: FileRef) -> Sequence[Delete]:
    """Return the operations that remove the file from its store."""
    return Delete(file_ref.record_key), Delete(file_ref.reverse_key), Delete(file_ref.job_key)


def build_orphan_ops(file_ref: FileRef, absent_key: str) -> Sequence[Op]:
    """Return the operations that remove what is left of a file, on the condition that `absent_key` is still absent: the
    key of its record, or of its store."""
    ops = {op.key: op for op in build_remove_ops(file_ref)}
    return list({**ops, absent_key: Delete(absent_key, ABSENT)}.values())


def build_outcome(record: FileRecord, status: FileStatus, **changes: Any) -> FileRecord:
    """Return the record with the outcome of its job."""
    return msgspec.structs.replace(record, status=status, **changes)


def expired_error(store_id: str) -> InvalidRequest:
    """Return the error of a use of a vector store that has expired."""
    return InvalidRequest(f"The vector store '{store_id}' has expired.", code="vector_store_expired")
