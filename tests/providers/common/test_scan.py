"""Scans of records: a damaged one is skipped, logged and counted, and the others are read."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from apis.errors import StorageCorrupt
from apis.storage.kv_store import KVStore
from apis.storage.pages import Page
from apis.storage.records import PAGE_BYTES, decode_record, encode_record
from providers.common.counters import DAMAGED_RECORDS
from providers.common.state.scan import (
    StoredRecord,
    first_matches,
    list_matching,
    list_page,
    list_records,
    scan_records,
)
from providers.kv_store.sqlite import SQLite
from tests.support.damage import DAMAGES, damage_record


class Fruit(msgspec.Struct):
    """A record with a required field."""

    name: str


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[KVStore]:
    store = SQLite(SQLite.Config(path=str(tmp_path / "store.db")))
    await store.start()
    yield store
    await store.close()


@pytest.fixture
async def keys(store: KVStore) -> list[str]:
    keys = [f"t/fruit/{number}" for number in range(7)]
    for key in keys:
        await store.put(key, encode_record(Fruit(key)))
    return keys


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_scan_skips_a_damaged_record_and_reports_it_once(
    store: KVStore, keys: list[str], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read, and the log does not grow with each look of a watcher."""
    damage_record(tmp_path / "store.db", keys[2], damage)
    counted = DAMAGED_RECORDS.count
    for _ in range(3):
        records = [stored.key async for stored in scan_records(store, "t/fruit/", Fruit, page_size=2)]
        assert records == [key for key in keys if key != keys[2]]
    assert DAMAGED_RECORDS.count == counted + 1
    lines = [record for record in caplog.records if record.levelno == logging.ERROR and keys[2] in record.getMessage()]
    assert len([line for line in lines if line.name.startswith("providers.common")]) == 1
    assert len(lines) <= 2  # the store itself reports a wrong checksum once
    entry = await store.get(keys[2])
    assert entry is not None
    with pytest.raises(StorageCorrupt):
        decode_record(entry, Fruit)


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_a_page_is_full_although_records_in_it_are_damaged(
    store: KVStore, keys: list[str], tmp_path: Path, is_reversed: bool
) -> None:
    """Lists show the next ones instead."""
    for key in keys[1:4]:
        damage_record(tmp_path / "store.db", key, "junk")
    good = [key for key in keys if key not in keys[1:4]]
    rows = scan_records(store, "t/fruit/", Fruit, reverse=is_reversed, page_size=4)
    page = await first_matches(rows, 3)
    records = page.data
    assert page.has_more
    assert [stored.key for stored in records] == ([*reversed(good)] if is_reversed else good)[:3]
    assert [stored.record.name for stored in records] == [stored.key for stored in records]
    cursors = {"before": good[2]} if is_reversed else {"after": good[0]}
    rows = scan_records(store, "t/fruit/", Fruit, reverse=is_reversed, page_size=2, **cursors)
    page = await first_matches(rows, 9)
    assert not page.has_more
    assert [stored.key for stored in page.data] == ([good[1], good[0]] if is_reversed else good[1:])


async def test_a_scan_reads_a_table_without_damage_in_one_read(store: KVStore, keys: list[str]) -> None:
    """The check costs a list no second read of the store."""
    reads = 0
    scan = store.scan

    async def counting_scan(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        return await scan(*args, **kwargs)  # type: ignore[arg-type]  # the arguments as they came

    store.scan = counting_scan  # type: ignore[method-assign, assignment]  # as above
    assert len(await list_records(store, "t/fruit/", Fruit, limit=8)) == 7
    assert len(await list_records(store, "t/fruit/", Fruit, limit=7)) == 7
    assert reads == 2


async def read_pages(store: KVStore, prefix: str, order: Literal["asc", "desc"], limit: int) -> list[list[str]]:
    """Return the names on each page of a listing."""
    pages: list[list[str]] = []
    cursor, has_more = "", True
    while has_more:
        page = await list_page(store, prefix, Fruit, cursor, order=order, limit=limit)
        pages.append([row.record.name for row in page.data])
        cursor, has_more = page.data[-1].key, page.has_more
    return pages


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_ends_at_its_limit(store: KVStore, keys: list[str], order: Literal["asc", "desc"]) -> None:
    ordered = sorted(keys, reverse=order == "desc")
    assert await read_pages(store, "t/fruit/", order, 3) == [ordered[:3], ordered[3:6], ordered[6:]]
    assert await read_pages(store, "t/fruit/", order, 7) == [ordered]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_of_large_records_ends_at_its_bytes(store: KVStore, order: Literal["asc", "desc"]) -> None:
    """The record that exceeds them is its last one, also where it is the first."""
    part = PAGE_BYTES * 2 // 5
    for number, size in enumerate((1, part, part, part, part, PAGE_BYTES + 1, 1)):
        await store.put(f"t/large/{number}", encode_record(Fruit(f"{number}" * size)))
    pages = await read_pages(store, "t/large/", order, 100)
    names = ["".join(name[0] for name in page) for page in pages]
    assert names == (["0123", "45", "6"] if order == "asc" else ["65", "432", "10"])


async def test_a_page_ends_before_a_key(store: KVStore, keys: list[str]) -> None:
    page = await list_page(store, "t/fruit/", Fruit, keys[1], order="asc", limit=9, until=keys[4])
    assert [row.key for row in page.data] == keys[2:4]
    page = await list_page(store, "t/fruit/", Fruit, keys[4], order="desc", limit=9, until=keys[1])
    assert ([row.key for row in page.data], page.has_more) == (keys[3:1:-1], False)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_page_goes_on_after_damaged_records(
    store: KVStore, keys: list[str], tmp_path: Path, damage: str
) -> None:
    for number in (0, 3, 6):
        damage_record(tmp_path / "store.db", keys[number], damage)
    assert await read_pages(store, "t/fruit/", "asc", 3) == [[keys[1], keys[2], keys[4]], [keys[5]]]


async def test_a_filtered_page_names_the_last_record_that_it_has_looked_at(store: KVStore) -> None:
    for number in range(1500):
        await store.put(f"t/many/{number:04}", encode_record(Fruit(f"{number % 700}")))

    def is_wanted(fruit: Fruit) -> bool:
        return fruit.name == "650"

    async def find(cursor: str, limit: int) -> Page[StoredRecord[Fruit]]:
        return await list_matching(store, "t/many/", Fruit, cursor, order="asc", limit=limit, accepts=is_wanted)

    first = await find("", 9)
    assert ([row.key for row in first.data], first.has_more, first.last_id) == (["t/many/0650"], True, "0999")
    second = await find("t/many/0999", 9)
    assert ([row.key for row in second.data], second.has_more) == (["t/many/1350"], False)
    assert not (await find("", 1)).data[1:]
