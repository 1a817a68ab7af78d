"""The conditional update: no change is lost, a hopeless one ends, and an edit that refuses writes nothing."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from apis.errors import NotFound, Overloaded, StorageCorrupt
from apis.storage.kv_store import Delete, KVStore, Op, Put
from apis.storage.records import encode_record
from providers.common.state.change import MAX_ATTEMPTS, change, write_prepared
from providers.kv_store.memory import Memory


class Tally(msgspec.Struct):
    """A record that many change."""

    count: int


def add_one(tally: Tally | None) -> Tally:
    return Tally(1 if tally is None else tally.count + 1)


class SlowReads(Memory):
    """A store whose readers all read before any of them writes."""

    async def get_many(self, keys: Sequence[str]) -> list[object]:  # type: ignore[override]  # of the same entries
        entries = await super().get_many(keys)
        await asyncio.sleep(0)
        return list(entries)


@pytest.fixture
def store() -> KVStore:
    return SlowReads(Memory.Config())


async def test_no_change_of_many_at_once_is_lost(store: KVStore) -> None:
    """Each of 20 changes of one record is made once."""
    await asyncio.gather(*[change(store, "t/tally", Tally, add_one) for _ in range(20)])
    assert await change(store, "t/tally", Tally, add_one) == Tally(21)


async def test_a_change_that_others_always_overtake_ends(store: KVStore) -> None:
    """The number of attempts is bounded, with one error."""
    attempts = 0

    async def prepare() -> Sequence[Op]:
        nonlocal attempts
        attempts += 1
        return [Put("t/tally", b"{}", expect=12345)]

    with pytest.raises(Overloaded, match="Too many changes"):
        await write_prepared(store, prepare)
    assert attempts == MAX_ATTEMPTS


async def test_an_edit_that_returns_nothing_changes_nothing(store: KVStore) -> None:
    await store.put("t/tally", encode_record(Tally(5)))
    assert await change(store, "t/tally", Tally, lambda _: None, also=[Put("t/other", b"1")]) is None
    assert await store.get("t/other") is None


async def test_an_edit_may_refuse(store: KVStore) -> None:
    def refuse(tally: Tally | None) -> Tally:
        if tally is None:
            raise NotFound("No tally.")
        return tally

    with pytest.raises(NotFound):
        await change(store, "t/tally", Tally, refuse)


async def test_what_belongs_to_a_change_is_written_with_it(store: KVStore) -> None:
    await store.put("t/mark", b"1")

    def also(tally: Tally) -> Sequence[Op]:
        return [Delete("t/mark"), Put("t/copy", encode_record(tally))]

    assert await change(store, "t/tally", Tally, add_one, also=also, ttl_s=60) == Tally(1)
    assert [key for key, _ in await store.scan("t/")] == ["t/copy", "t/tally"]


async def test_a_damaged_record_is_not_changed(store: KVStore) -> None:
    """Its owner reads an error, and the damaged bytes stay to be restored."""
    await store.put("t/tally", b"\xff")
    with pytest.raises(StorageCorrupt):
        await change(store, "t/tally", Tally, add_one)
    entry = await store.get("t/tally")
    assert entry is not None
    assert entry.value == b"\xff"
