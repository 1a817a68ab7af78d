"""Redis under clients that race, and what only a server can suffer: hanging, dying, losing writes, being full."""

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis as Client

from apis.errors import ConfigError, StoreUnavailable
from apis.vector_index import Chunk, Search
from providers.vector_index.redis import Redis
from tests.providers.vector_index.model import Model, step
from tests.support.servers.redis_server import RedisServer

BOUND_S = 60
CLUSTER_S = 20
SLOTS = 16_384
STEPS = 2000
Opening = Callable[..., Awaitable[Redis]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, "--requirepass", "s3cret") as server:
        yield server


@pytest.fixture
async def opening(server: RedisServer) -> AsyncIterator[Opening]:
    async with AsyncExitStack() as opened:

        async def opening(**fields: Any) -> Redis:
            index = Redis(Redis.Config(url=url(server), **fields))
            await index.start()
            opened.push_async_callback(index.close)
            return index

        yield opening


def url(server: RedisServer, *, password: str = "s3cret", database: str = "0") -> SecretStr:
    return SecretStr(server.url.replace("redis://", f"redis://:{password}@").removesuffix("0") + database)


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        listeners = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def chunk(file: str, number: int = 0, text: str = "word", **attributes: Any) -> Chunk:
    return Chunk(file, number, text, attributes, (1.0, float(number)))


async def files(index: Redis) -> list[str]:
    return [found.file for found in await index.search_keywords(Search("s", 1000), "word")]


def lists_are_short(patch: pytest.MonkeyPatch) -> None:
    """So that a few chunks need several pages and pieces, and a few writes are too many to remember."""
    for name, size in (("PAGE", 3), ("PIECE", 2), ("GONE", 12), ("STAMPS", 8)):
        patch.setattr(f"providers.vector_index.redis.{name}", size)


@pytest.mark.parametrize("short", [False, True], ids=["as it is", "short lists"])
async def test_what_any_client_did_every_client_finds(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, short: bool
) -> None:
    if short:
        lists_are_short(monkeypatch)
    dice, model = random.Random(11), Model()
    clients = [await opening(), await opening(), await opening(cache_mib=0)]
    async with asyncio.timeout(BOUND_S):
        for _ in range(STEPS):
            await step(dice, model, dice.choice(clients))


@pytest.mark.parametrize("short", [False, True], ids=["as it is", "short lists"])
async def test_searches_see_all_of_an_upsert_or_nothing_of_it(
    opening: Opening, monkeypatch: pytest.MonkeyPatch, *, short: bool
) -> None:
    if short:
        lists_are_short(monkeypatch)
    clients = [await opening(), await opening(), await opening(cache_mib=0)]
    done = asyncio.Event()

    async def write() -> None:
        for n in range(60):
            await clients[n % 2].upsert("s", [chunk("same", number, f"word {n}", n=n) for number in range(5)])
            await clients[n % 2].upsert("s", [chunk(f"new {n}", number, f"word {n}", n=n) for number in range(5)])
        done.set()

    async def read(index: Redis) -> None:
        latest = -1
        while not done.is_set():
            found = await index.search_vector(Search("s", 10_000), (1.0, 0.0))
            assert len(found) % 5 == 0
            same = {each.text for each in found if each.file == "same"}
            assert len(same) == bool(found)
            assert all(each.text == f"word {each.attributes['n']}" for each in found)
            newest = max((int(str(each.attributes["n"])) for each in found), default=-1)
            assert newest >= latest
            latest = newest

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(write(), *(read(index) for index in clients))
    assert [len(await files(index)) for index in clients] == [305] * 3


