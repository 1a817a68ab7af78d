"""A process that works with files in an object store, and is killed by its own hand at one point of that work."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec

from apis.documents.files import CreateFile, FileParts
from apis.storage.kv_store import KVStore, Op
from providers.files.blob_objects import PIECE_BYTES
from providers.files.object_store import ObjectStoreFiles
from providers.kv_store.sqlite import SQLite
from tests.support.forwarding_store import ForwardingStore

PROGRAM: Final = "from tests.support.servers.dying_files import main; main()"
DATA: Final = bytes(range(256)) * ((2 * PIECE_BYTES + 500) // 256)
NEW: Final = CreateFile(filename="a.txt", purpose="user_data")
PART_IDS: Final = [f"part_{number:044x}" for number in range(2)]
POINTS: Final = (
    "create in data",
    "create before record",
    "create after record",
    "part in data",
    "part after record",
    "join before record",
    "join after record",
    "delete before record",
    "delete after record",
)


class DyingStore(ForwardingStore):
    """Kills its process at a write that lets a file appear or disappear: `before` or `after` it."""

    def __init__(self, store: KVStore, moment: str) -> None:
        super().__init__(store)
        self._moment = moment
        self.watched_prefix = "-"

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        is_watched = any(op.key.startswith(self.watched_prefix) for op in ops)
        if is_watched and self._moment == "before":
            die()
        versions = await self._store.write(ops, durable=durable)
        if is_watched and self._moment == "after":
            die()
        return versions


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def data(*, dies: bool = False) -> AsyncGenerator[bytes]:
    yield DATA[: PIECE_BYTES + 10]
    if dies:
        die()
    yield DATA[PIECE_BYTES + 10 :]


async def no_ops(_size: int) -> list[Op]:
    return []


async def work(folder: str, config: str, point: str) -> None:
    """Do the work of the point's name; a file that is acknowledged is printed."""
    action, moment, _ = point.split()
    sqlite = SQLite(SQLite.Config(path=f"{folder}/store.db"))
    await sqlite.start()
    store = DyingStore(sqlite, moment)
    files = ObjectStoreFiles(ObjectStoreFiles.Config(**msgspec.json.decode(config)), store)
    files.object_bytes = PIECE_BYTES
    await files.claim()
    dies = moment == "in"
    print((await files.create(NEW, data(), tenant="t")).id, flush=True)
    if action == "create":
        store.watched_prefix = "t/file/"
        await files.create(NEW, data(dies=dies), tenant="t")
    elif action == "delete":
        file = await files.create(NEW, data(), tenant="t")
        store.watched_prefix = "t/file/"
        await files.delete(file.id, tenant="t")
    else:
        await files.add_part("u", PART_IDS[0], data(), tenant="t", life_s=7200, commit=no_ops)
        store.watched_prefix = f"t/file_object/{PART_IDS[1]}" if action == "part" else "t/file/"
        await files.add_part("u", PART_IDS[1], data(dies=dies), tenant="t", life_s=7200, commit=no_ops)
        await files.join_parts(NEW, FileParts("u", dict.fromkeys(PART_IDS, len(DATA))), tenant="t")


def main() -> None:
    asyncio.run(work(*sys.argv[1:4]))
