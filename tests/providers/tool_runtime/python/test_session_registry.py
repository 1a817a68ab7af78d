"""What one process tells the others of the Python sessions that it keeps, and what that costs."""

import shutil
from collections.abc import Sequence

import pytest

from apis.containers import CreateContainer
from apis.errors import ToolFailed
from apis.storage.kv_store import Entry, KVStore, Op
from providers.kv_store.memory import Memory
from tests.providers.tool_runtime.python.test_python import names, program, started, text_of

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

TENANT = "tenant"
NEW = CreateContainer(name="c")


class Counting(Memory):
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__(Memory.Config())
        self.writes = 0
        self.reads = 0

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        self.writes += 1
        return await super().write(ops, durable=durable)

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        self.reads += 1
        return await super().get_many(keys)


async def records(store: KVStore, tenant: str = TENANT) -> list[str]:
    return [key for key, _ in await store.scan(f"{tenant}/container/")]


async def test_one_process_writes_once_for_a_container_and_reads_nothing() -> None:
    store = Counting()
    async with started(store, timeout_s=5) as python:
        containers = python.containers()
        identity = (await containers.create(NEW, tenant=TENANT)).id
        for _ in range(3):
            await text_of(python, "x = 1", identity)
            file = await containers.add_file(identity, "f", b"1", tenant=TENANT)
            await containers.content(identity, file.id, tenant=TENANT)
            await containers.get(identity, tenant=TENANT)
        assert (store.writes, store.reads) == (1, 0)
        await text_of(python, "x = 1", None)
        assert (store.writes, store.reads) == (1, 0)
    assert store.writes == 2
    assert await records(store) == []


async def test_a_record_is_renewed_by_use_and_outlives_the_idle_time() -> None:
    store = Counting()
    store.now = lambda: now
    now = 0.0
    async with started(store, idle_timeout_s=0.5, timeout_s=5) as python:
        await text_of(python, "import time; time.sleep(0.6)")
        assert store.writes == 1
        await text_of(python, "1")
        await text_of(python, "1")
        assert store.writes == 2
        now = 0.5 + 3 * 5
        assert len(await records(store)) == 1
        now = 1 + 3 * 5 + 61
        assert await records(store) == []
        await text_of(python, "time.sleep(0.6)")
        await text_of(python, "1")
        await python._registry.close()  # pyright: ignore[reportPrivateUsage] - until it is written
        assert len(await records(store)) == 1


async def test_a_container_that_cannot_be_told_of_is_not_made() -> None:
    store = Memory(Memory.Config(max_bytes=1))
    async with started(store, timeout_s=5) as python:
        with pytest.raises(ToolFailed, match="full"):
            await python.call(program("1"))
        assert await names(python) == []
        assert await text_of(python, "1", None) == "1"
