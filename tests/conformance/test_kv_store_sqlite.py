"""Failures that only a file has: a killed writer, a full disk, a lock held by others, a file that is not ours."""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from apis.errors import ConfigError, StoreUnavailable
from apis.storage.kv_store import ABSENT, Delete, Entry, Put
from providers.kv_store.clock import StoreClock
from providers.kv_store.sqlite import SQLite
from providers.kv_store.sqlite_checkpoints import WalCheckpoints
from providers.kv_store.sqlite_file import Database
from tests.support.servers.forked_process import forked_process

BOUND_S = 30

WRITER = """
import asyncio, itertools, os, sys
from providers.kv_store.clock import StoreClock
from providers.kv_store.sqlite import SQLite

async def main():
    store = SQLite(SQLite.Config(path=sys.argv[1]))
    await store.start()
    async def write(name):
        for i in itertools.count():
            await store.put(f"{name}/{i}", b"x" * 500)
            os.write(1, f"{name}/{i}\\n".encode())
    await asyncio.gather(*[write(name) for name in range(16)])

asyncio.run(main())
"""


class Stores:
    """Opens stores in one folder; all are closed when the test ends, however it ends: each has a thread."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.path = folder / "store.db"
        self._stack = stack

    async def open(self, path: Path | None = None, *, now: Callable[[], float] = time.time, **config: float) -> SQLite:
        store = SQLite(SQLite.Config.model_validate({"path": str(path or self.path), **config}))
        store.now = now
        self._stack.push_async_callback(store.close)
        await store.start()
        return store

    async def refuse(self, path: Path, because: str) -> None:
        """Assert that a store does not start there, says why, and leaves the file as it was."""
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ConfigError, match=because) as caught:
            await self.open(path)
        assert str(path) in str(caught.value)
        assert (path.read_bytes() if path.is_file() else None) == before


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    async with AsyncExitStack() as stack:
        yield Stores(tmp_path, stack)


async def test_a_killed_writer_loses_nothing_it_acknowledged(stores: Stores) -> None:
    async with forked_process(WRITER, str(stores.path), stderr=2) as writer:
        async with asyncio.timeout(BOUND_S):
            acknowledged = [(await writer.stdout.readline()).decode().strip() for _ in range(300)]
        writer.kill()
        rest = await writer.stdout.read()
    acknowledged += [line for line in rest.decode().split("\n")[:-1] if line]
    store = await stores.open()
    entries = await store.get_many(acknowledged)
    await store.close()
    assert len(acknowledged) >= 300
    assert all(entry is not None and entry.value == b"x" * 500 for entry in entries)


@pytest.mark.parametrize(("survives", "level"), [(True, "FULL"), (False, "NORMAL")])
async def test_a_durable_write_waits_for_the_disk_unless_the_config_says_otherwise(
    stores: Stores, survives: bool, level: str
) -> None:
    store = await stores.open(survives_power_loss=survives)
    levels = [await synchronous_level(store, durable=durable) for durable in (True, False, True)]
    assert levels == [level, "NORMAL", level]


async def synchronous_level(store: SQLite, *, durable: bool) -> str:
    """Write, and return how SQLite wrote it."""
    await store.put("a", b"1", durable=durable)
    connection = store._connection  # pyright: ignore[reportPrivateUsage] - the level is its own
    assert connection is not None
    [[level]] = await connection.execute_fetchall("PRAGMA synchronous")
    return {1: "NORMAL", 2: "FULL"}[level]


async def test_a_full_file_refuses_writes_goes_on_reading_and_recovers(stores: Stores) -> None:
    store = await stores.open(max_bytes=512 * 1024)
    stored = await fill(store)
    assert stored > 50
    assert len(await store.scan("k")) == stored
    # One that does not fit fails alone; its neighbours of the same batch are written.
    large, few, small = await asyncio.gather(
        store.put("large", b"x" * 100_000),
        store.write([Delete("k0000")]),
        store.put("k0001", b""),
        return_exceptions=True,
    )
    assert isinstance(large, StoreUnavailable)
    assert few == [ABSENT]
    assert isinstance(small, int)
    assert await store.get_many(["large", "k0000"]) == [None, None]
    await store.write([Delete(f"k{i:04}") for i in range(2, 50)])
    assert await store.put("large", b"x" * 100_000) > 0


async def fill(store: SQLite) -> int:
    """Put entries until the store says that it is full; returns how many it took."""
    for i in range(1000):
        try:
            await store.put(f"k{i:04}", b"x" * 4000)
        except StoreUnavailable as exc:
            assert "full" in exc.message  # noqa: PT017 - the loop is what is tested
            return i
    raise AssertionError("never full")


async def test_a_lock_held_too_long_is_unavailable_and_then_forgotten(stores: Stores) -> None:
    store = await stores.open(busy_timeout_s=0.2)
    await store.put("a", b"1")
    other = sqlite3.connect(stores.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.put("a", b"2")
    assert time.monotonic() - began < 1
    entry = await store.get("a")
    other.execute("ROLLBACK")
    other.close()
    assert entry is not None
    assert entry.value == b"1"
    assert await store.put("a", b"2") > entry.version


async def test_calls_do_not_wait_for_ever_for_a_thread_that_hangs(stores: Stores) -> None:
    reader, writer = os.pipe()
    # The store reads its clock on the connection's thread, and this clock stands still until the pipe is closed.
    store = await stores.open(now=lambda: float(len(os.read(reader, 1))), busy_timeout_s=0.1)
    try:
        began = time.monotonic()
        calls = [store.get("a"), store.put("a", b""), store.scan(""), store.sweep()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        took_s = time.monotonic() - began
    finally:
        os.close(writer)
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 4
    assert took_s < 2
    await store.put("b", b"1")
    assert await store.get("b") is not None
    os.close(reader)


async def test_clients_of_one_file_do_not_lock_each_other_out(stores: Stores) -> None:
    async with asyncio.timeout(BOUND_S):
        clients = await asyncio.gather(*[stores.open() for _ in range(8)])  # all of them find no schema
        writes = [client.put(f"{n}/{i}", b"x") for n, client in enumerate(clients) for i in range(50)]
        versions = await asyncio.gather(*writes)
    assert len(await clients[0].scan("")) == 400
    assert len(set(versions)) == 400


async def test_closing_what_never_started_is_fine(stores: Stores) -> None:
    store = SQLite(SQLite.Config(path=str(stores.path)))
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("a")
    assert not (stores.path).exists()


async def test_a_path_that_cannot_be_is_a_config_error(stores: Stores, tmp_path: Path) -> None:
    await stores.refuse(tmp_path / "no such folder" / "store.db", "unable to open")
    await stores.refuse(tmp_path, "unable to open")


async def test_what_is_no_database_is_left_alone(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader, " * 1000)
    await stores.refuse(tmp_path / "letter.txt", "not a database")


async def test_the_database_of_another_program_is_left_alone(stores: Stores, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE entries (name TEXT)")
    other.close()
    await stores.refuse(tmp_path / "other.db", "another program")


@pytest.mark.parametrize("version", [2, 99])
async def test_a_schema_of_another_version_is_refused(stores: Stores, version: int) -> None:
    await (await stores.open()).close()
    with sqlite3.connect(stores.path) as other:
        other.execute(f"PRAGMA user_version = {version}")
    other.close()
    await stores.refuse(stores.path, f"schema is {version}")


async def test_a_damaged_file_is_refused(stores: Stores) -> None:
    path = stores.path
    store = await stores.open()
    await asyncio.gather(*[store.put(f"k{i}", b"x" * 2000) for i in range(200)])
    await store.close()
    content = bytearray(path.read_bytes())
    content[8 * 4096 : 24 * 4096] = b"\xa5" * (16 * 4096)
    path.write_bytes(content)
    await stores.refuse(path, "damaged|malformed")


async def test_an_empty_file_is_made_a_store(stores: Stores) -> None:
    (stores.path).touch()
    store = await stores.open()
    assert await store.write([Put("a", b"1")]) is not None
    assert isinstance(await store.get("a"), Entry)


async def test_a_deleted_file_is_unavailable_and_logged_and_one_moved_back_is_used_again(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes after the file was deleted would be acknowledged and lost."""
    store = await stores.open()
    await store.put("a", b"1")
    moved = stores.path.rename(stores.path.with_suffix(".moved"))
    with pytest.raises(StoreUnavailable, match="deleted or replaced"):
        await store.put("b", b"1")
    with pytest.raises(StoreUnavailable, match="deleted or replaced"):
        await store.get("a")
    assert "nothing is read or written any more" in caplog.text
    moved.rename(stores.path)
    assert await store.put("b", b"1") > 0
    assert await store.get("a") is not None


