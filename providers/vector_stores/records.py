"""What is known of vector stores, their files and batches, as records in a KVStore."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from apis.errors import NotFound, StackError
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put

JOB_PREFIX: Final = "~vs_work/"
LEASE_PREFIX: Final = "~vs_claim/"
EXPIRING_PREFIX: Final = "~vs_expiring/"
"""No tenant has such a name."""

_TEXT_CHUNK_BYTES: Final = 256 * 1024
_SCAN_PAGE_SIZE: Final = 1000
_SMALL_PAGE_SIZE: Final = 16

FileStatus = Literal["in_progress", "completed", "cancelled", "failed"]
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class StoreRecord(
    msgspec.Struct,
    omit_defaults=True,
    kw_only=True,
    rename={"created_at": "at", "last_active_at": "active_at", "is_emptied": "emptied"},
):
    """A vector store. `model` is what its vectors come from, as long as it lives; times are seconds since the epoch."""

    created_at: float
    last_active_at: float
    model: str
    dimensions: int | None = None
    name: str = ""
    description: str | None = None
    metadata: dict[str, str] | None = None
    expires_days: int | None = None
    is_emptied: bool = False

    @property
    def expires_at(self) -> float | None:
        return None if self.expires_days is None else self.last_active_at + self.expires_days * 86400


class FileRecord(
    msgspec.Struct,
    omit_defaults=True,
    kw_only=True,
    rename={"created_at": "at", "generation": "round", "filename": "name"},
):
    """A file in a store. `round` tells one adding of it from the next."""

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
    rename={"created_at": "at", "file_ids": "files", "was_cancelled": "cancelled"},
):
    """Files that were added together."""

    created_at: float
    file_ids: list[str]
    was_cancelled: bool = False


class JobRecord(msgspec.Struct):
    """A file that is to be made searchable, and how often that was begun."""

    attempts: int = 0


class FileRef(msgspec.Struct, frozen=True):
    """A file in a store of a tenant."""

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
    def index_namespace(self) -> str:
        """What the index calls the store."""
        return f"{self.tenant}/{self.store_id}"

    @property
    def reverse_key(self) -> str:
        return f"{self.tenant}/vs_of/{self.file_id}/{self.store_id}"

    @property
    def text_prefix(self) -> str:
        return f"{self.tenant}/vs_text/{self.store_id}/{self.file_id}/"


def new_id(prefix: str, now: float) -> str:
    """An id that sorts by the time it was made, and cannot be guessed."""
    return f"{prefix}_{int(now * 1000):012x}{secrets.token_hex(16)}"


def encode_record(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode_record(entry: Entry, record_type: type[RecordT]) -> RecordT:
    """The record. Raises StackError for one that is none."""
    try:
        return msgspec.json.decode(entry.value, type=record_type)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def store_key(tenant: str, store_id: str) -> str:
    return f"{tenant}/vs/{store_id}"


def batch_key(tenant: str, store_id: str, batch_id: str) -> str:
    return f"{tenant}/vs_batch/{store_id}/{batch_id}"


async def load_record(kv: KVStore, key: str, record_type: type[RecordT], kind_name: str) -> tuple[RecordT, int]:
    """The record and its version. Raises NotFound, in the API's words for `what`."""
    name = key.rpartition("/")[2]
    # An id of a client's may be anything, also what is no key.
    plain = name.isascii() and name.isprintable() and 0 < len(name) <= 128
    entry = await kv.get(key) if plain and key.count("/") == (3 if record_type is not StoreRecord else 2) else None
    if entry is None:
        raise NotFound(f"No {kind_name} found with id '{name[:64]}'." if plain else f"No {kind_name} has such an id.")
    return decode_record(entry, record_type), entry.version


async def scan(kv: KVStore, prefix: str, *, page_size: int = _SCAN_PAGE_SIZE) -> AsyncGenerator[tuple[str, Entry]]:
    """All entries below `prefix`, in the order of their keys."""
    last = ""
    while found := await kv.scan(prefix, after=last, limit=page_size):
        for each in found:
            yield each
        last = found[-1][0]


async def list_file_records(kv: KVStore, tenant: str, store_id: str) -> list[tuple[str, FileRecord]]:
    """The files of a store, with their ids."""
    prefix = f"{tenant}/vs_file/{store_id}/"
    return [(key[len(prefix) :], decode_record(entry, FileRecord)) async for key, entry in scan(kv, prefix)]


async def store_text(kv: KVStore, file_ref: FileRef, text: str) -> None:
    """Keep what was read out of a file, instead of what was kept before."""
    await delete_text(kv, file_ref)
    data = text.encode()
    for number, start in enumerate(range(0, len(data), _TEXT_CHUNK_BYTES)):
        await kv.write([Put(f"{file_ref.text_prefix}{number:06d}", data[start : start + _TEXT_CHUNK_BYTES])])


async def load_text(kv: KVStore, file_ref: FileRef) -> str:
    """What was read out of a file; empty where nothing was yet."""
    return b"".join(
        [entry.value async for _, entry in scan(kv, file_ref.text_prefix, page_size=_SMALL_PAGE_SIZE)]
    ).decode()


async def delete_text(kv: KVStore, file_ref: FileRef) -> None:
    """Forget what was read out of a file."""
    await delete_prefixes(kv, file_ref.text_prefix)


async def delete_prefixes(kv: KVStore, *prefixes: str) -> None:
    """Delete every key that begins with one of these."""
    for prefix in prefixes:
        while found := await kv.scan(prefix, limit=_SMALL_PAGE_SIZE if "/vs_text/" in prefix else _SCAN_PAGE_SIZE):
            await kv.write([Delete(key) for key, _ in found], durable=len(found) < _SMALL_PAGE_SIZE)


def build_store_ops(tenant: str, store_id: str, store: StoreRecord, version: int) -> Sequence[Op]:
    """Write the store's record, where it still has this version; one that may expire is noted to be looked at."""
    ops: list[Op] = [Put(store_key(tenant, store_id), encode_record(store), expect=version)]
    return ops if store.expires_days is None else [*ops, Put(f"{EXPIRING_PREFIX}{tenant}/{store_id}", b"")]


def build_add_ops(file_ref: FileRef, record: FileRecord) -> Sequence[Op]:
    """Add the file, to be made searchable by whoever gets to it first."""
    return (
        Put(file_ref.record_key, encode_record(record)),
        Put(file_ref.reverse_key, b""),
        Put(file_ref.job_key, encode_record(JobRecord())),
    )


def build_remove_ops(file_ref: FileRef) -> Sequence[Op]:
    """Take the file out."""
    return Delete(file_ref.record_key), Delete(file_ref.reverse_key), Delete(file_ref.job_key)


def build_outcome(record: FileRecord, status: FileStatus, **changes: Any) -> FileRecord:
    """The record with the outcome of its work."""
    return msgspec.structs.replace(record, status=status, **changes)
