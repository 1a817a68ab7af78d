"""The bytes of each store: damaged ones are found, large ones refused, many of them cut into pages and counted."""

import asyncio
import logging
from contextlib import suppress

import pytest

from apis.errors import InvalidRequest, StorageCorrupt, StoredValueTooLarge
from apis.storage.kv_store import ABSENT, MAX_VALUE_BYTES, Delete, KVStore, Put
from apis.storage.quota import StorageQuota
from apis.storage.records import scan_all
from tests.conformance.kv_store import Backend

DISK_STORES = ["sqlite_backend", "redis_backend", "postgres_backend"]


@pytest.fixture(params=["memory_backend", *DISK_STORES])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=DISK_STORES)
def disk_backend(request: pytest.FixtureRequest) -> Backend:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def store(backend: Backend) -> KVStore:
    return await backend.open()


async def overwrite_byte(backend: Backend, key: str, position: int) -> None:
    """Change one bit of the stored bytes of a key."""

    def change(stored: bytes) -> bytes:
        damaged = bytearray(stored)
        damaged[position] ^= 1
        return bytes(damaged)

    assert backend.overwrite is not None
    await backend.overwrite(key, change)


@pytest.mark.parametrize("position", [0, 9, -1, -4, -5, -12])
async def test_one_changed_bit_is_found_by_the_reader_of_its_entry_only(
    disk_backend: Backend, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One damaged byte, in the value, the checksum or the mark between them, is never a wrong value."""
    store = await disk_backend.open()
    await store.write([Put(key, f"the value of {key}".encode()) for key in ("t/a", "t/b", "t/c")])
    await overwrite_byte(disk_backend, "t/b", position)
    with caplog.at_level(logging.ERROR):
        first, damaged, last = await store.get_many(["t/a", "t/b", "t/c"])
    assert "t/b" in caplog.text
    assert first is not None
    assert first.value == b"the value of t/a"
    assert last is not None
    assert last.value == b"the value of t/c"
    assert damaged is not None
    with pytest.raises(StorageCorrupt) as caught:
        _ = damaged.value
    assert (caught.value.status, caught.value.code) == (500, "storage_corrupt")
    rows = await store.scan("t/")
    assert [key for key, _ in rows] == ["t/a", "t/b", "t/c"]
    with pytest.raises(StorageCorrupt):
        _ = rows[1][1].value
    assert await store.write([Put("t/b", b"new", expect=damaged.version)]) is not None
    entry = await store.get("t/b")
    assert entry is not None
    assert entry.value == b"new"
    assert await store.write([Delete("t/b")]) == [ABSENT]


@pytest.mark.parametrize("value", [b"", b"x", b'{"a":1}', bytes(range(256))])
async def test_a_value_without_a_checksum_is_damaged(disk_backend: Backend, value: bytes) -> None:
    """Another program has written it."""
    store = await disk_backend.open()
    await store.put("t/foreign", b"anything")
    assert disk_backend.overwrite is not None
    await disk_backend.overwrite("t/foreign", lambda _: value)
    entry = await store.get("t/foreign")
    assert entry is not None
    with pytest.raises(StorageCorrupt):
        _ = entry.value


async def test_bytes_stored_under_another_key_are_damaged(disk_backend: Backend) -> None:
    """A damaged index leads to another row."""
    store = await disk_backend.open()
    await store.write([Put("t/a", b"of a"), Put("t/b", b"of b")])
    stored: list[bytes] = []
    assert disk_backend.overwrite is not None
    await disk_backend.overwrite("t/a", lambda old: stored.append(old) or old)
    await disk_backend.overwrite("t/b", lambda _: stored[0])
    entry = await store.get("t/b")
    assert entry is not None
    with pytest.raises(StorageCorrupt):
        _ = entry.value


async def test_a_value_above_the_bound_is_refused_and_nothing_is_written(store: KVStore) -> None:
    """An answer of hundreds of megabytes never reaches the store."""
    with pytest.raises(StoredValueTooLarge, match=str(MAX_VALUE_BYTES)):
        await store.write([Put("t/small", b"1"), Put("t/large", bytes(MAX_VALUE_BYTES + 1))])
    assert await store.scan("t/") == []


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_ends_with_the_entry_that_exceeds_its_bytes(store: KVStore, *, reverse: bool) -> None:
    """A page of large values does not load all of them."""
    await store.write([Put(f"t/{number}", b"x" * 1000) for number in range(10)])
    keys = [f"t/{number}" for number in range(10)][:: -1 if reverse else 1]

    async def scan(max_bytes: int, limit: int = 1000) -> list[str]:
        return [key for key, _ in await store.scan("t/", limit=limit, reverse=reverse, max_bytes=max_bytes)]

    assert await scan(0) == keys[:1]
    assert await scan(2500) == keys[:3]
    assert await scan(2500, limit=2) == keys[:2]
    assert await scan(100_000) == keys


async def test_all_of_a_large_prefix_is_read_in_pages_of_bounded_bytes(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all entries holds a page of them at a time."""
    await store.write([Put(f"t/{number:02}", b"x" * 1000) for number in range(30)])
    monkeypatch.setattr("apis.storage.records.PAGE_BYTES", 2500)
    assert [key async for key, _ in scan_all(store, "t/")] == [f"t/{number:02}" for number in range(30)]


async def test_the_bytes_of_a_prefix_are_measured_in_pages(store: KVStore) -> None:
    """The quota counts what is stored without loading it."""
    await store.write([Put(f"t/{number:05}", b"x" * 100) for number in range(10_500)])
    await store.write([Put("s/1", b"x"), Put("u/1", b"x")])
    total, pages, after = 0, 0, ""
    while True:
        size, after = await store.measure("t/", after=after)
        if not after:
            break
        total, pages = total + size, pages + 1
    assert pages == 2
    assert 107 * 10_500 <= total <= 130 * 10_500
    assert await store.measure("none/") == (0, "")


async def test_a_tenant_over_its_quota_is_refused_until_it_deletes(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored bytes per tenant have a quota, in every store; others are not concerned."""
    monkeypatch.setattr("apis.storage.quota._MIN_REFUSAL_S", 0.0)
    store.quota = StorageQuota(store, 100_000)
    await store.require_room("a")
    await store.write([Put(f"a/{number}", b"x" * 800) for number in range(130)])
    with pytest.raises(InvalidRequest, match="max_tenant_bytes") as caught:
        await store.require_room("a")
    assert caught.value.code == "storage_quota_exceeded"
    await store.require_room("b")
    await store.write([Delete(f"a/{number}") for number in range(100)])
    async with asyncio.timeout(10):
        while True:
            with suppress(InvalidRequest):
                return await store.require_room("a")
            await asyncio.sleep(0.01)


async def test_what_other_processes_wrote_counts(backend: Backend) -> None:
    """A process that has not written anything measures what is there."""
    one, other = await backend.open(), await backend.open()
    await one.write([Put(f"a/{number}", b"x" * 800) for number in range(130)])
    other.quota = StorageQuota(other, 100_000)
    await other.require_room("a")  # starts the measurement and does not wait for it
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequest):  # noqa: PT012 - until it is measured
            while True:
                await asyncio.sleep(0.01)
                await other.require_room("a")
