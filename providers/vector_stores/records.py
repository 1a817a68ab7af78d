"""What is known of vector stores, their files and batches, as records in a KVStore."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from apis.errors import NotFound, StackError
from apis.storage.kv_store import Delete, Entry, KVStore, Op, Put

WORK: Final = "~vs_work/"
CLAIM: Final = "~vs_claim/"
EXPIRING: Final = "~vs_expiring/"
"""No tenant has such a name."""

_TEXT_PIECE: Final = 256 * 1024
_SCAN: Final = 1000
_FEW: Final = 16

Status = Literal["in_progress", "completed", "cancelled", "failed"]
Record = TypeVar("Record", bound=msgspec.Struct)


class Store(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A vector store. `model` is what its vectors come from, as long as it lives; times are seconds since the epoch."""

    at: float
    active_at: float
    model: str
    dimensions: int | None = None
    name: str = ""
    description: str | None = None
    metadata: dict[str, str] | None = None
    expires_days: int | None = None
    emptied: bool = False

    @property
    def expires_at(self) -> float | None:
        return None if self.expires_days is None else self.active_at + self.expires_days * 86400


class StoreFile(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A file in a store. `round` tells one adding of it from the next."""

    at: float
    round: str
    name: str
    max_tokens: int
    overlap_tokens: int
    status: Status = "in_progress"
    error: tuple[str, str] | None = None
    attributes: dict[str, str | bool | int | float] = {}
    usage_bytes: int = 0


class Batch(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Files that were added together."""

    at: float
    files: list[str]
    cancelled: bool = False


class Work(msgspec.Struct):
    """A file that is to be made searchable, and how often that was begun."""

    attempts: int = 0


class Place(msgspec.Struct, frozen=True):
    """A file in a store of a tenant."""

    tenant: str
    store: str
    file: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.store}/{self.file}"

    @property
    def record(self) -> str:
        return f"{self.tenant}/vs_file/{self.store}/{self.file}"

    @property
    def shelf(self) -> str:
        """What the index calls the store."""
        return f"{self.tenant}/{self.store}"

    @property
    def reverse(self) -> str:
        return f"{self.tenant}/vs_of/{self.file}/{self.store}"

    @property
    def text(self) -> str:
        return f"{self.tenant}/vs_text/{self.store}/{self.file}/"


def new_id(prefix: str, now: float) -> str:
    """An id that sorts by the time it was made, and cannot be guessed."""
    return f"{prefix}_{int(now * 1000):012x}{secrets.token_hex(16)}"


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(entry: Entry, kind: type[Record]) -> Record:
    """The record. Raises StackError for one that is none."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.MsgspecError as exc:
        raise StackError("A stored record cannot be read.", code="storage_corrupt") from exc


def store_key(tenant: str, store_id: str) -> str:
    return f"{tenant}/vs/{store_id}"


def batch_key(tenant: str, store_id: str, batch_id: str) -> str:
    return f"{tenant}/vs_batch/{store_id}/{batch_id}"


async def find(kv: KVStore, key: str, kind: type[Record], what: str) -> tuple[Record, int]:
    """The record and its version. Raises NotFound, in the API's words for `what`."""
    name = key.rpartition("/")[2]
    # An id of a client's may be anything, also what is no key.
    plain = name.isascii() and name.isprintable() and 0 < len(name) <= 128
    entry = await kv.get(key) if plain and key.count("/") == (3 if kind is not Store else 2) else None
    if entry is None:
        raise NotFound(f"No {what} found with id '{name[:64]}'." if plain else f"No {what} has such an id.")
    return decode(entry, kind), entry.version


async def scan(kv: KVStore, prefix: str, *, step: int = _SCAN) -> AsyncGenerator[tuple[str, Entry]]:
    """All entries below `prefix`, in the order of their keys."""
    last = ""
    while found := await kv.scan(prefix, after=last, limit=step):
        for each in found:
            yield each
        last = found[-1][0]


async def files_of(kv: KVStore, tenant: str, store_id: str) -> list[tuple[str, StoreFile]]:
    """The files of a store, with their ids."""
    prefix = f"{tenant}/vs_file/{store_id}/"
    return [(key[len(prefix) :], decode(entry, StoreFile)) async for key, entry in scan(kv, prefix)]


async def keep_text(kv: KVStore, place: Place, text: str) -> None:
    """Keep what was read out of a file, instead of what was kept before."""
    await drop_text(kv, place)
    data = text.encode()
    for number, start in enumerate(range(0, len(data), _TEXT_PIECE)):
        await kv.write([Put(f"{place.text}{number:06d}", data[start : start + _TEXT_PIECE])])


async def text_of(kv: KVStore, place: Place) -> str:
    """What was read out of a file; empty where nothing was yet."""
    return b"".join([entry.value async for _, entry in scan(kv, place.text, step=_FEW)]).decode()


async def drop_text(kv: KVStore, place: Place) -> None:
    """Forget what was read out of a file."""
    await drop_below(kv, place.text)


async def drop_below(kv: KVStore, *prefixes: str) -> None:
    """Delete every key that begins with one of these."""
    for prefix in prefixes:
        while found := await kv.scan(prefix, limit=_FEW if "/vs_text/" in prefix else _SCAN):
            await kv.write([Delete(key) for key, _ in found], durable=len(found) < _FEW)


def store_ops(tenant: str, store_id: str, store: Store, version: int) -> Sequence[Op]:
    """Write the store's record, where it still has this version; one that may expire is noted to be looked at."""
    ops: list[Op] = [Put(store_key(tenant, store_id), encode(store), expect=version)]
    return ops if store.expires_days is None else [*ops, Put(f"{EXPIRING}{tenant}/{store_id}", b"")]


def work_ops(place: Place, record: StoreFile) -> Sequence[Op]:
    """Add the file, to be made searchable by whoever gets to it first."""
    return (
        Put(place.record, encode(record)),
        Put(place.reverse, b""),
        Put(f"{WORK}{place}", encode(Work())),
    )


def file_ops(place: Place) -> Sequence[Op]:
    """Take the file out."""
    return Delete(place.record), Delete(place.reverse), Delete(f"{WORK}{place}")


def settled(record: StoreFile, status: Status, **changes: Any) -> StoreFile:
    """The record with the outcome of its work."""
    return msgspec.structs.replace(record, status=status, **changes)
