"""The promises of apis/storage/kv_store.py as tests: a store's test class inherits them and has a fixture `backend`."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings

from apis.errors import StoreUnavailable
from apis.storage.kv_store import ABSENT, Delete, Entry, KVStore, Put
from tests.conformance.kv_store_model import Model, Step, steps

LIFE_S = 0.02
BOUND_S = 30


@dataclass(frozen=True)
class Backend:
    """`open` starts another client of the same store; `elapse` lets the store's clock move on by some seconds;
    `overwrite` changes the stored bytes of a key without the store's knowledge."""

    open: Callable[[], Awaitable[KVStore]]
    elapse: Callable[[float], Awaitable[None]]
    overwrite: Callable[[str, Callable[[bytes], bytes]], Awaitable[None]] | None = None


class KVStorePromises:
    """The promises of every store."""

    @pytest.fixture
    async def store(self, backend: Backend) -> KVStore:
        return await backend.open()

    @pytest.mark.parametrize("value", [b"", b"\0", b"a\0b", bytes(range(256)) * 300])
    async def test_any_bytes_come_back(self, store: KVStore, value: bytes) -> None:
        version = await store.put("key", value)
        assert await store.get("key") == Entry(value, version)
        assert await store.scan("") == [("key", Entry(value, version))]

    @pytest.mark.parametrize(
        "key", ["a", " ", "a b\r\n\t", "é", "e\u0301", "\uffff", "\U0010ffff", "'\";--", "k" * 1024]
    )
    async def test_any_text_is_a_key(self, store: KVStore, key: str) -> None:
        await store.put(key, b"1")
        assert [records for records, _ in await store.scan(key)] == [key]
        assert await store.write([Delete(key)]) == [ABSENT]
        assert await store.get(key) is None

    @pytest.mark.parametrize("key", ["", "\0", "a\0b", "k" * 1025, "\U0001f600" * 257, "\ud800"])
    async def test_what_is_no_key_is_a_value_error(self, store: KVStore, key: str) -> None:
        with pytest.raises(ValueError, match=r"key|surrogates"):
            await store.get(key)
        with pytest.raises(ValueError, match=r"key|surrogates"):
            await store.write([Put("fine", b""), Put(key, b"")])
        with pytest.raises(ValueError, match=r"key|surrogates"):
            await store.write([Delete(key)])
        assert await store.scan("") == []

    @pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
    async def test_a_life_that_is_no_time_is_a_value_error(self, store: KVStore, ttl_s: float) -> None:
        with pytest.raises(ValueError, match="ttl_s"):
            await store.put("key", b"", ttl_s=ttl_s)

    async def test_the_same_key_twice_in_a_write_is_a_value_error(self, store: KVStore) -> None:
        with pytest.raises(ValueError, match="only once"):
            await store.write([Put("a", b"1"), Delete("a")])
        assert await store.get("a") is None

    async def test_many_entries_come_in_the_order_asked(self, store: KVStore) -> None:
        await store.write([Put(f"k{i}", b"%d" % i) for i in range(1200)])
        keys = [f"k{i}" for i in (1199, 3, 3, 5000, 0)]
        assert [entry and entry.value for entry in await store.get_many(keys)] == [b"1199", b"3", b"3", None, b"0"]
        assert await store.get_many([]) == []
        assert len(await store.get_many([f"k{i}" for i in range(1200)])) == 1200

    async def test_a_write_of_nothing_is_nothing(self, store: KVStore) -> None:
        assert await store.write([]) == []

    async def test_scan_orders_by_code_point_and_excludes_its_bounds(self, store: KVStore) -> None:
        keys = sorted(["B", "a", "a/", "a/1", "a0", "aa", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"])
        await store.write([Put(key, b"") for key in random.sample(keys, len(keys))])

        async def scan(prefix: str = "", *, after: str = "", before: str = "", limit: int = 1000) -> list[str]:
            records = await store.scan(prefix, after=after, before=before, limit=limit)
            back = await store.scan(prefix, after=after, before=before, reverse=True)
            assert [key for key, _ in back][::-1][:limit] == [key for key, _ in records]
            return [key for key, _ in records]

        assert await scan() == keys
        assert await scan(after="a", before="aa") == ["a/", "a/1", "a0"]
        assert await scan(after="a/0", before="a/2") == ["a/1"]
        assert await scan("a/", after="a/") == ["a/1"]
        assert await scan("a", limit=2) == ["a", "a/"]
        assert await scan("a", after="b") == await scan("a", before="A") == await scan(after="b", before="a") == []
        assert await scan(limit=0) == []
        assert [key for key, _ in await store.scan("", limit=2, reverse=True)] == ["\U0010ffff", "\U00010000"]
        with pytest.raises(ValueError, match="limit"):
            await store.scan("", limit=-1)

    @pytest.mark.parametrize("prefix", ["a", "%", "_", "*", "?", "[a]", "\\", "\x7f", "\ud7ff", "\uffff", "\U0010ffff"])
    async def test_a_prefix_finds_its_own_and_no_sibling(self, store: KVStore, prefix: str) -> None:
        own = [prefix, prefix + "\x01", prefix + prefix + prefix, prefix + "\U0010ffff"]
        siblings = ["A", "x", "\U0010fffe", "`", "$", "^", "\ud7fe", "\ufffe"]
        await store.write([Put(key, b"") for key in own + siblings])
        assert [key for key, _ in await store.scan(prefix)] == sorted(own)
        assert [key for key, _ in await store.scan(prefix, reverse=True)] == sorted(own, reverse=True)

    async def test_an_expired_key_is_absent_everywhere(self, store: KVStore, backend: Backend) -> None:
        await store.write([Put("gone", b"1", ttl_s=LIFE_S), Put("kept", b"1", ttl_s=3600), Put("stays", b"1")])
        old = await store.put("again", b"1", ttl_s=LIFE_S)
        await backend.elapse(2 * LIFE_S)
        assert await store.get_many(["gone", "again"]) == [None, None]
        assert [key for key, _ in await store.scan("", limit=2)] == ["kept", "stays"]
        assert [key for key, _ in await store.scan("", limit=9, reverse=True)] == ["stays", "kept"]
        assert await store.write([Put("again", b"2", expect=old)]) is None
        new = await store.write([Put("again", b"2", expect=ABSENT)])
        assert new is not None
        assert new[0] not in {ABSENT, old}
        assert await store.sweep() == 1
        assert await store.sweep() == 0
        assert [key for key, _ in await store.scan("")] == ["again", "kept", "stays"]

    async def test_the_last_put_decides_how_long_a_key_lives(self, store: KVStore, backend: Backend) -> None:
        await store.put("lives", b"1", ttl_s=LIFE_S)
        await store.put("lives", b"2")
        await store.put("dies", b"1")
        await store.put("dies", b"2", ttl_s=LIFE_S)
        await backend.elapse(2 * LIFE_S)
        assert [key for key, _ in await store.scan("")] == ["lives"]
        await store.sweep()
        assert [key for key, _ in await store.scan("")] == ["lives"]

    async def test_a_sweep_frees_any_number(self, store: KVStore, backend: Backend) -> None:
        await store.write([Put(f"k{i:04}", b"", ttl_s=LIFE_S) for i in range(1100)])
        await store.put("kept", b"")
        await backend.elapse(2 * LIFE_S)
        assert [key for key, _ in await store.scan("", limit=1)] == ["kept"]
        assert await store.sweep() == 1100

    async def test_expect_demands_the_version_that_is_there(self, store: KVStore) -> None:
        assert await store.write([Put("a", b"1", expect=1)]) is None
        first = await store.write([Put("a", b"1", expect=ABSENT)])
        assert first is not None
        assert await store.write([Put("a", b"2", expect=ABSENT)]) is None
        assert await store.write([Delete("a", expect=ABSENT)]) is None
        second = await store.write([Put("a", b"2", expect=first[0])])
        assert second is not None
        assert await store.write([Delete("a", expect=first[0])]) is None
        assert await store.get("a") == Entry(b"2", second[0])
        assert await store.write([Delete("a", expect=second[0])]) == [ABSENT]
        assert await store.write([Delete("a", expect=ABSENT)]) == [ABSENT]

    async def test_one_failed_expect_undoes_the_whole_write(self, store: KVStore) -> None:
        await store.put("old", b"1")
        assert await store.write([Put("new", b"1"), Delete("old"), Put("other", b"1", expect=77)]) is None
        assert [(key, entry.value) for key, entry in await store.scan("")] == [("old", b"1")]

    async def test_a_failed_expect_leaves_its_neighbours_alone(self, store: KVStore) -> None:
        writes = [store.write([Put(f"k{i}", b"1", expect=ABSENT if i % 2 else 9)]) for i in range(40)]
        answers = await asyncio.gather(*writes)
        assert [answer is not None for answer in answers] == [bool(i % 2) for i in range(40)]
        assert len(await store.scan("k")) == 20

    async def test_versions_never_come_back(self, store: KVStore, backend: Backend) -> None:
        received = [await store.put("a", b""), await store.put("a", b"")]
        await store.write([Delete("a")])
        received.append(await store.put("a", b"", ttl_s=LIFE_S))
        await backend.elapse(2 * LIFE_S)
        await store.sweep()
        received.append(await store.put("a", b""))
        assert len(set(received)) == 4
        assert min(received) > ABSENT

    async def test_no_increment_is_lost(self, backend: Backend) -> None:
        stores = [await backend.open(), await backend.open()]

        async def increment(store: KVStore) -> None:
            while True:
                entry = await store.get("n")
                value, version = (int(entry.value), entry.version) if entry else (0, ABSENT)
                if await store.write([Put("n", b"%d" % (value + 1), expect=version)], durable=False) is not None:
                    return

        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*[increment(stores[i % 2]) for i in range(50)])
        entry = await stores[0].get("n")
        assert entry is not None
        assert entry.value == b"50"

    async def test_what_one_client_wrote_another_sees(self, backend: Backend) -> None:
        one, other = await backend.open(), await backend.open()
        for i in range(20):
            version = await one.put("k", b"%d" % i)
            assert await other.get("k") == Entry(b"%d" % i, version)
            assert await other.scan("k") == [("k", Entry(b"%d" % i, version))]

    async def test_a_reader_sees_all_of_a_write_or_none(self, backend: Backend) -> None:
        one, other = await backend.open(), await backend.open()
        keys = ["a", "b", "c"]
        writing = asyncio.gather(*[one.write([Put(key, b"%d" % i) for key in keys]) for i in range(60)])
        while not writing.done():
            assert len({entry and entry.value for entry in await other.get_many(keys)}) == 1
            assert len({entry.value for _, entry in await other.scan("")}) <= 1
            await asyncio.sleep(0)  # reading from memory lets no other task run
        versions = await writing
        assert len({tuple(one) for one in versions if one}) == 60

    async def test_cancelled_calls_never_cross_answers(self, store: KVStore) -> None:
        keys = [f"k{i}" for i in range(50)]
        await store.write([Put(key, key.encode()) for key in keys])
        dice = random.Random(7)

        async def read(key: str) -> None:
            assert (await store.get(key) or Entry(b"", 0)).value == key.encode()

        for _ in range(100):
            calls = [asyncio.create_task(read(dice.choice(keys))) for _ in range(20)]
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            for call in dice.sample(calls, 15):
                call.cancel()
            async with asyncio.timeout(BOUND_S):
                answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} <= {type(None), asyncio.CancelledError}
        for key in keys:
            await read(key)

    async def test_a_cancelled_write_happened_whole_or_not_at_all(self, store: KVStore) -> None:
        for turn in range(30):
            ops = [Put(f"{turn}/{i}", b"x") for i in range(3)]
            call = asyncio.create_task(store.write(ops))
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await store.put("after", b"")
            assert len(await store.scan(f"{turn}/")) in {0, 3}

    async def test_closing_twice_is_fine(self, store: KVStore) -> None:
        await store.close()
        await store.close()

    @settings(
        max_examples=60,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(story=steps)
    async def test_any_story_ends_as_a_dictionary_would(
        self, store: KVStore, backend: Backend, story: list[Step]
    ) -> None:
        await store.write([Delete(key) for key, _ in await store.scan("")])
        model = Model(store, backend.elapse)
        for step in story:
            await model.take(step)


class LastingPromises:
    """The further promises of a store that outlives its clients."""

    async def test_a_new_client_finds_what_was_written(self, backend: Backend) -> None:
        before = await backend.open()
        version = await before.put("a", b"1", durable=False)
        await before.put("short", b"1", ttl_s=LIFE_S)
        await before.close()
        await backend.elapse(2 * LIFE_S)
        after = await backend.open()
        assert await after.get_many(["a", "short"]) == [Entry(b"1", version), None]
        assert await after.put("a", b"2") > version

    async def test_a_closed_store_says_so(self, backend: Backend) -> None:
        store = await backend.open()
        await store.close()
        for call in (store.get("a"), store.put("a", b""), store.scan(""), store.sweep()):
            with pytest.raises(StoreUnavailable, match="closed"):
                await call