@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_a_file_that_another_process_made_in_place_of_the_open_one_is_unavailable(
    stores: Stores, suffix: str
) -> None:
    """A restarted worker makes a new file at the path."""
    store = await stores.open()
    await store.put("a", b"1")
    path = Path(f"{stores.path}{suffix}")
    content = path.read_bytes()
    path.unlink()
    path.with_suffix(".other").touch()  # so that the inode is not used again
    path.write_bytes(content)
    async with asyncio.timeout(5):
        with pytest.raises(StoreUnavailable, match="deleted or replaced"):  # noqa: PT012 - see below
            for _ in range(100):  # the write-ahead log is looked at once a second
                await store.put("b", b"1")
                await asyncio.sleep(0.02)


async def test_only_the_owner_can_read_a_new_store(stores: Stores) -> None:
    """The files hold all conversations and the sealing key."""
    before = os.umask(0)
    try:
        store = await stores.open()
        await store.put("a", b"1")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in stores.path.parent.iterdir()}
    assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}


async def test_a_store_that_others_can_read_is_named_in_a_warning(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """An existing file keeps its permissions, and the operator reads what to do."""
    await (await stores.open()).close()
    assert "chmod" not in caplog.text
    stores.path.chmod(0o640)
    await stores.open()
    assert "chmod 600" in caplog.text
    assert str(stores.path) in caplog.text


class Machine:
    """A machine whose wall clock can be set, and which can be started again."""

    def __init__(self) -> None:
        self.boot_id = b"first".ljust(16)
        self.uptime_s = 1000.0
        self.wall_s = 1_800_000_000.0

    def pass_time(self, seconds: float) -> None:
        self.uptime_s += seconds
        self.wall_s += seconds

    def reboot(self) -> None:
        self.boot_id, self.uptime_s = b"second".ljust(16), 5.0

    def clock(self) -> StoreClock:
        return StoreClock(wall_clock=lambda: self.wall_s, uptime=lambda: self.uptime_s, boot_id=self.boot_id)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, -86_400.0 * 30])
