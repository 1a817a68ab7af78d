"""The limits of GuardedFetcher: bytes, inflation, time, and servers that speak no proper HTTP."""

import asyncio
import gzip
import zlib
from typing import Any

import pytest

from apis.documents.fetcher import FetchRequest
from apis.errors import FetchFailed
from providers.fetcher.safe import GuardedFetcher
from tests.support.servers.fetcher_hosts import (
    SITE,
    Site,
    failure_of,
    fetch,
    fetching,
    gzip_bomb,
    raw_deflate,
    raw_server,
)

MIB = 2**20


async def test_a_body_may_be_as_large_as_the_limit_and_no_larger(site: Site) -> None:
    async with fetching([site.port], max_bytes=1000) as safe:
        assert len((await fetch(safe, site.page("/", b"x" * 1000))).body) == 1000
        assert "larger than 1000 bytes" in await failure_of(safe, site.page("/", b"x" * 1001))
        assert "larger than 10 bytes" in await failure_of(safe, site.page("/", b"x" * 11), max_bytes=10)
        assert len((await fetch(safe, site.page("/", b"x" * 2000), max_bytes=2000)).body) == 2000


async def test_an_endless_body_is_left_at_the_limit(site: Site, safe: GuardedFetcher) -> None:
    url = site.endless("/", b"x" * 65536, 0, {"Content-Type": "text/html"})
    assert "larger than 5242880 bytes" in await failure_of(safe, url)
    async with asyncio.timeout(5):
        await site.dropped.wait()
    assert site.sent_bytes < 16 * MIB  # beyond the limit there is only what the sockets hold


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
        ("", bytes),
    ],
)
async def test_compressed_bodies_are_decompressed(site: Site, safe: GuardedFetcher, encoding: str, pack: Any) -> None:
    for data in (b"", b"a", bytes(range(256)) * 4000):
        packed = pack(data)
        fetched = await fetch(safe, site.page("/", packed, Content_Encoding=encoding))
        assert fetched.body == data
        assert "content-encoding" not in fetched.headers


async def test_a_bomb_is_not_inflated_beyond_the_limit(site: Site, safe: GuardedFetcher) -> None:
    bomb = await asyncio.to_thread(gzip_bomb, 100 * MIB)
    assert len(bomb) < MIB
    url = site.page("/", bomb, Content_Encoding="gzip")
    assert "larger than 20971520 bytes" in await failure_of(safe, url)
    inflated = 0
    with pytest.raises(FetchFailed):  # noqa: PT012 - it is the reading that fails, after much was read
        async with safe.open(FetchRequest(url)) as incoming:
            async for chunk in incoming.chunks:
                inflated += len(chunk)
                assert len(chunk) <= 65536
    assert inflated <= 20 * MIB


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip, deflate", "nonsense"])
async def test_encodings_that_were_not_asked_for_are_refused(site: Site, safe: GuardedFetcher, encoding: str) -> None:
    assert "not asked for" in await failure_of(safe, site.page("/", b"x", Content_Encoding=encoding))


async def test_packed_bodies_that_are_broken_are_refused(site: Site, safe: GuardedFetcher) -> None:
    packed = gzip.compress(b"a page" * 1000)
    assert "not in the encoding" in await failure_of(safe, site.page("/", b"plain text", Content_Encoding="gzip"))
    assert "broke off" in await failure_of(safe, site.page("/", packed[:-9], Content_Encoding="gzip"))
    fetched = await fetch(safe, site.page("/", packed + b"rest", Content_Encoding="gzip"))
    assert fetched.body == b"a page" * 1000


async def test_a_server_that_drips_its_body_ends_at_the_time_limit(site: Site) -> None:
    url = site.endless("/", b"x", 0.02, {"Content-Type": "text/html"})
    async with fetching([site.port], timeout_s=0.5) as safe:
        assert "in time (0.5 s" in await failure_of(safe, url)
        async with asyncio.timeout(5):
            await site.dropped.wait()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n", *([b"X: y\r\n"] * 100)],
        [bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 100,
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"],
        [],
    ],
    ids=["header lines", "bytes of a header", "continues", "silence in the body", "silence"],
)
async def test_a_server_that_drips_or_is_silent_ends_at_the_time_limit(pieces: list[bytes]) -> None:
    async with raw_server(*pieces, pause_s=0.02) as (url, port), fetching([port], timeout_s=0.4) as safe:
        assert "in time (0.4 s" in await failure_of(safe, f"{url}/")


async def test_a_silence_between_two_reads_has_a_limit_of_its_own(site: Site) -> None:
    url = site.endless("/", b"x", 60, {"Content-Type": "text/html"})
    async with fetching([site.port], read_timeout_s=0.2) as safe:
        assert "in time" in await failure_of(safe, url)
        async with safe.open(FetchRequest(url, timeout_s=30)) as incoming:
            assert await anext(aiter(incoming.chunks)) == b"x"


async def test_a_name_server_that_never_answers_ends_at_the_limit() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async with fetching([80], resolve, connect_timeout_s=0.2) as safe:
        assert "in time" in await failure_of(safe, "http://slow.example/")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"SSH-2.0-OpenSSH_9\r\n",
    ],
    ids=lambda answer: repr(answer)[:40],
)
async def test_answers_that_are_no_proper_http_fail_in_words(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, SITE, 0)
    port = server.sockets[0].getsockname()[1]
    async with fetching([port]) as safe:
        await failure_of(safe, f"http://{SITE}:{port}/")
    server.close()


async def test_a_flood_of_tiny_chunks_ends_at_the_time_limit() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        raw_server(head, *[b"1\r\nx\r\n" * 10_000] * 500) as (url, port),
        fetching([port], timeout_s=0.4) as safe,
    ):
        assert "in time (0.4 s" in await failure_of(safe, f"{url}/")


async def test_an_address_without_a_server_is_passed_over_for_the_next_one(site: Site) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.3", SITE]

    async with fetching([site.port], resolve, allowed_private_networks=["127.0.0.2/31"]) as safe:
        assert (await fetch(safe, site.page("/", "x").replace(SITE, "two.example"))).body == b"x"


async def test_a_silent_tls_handshake_ends_at_the_limit_and_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(hold, SITE, 0)
    port = server.sockets[0].getsockname()[1]
    async with fetching([port], connect_timeout_s=0.2) as safe:
        assert "in time" in await failure_of(safe, f"https://{SITE}:{port}/")
        async with asyncio.timeout(5):
            await closed.wait()
    server.close()


async def test_a_server_that_thinks_longer_than_a_connection_may_take_is_waited_for() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    async with (
        raw_server(b"", answer, pause_s=0.4) as (url, port),
        fetching([port], connect_timeout_s=0.1) as safe,
    ):
        assert (await fetch(safe, f"{url}/")).body == b"x"


async def test_hosts_without_a_server_and_without_an_address_fail_in_words(unused_tcp_port: int) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with fetching([unused_tcp_port], resolve) as safe:
        assert "could not be reached" in await failure_of(safe, f"http://{SITE}:{unused_tcp_port}/")
        assert "is not known" in await failure_of(safe, f"http://nowhere.example:{unused_tcp_port}/")