async def test_attributes_and_deletions_of_large_files_come_in_pieces(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists_are_short(monkeypatch)
    one, other = await opening(), await opening()
    await one.upsert("s", [chunk(file, number, n=1) for file in ("a", "a/b") for number in range(5)])
    assert len(await files(other)) == 10
    await one.set_attributes("s", "a", {"n": 2})
    found = await other.search_keywords(Search("s", 100), "word")
    assert [each.attributes["n"] for each in found] == [2] * 5 + [1] * 5
    await one.delete("s", "a")
    assert await files(other) == ["a/b"] * 5


async def test_a_hung_server_is_unavailable_in_time_and_then_as_before(server: RedisServer, opening: Opening) -> None:
    index = await opening(timeout_s=0.5)
    await index.upsert("s", [chunk("a")])
    server.pause()
    try:
        began = time.monotonic()
        calls = [
            call
            for _ in range(8)
            for call in (
                index.search_keywords(Search("s", 9), "word"),
                index.search_vector(Search("s", 9), (1.0, 0.0)),
                index.upsert("s", [chunk("b")]),
                index.set_attributes("s", "a", {}),
                index.delete("s", "c"),
            )
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 5
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        assert not any("s3cret" in f"{each} {each.__cause__!r}" for each in answers if isinstance(each, Exception))
    finally:
        server.resume()
    async with asyncio.timeout(10):
        while True:
            try:
                assert "a" in await files(index)
                break
            except StoreUnavailable:
                continue


async def test_a_killed_server_is_unavailable_at_once_and_then_as_before(server: RedisServer, opening: Opening) -> None:
    index = await opening()
    await index.upsert("s", [chunk("a")])
    server.kill()
    with pytest.raises(StoreUnavailable):
        await files(index)
    await asyncio.to_thread(server.start)
    assert await files(index) == ["a"]
    await index.upsert("s", [chunk("b")])
    assert await files(index) == ["a", "b"]


async def test_writes_that_redis_lost_are_not_found_in_copies(server: RedisServer, opening: Opening) -> None:
    """As after a failure with a replica that lagged: the store is what it was some writes ago, and goes on."""
    one, other = await opening(), await opening()
    client: Any = Client.from_url(url(server).get_secret_value())  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
    await one.upsert("s", [chunk("kept")])
    kept = {key: await client.dump(key) async for key in client.scan_iter()}
    await one.upsert("s", [chunk("lost"), chunk("lost too")])
    assert await files(one) == await files(other) == ["kept", "lost", "lost too"]
    for key, stored in kept.items():
        await client.restore(key, 0, stored, replace=True)
    assert await files(one) == ["kept"]
    await one.upsert("s", [chunk("new"), chunk("new too"), chunk("new as well")])
    assert await files(one) == await files(other) == ["kept", "new", "new as well", "new too"]
    await client.aclose()


async def fill(index: Redis) -> int:
    """Put files of three chunks until Redis says that it is full; returns how many files it took."""
    for n in range(1000):
        try:
            await index.upsert("s", [chunk(f"{n:03}", number, "word " * 2000) for number in range(3)])
        except StoreUnavailable as exc:
            assert "OutOfMemory" in exc.message  # noqa: PT017 - the loop is what is tested
            return n
    raise AssertionError("never full")


async def test_a_full_server_refuses_upserts_whole_finds_and_forgets(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "4mb") as server:
        index = Redis(Redis.Config(url=SecretStr(server.url)))
        await index.start()
        stored = await fill(index)
        assert await files(index) == [f"{n:03}" for n in range(stored) for _ in range(3)]
        for n in range(stored // 2):
            await index.delete("s", f"{n:03}")
        await index.upsert("s", [chunk("fits")])
        assert len(await files(index)) == 3 * (stored - stored // 2) + 1
        await index.close()


async def test_an_index_starts_before_its_server(
    server: RedisServer, opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    with caplog.at_level(logging.WARNING):
        index = await opening(timeout_s=5)
    assert "cannot be reached yet" in caplog.text
    assert "s3cret" not in caplog.text
    await asyncio.to_thread(server.start)
    await index.upsert("s", [chunk("a")])
    assert await files(index) == ["a"]


async def test_a_store_that_takes_longer_to_read_than_a_call_may_is_found_later(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await opening()).upsert("s", [chunk("a", number) for number in range(1500)])
    monkeypatch.setattr("providers.vector_index.redis.PAGE", 1)
    index = await opening(timeout_s=0.25)
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                assert len(await index.search_vector(Search("s", 2000), (1.0, 0.0))) == 1500
                break
            except StoreUnavailable:
                continue


async def test_a_search_of_an_index_that_is_closed_ends(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    index = await opening()
    await index.upsert("s", [chunk("a", number) for number in range(1500)])
    monkeypatch.setattr("providers.vector_index.redis.PAGE", 1)
    search = asyncio.create_task(index.search_vector(Search("s", 1), (1.0, 0.0)))
    for n in range(10):  # by then it is reading
        await index.upsert("other", [chunk("a", n)])
    await index.close()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(StoreUnavailable):
            await search


async def test_copies_that_are_too_large_together_are_dropped(opening: Opening) -> None:
    index = await opening(cache_mib=1)
    dice = random.Random(3)
    vectors = [[dice.random() for _ in range(1000)] for _ in range(100)]
    for store in ("one", "two", "three", "one"):
        await index.upsert(store, [Chunk("f", n, "", {}, vector) for n, vector in enumerate(vectors)])
    for store in ("one", "two", "three", "one"):
        (best,) = await index.search_vector(Search(store, 1), vectors[7])
        assert best.number == 7


async def test_names_may_hold_what_keys_are_made_of(opening: Opening) -> None:
    index = await opening()
    names = ["", "{", "}", "a/b", "a", "a/", "*", "é:0/1", "a%2Fb"]
    for store in names:
        await index.upsert(store, [chunk(file, text=f"word of {store}") for file in names])
    for store in names:
        await index.delete(store, "a")
        found = await index.search_keywords(Search(store, 100), "word")
        assert [each.file for each in found] == sorted(set(names) - {"a"})
        assert {each.text for each in found} == {f"word of {store}"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[list[RedisServer]]:
    """Two nodes, each with half of the slots."""
    nodes: list[RedisServer] = []
    with ExitStack() as running:
        for name, bus in zip("ab", buses := free_ports(2), strict=True):
            (tmp_path / name).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            nodes.append(running.enter_context(RedisServer(tmp_path / name, *options)))
        clients: list[Any] = [Client.from_url(node.url) for node in nodes]  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
        await clients[0].execute_command("CLUSTER ADDSLOTSRANGE", 0, SLOTS // 2 - 1)
        await clients[1].execute_command("CLUSTER ADDSLOTSRANGE", SLOTS // 2, SLOTS - 1)
        await clients[0].execute_command("CLUSTER MEET", "127.0.0.1", urlsplit(nodes[1].url).port, buses[1])
        async with asyncio.timeout(CLUSTER_S):
            for client in clients:
                while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                    pass
        for client in clients:
            await client.aclose()
        yield nodes


async def test_a_cluster_keeps_each_store_on_one_of_its_nodes(
    cluster: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lists_are_short(monkeypatch)
    dice, model = random.Random(7), Model()
    clients = [Redis(Redis.Config(url=SecretStr(node.url), cluster=True, timeout_s=5)) for node in cluster]
    async with asyncio.timeout(BOUND_S):
        for client in clients:
            await client.start()
        for _ in range(300):
            await step(dice, model, dice.choice(clients))
        for n in range(20):
            await clients[0].upsert(f"s{n}", [chunk("a")])
            assert len(await clients[1].search_keywords(Search(f"s{n}", 9), "word")) == 1
        for client in clients:
            await client.close()
    for node in cluster:
        client: Any = Client.from_url(node.url)  # pyright: ignore[reportUnknownMemberType] - redis-py leaves kwargs untyped
        assert await client.dbsize() > 8
        await client.aclose()


@pytest.mark.parametrize(("password", "database"), [("wrong", "0"), ("s3cret", "99")])
async def test_what_the_server_refuses_is_a_config_error(server: RedisServer, password: str, database: str) -> None:
    with pytest.raises(ConfigError, match="refuses") as caught:
        await Redis(Redis.Config(url=url(server, password=password, database=database))).start()
    assert password not in str(caught.value)


@pytest.mark.parametrize("bad", ["http://:s3cret@host", "nonsense", "redis://:s3cret@host:port/0"])
async def test_a_bad_url_is_a_config_error(bad: str) -> None:
    config = Redis.Config(url=SecretStr(bad))
    with pytest.raises(ConfigError, match="redis://") as caught:
        await Redis(config).start()
    assert "s3cret" not in f"{caught.value} {config!r}"


async def test_closing_what_never_started_is_fine() -> None:
    index = Redis(Redis.Config(url=SecretStr("redis://127.0.0.1:1/0")))
    await index.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await index.delete("s")