async def test_setting_the_clock_neither_ends_a_lease_nor_prolongs_it(stores: Stores, step_s: float) -> None:
    """Leases with SQLite do not live by the wall clock of each process."""
    machine = Machine()
    holder = await stores.open(now=machine.clock())
    await holder.put("/lease/a", b"1", ttl_s=10)
    machine.wall_s += step_s
    started_later = await stores.open(now=machine.clock())
    for store in (holder, started_later):
        assert await store.get("/lease/a") is not None
        assert await store.write([Put("/lease/a", b"2", expect=ABSENT)]) is None
    machine.pass_time(11)
    for store in (holder, started_later):
        assert await store.get("/lease/a") is None
    assert await started_later.write([Put("/lease/a", b"2", expect=ABSENT)]) is not None


async def test_a_lease_of_a_process_whose_clock_was_an_hour_ahead_ends_in_its_time(stores: Stores) -> None:
    """After a kill with the clock an hour ahead, the runs waited for the hour."""
    machine = Machine()
    machine.wall_s += 3600
    machine.uptime_s += 3600  # as a process sees it whose clocks are all faked
    ahead = await stores.open(now=machine.clock())
    await ahead.put("/lease/a", b"1", ttl_s=10)
    machine.wall_s -= 3600
    machine.uptime_s -= 3600
    store = await stores.open(now=machine.clock())
    machine.pass_time(11)
    assert await store.get("/lease/a") is None


