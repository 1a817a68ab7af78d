"""Records of Python sessions in the KVStore: what they cost, and what other machines learn from them."""

import shutil
from collections.abc import Sequence

import pytest

from apis.containers import CreateContainer
from apis.errors import StoreUnavailable, ToolFailed, Unsupported
from apis.storage.kv_store import Entry, KVStore, Op
from providers.kv_store.memory import Memory
from providers.tool_runtime.python import machine_sessions
from providers.tool_runtime.python.operations import SessionOperations
from tests.providers.tool_runtime.python.test_python import names, program, server_socket, started, text_of

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

TENANT = "tenant"
NEW = CreateContainer(name="c")


class Counting(Memory):
    """A store that counts its reads and writes."""

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
        store.writes = store.reads = 0
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
        await containers.delete(identity, tenant=TENANT)
        assert (store.writes, store.reads) == (2, 0)
        assert await records(store) == []


async def test_a_record_is_renewed_by_use_and_outlives_the_idle_time() -> None:
    store = Counting()
    store.now = lambda: now
    now = 0.0
    async with started(store, idle_timeout_s=0.5, timeout_s=5) as python:
        store.writes = 0
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
        assert len(await records(store)) == 1


class Full(Counting):
    """A store without room for more once `is_full` is set."""

    is_full = False

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> list[int] | None:
        if self.is_full:
            raise StoreUnavailable("The store is full.")
        return await super().write(ops, durable=durable)


async def test_a_container_whose_record_cannot_be_written_is_not_created() -> None:
    store = Full()
    async with started(store, timeout_s=5) as python:
        store.is_full = True
        with pytest.raises(ToolFailed, match="full"):
            await python.call(program("1"))
        assert await names(python) == []
        assert await text_of(python, "1", None) == "1"


async def test_what_another_machine_keeps_is_neither_used_nor_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    async with started(store, timeout_s=5) as python:
        with monkeypatch.context() as patched:
            patched.setattr(machine_sessions, "_machine", lambda: "another machine")
            await python.call(program("x = 1", "far"))
        sessions = python._sessions._client  # pyright: ignore[reportPrivateUsage] - the machine's own
        await sessions.call(SessionOperations.end, TENANT, "far")
        containers = python.containers()
        for asking in (containers.get("far", tenant=TENANT), containers.delete("far", tenant=TENANT)):
            with pytest.raises(Unsupported, match="another machine") as caught:
                await asking
            assert caught.value.code == "container_elsewhere"
        with pytest.raises(Unsupported, match="another machine"):
            await containers.create(NEW, tenant=TENANT, container_id="far")
        with pytest.raises(ToolFailed, match="another machine"):
            await python.call(program("1", "far"))
        assert await names(python) == []
        assert len(await records(store)) == 1


async def test_a_deployment_has_one_id_and_others_have_another() -> None:
    store = Counting()
    async with started(store) as one, started(store) as same, started() as other:
        assert server_socket(one) == server_socket(same) != server_socket(other)
        assert await text_of(one, "x = 1") == "[no output]"
        assert "NameError" in await text_of(other, "x")