async def test_a_lease_ends_in_its_time_after_the_machine_was_started_with_an_earlier_clock(stores: Stores) -> None:
    """A machine without a battery starts in 1970, and its leases do not wait until the clock is set."""
    machine = Machine()
    store = await stores.open(now=machine.clock())
    await store.write([Put("/lease/a", b"1", ttl_s=10), Put("stays", b"1", ttl_s=86_400)])
    await store.close()
    machine.reboot()
    machine.wall_s = 0.0
    store = await stores.open(now=machine.clock())
    machine.pass_time(11)
    assert await store.get("/lease/a") is None
    assert await store.get("stays") is not None


def test_a_damaged_record_of_the_clock_is_ignored() -> None:
    machine = Machine()
    clock = machine.clock()
    for stored in (b"", b"x", b"\xff" * 32):
        clock.adopt(stored)
    assert clock() == machine.wall_s


async def test_scans_take_turns_by_tenant_and_all_else_waits_for_one(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours: a tenant that reads many large pages delays another by one of them."""
    store, order, go_on = await stores.open(), list[str](), threading.Event()
    scan, get = Database.scan, Database._get  # pyright: ignore[reportPrivateUsage] - the store has bound `get` itself

    def scan_slowly(database: Database, key_range: tuple[bytes, bytes], limit: int, **named: Any) -> Any:
        go_on.wait(10)
        order.append(f"scan {key_range[0].decode()}")
        return scan(database, key_range, limit, **named)

    def watch_get(database: Database, requests: Any) -> Any:
        order.append("get")
        return get(database, requests)

    monkeypatch.setattr(Database, "scan", scan_slowly)
    monkeypatch.setattr(Database, "_get", watch_get)
    flood = [asyncio.create_task(store.scan("loud/")) for _ in range(5)]
    await asyncio.sleep(0)
    quiet = [asyncio.create_task(work) for work in (store.scan("quiet/"), store.get("quiet/key"))]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*flood, *quiet)
    assert order == ["scan loud/", "get", "scan quiet/", *["scan loud/"] * 4]


async def test_scans_that_wait_fail_together_with_the_one_that_the_store_does_not_answer(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours: their time limit begins when they are made."""
    store, go_on = await stores.open(busy_timeout_s=0.1), threading.Event()

    def never_scan(*_: object, **__: object) -> list[Any]:
        go_on.wait(10)
        return []

    monkeypatch.setattr(Database, "scan", never_scan)
    began = time.monotonic()
    outcomes = await asyncio.gather(*(store.scan("a/") for _ in range(20)), return_exceptions=True)
    go_on.set()
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert time.monotonic() - began < 2


async def test_a_large_value_is_copied_from_the_log_while_other_calls_go_on(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours: a write that takes long is not followed by a copy that takes as long."""
    store, go_on = await stores.open(), threading.Event()
    copy = WalCheckpoints._copy  # pyright: ignore[reportPrivateUsage] - what runs in the other thread

    def copy_later(checkpoints: WalCheckpoints) -> int:
        go_on.wait(10)
        return copy(checkpoints)

    monkeypatch.setattr(WalCheckpoints, "_copy", copy_later)
    await store.put("large", b"x" * (9 << 20))
    await store.get("large")
    assert stores.path.stat().st_size < 1 << 20
    go_on.set()
    await store.close()  # waits for the copy
    assert stores.path.stat().st_size > 9 << 20


async def test_large_values_without_pause_do_not_let_the_log_grow_for_ever(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the copies do not follow, a write copies the log itself."""

    def always(_: WalCheckpoints) -> bool:
        return True

    monkeypatch.setattr(WalCheckpoints, "is_late", always)
    store = await stores.open()
    for number in range(10):
        await store.put("large", bytes([number]) * (9 << 20))
    assert Path(f"{stores.path}-wal").stat().st_size < 30 << 20
