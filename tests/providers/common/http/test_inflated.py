"""Answers that a gateway compressed although it was asked for plain ones: they are read as plain ones are."""

import asyncio
import gzip
import math
import zlib
from collections.abc import Callable

import pytest

from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.net.http.connection import HttpConnection, HttpError
from providers.common.net.http.inflater import PIECE_BYTES
from tests.providers.common.http.test_client import open_response, read
from tests.support.servers.upstream_server import LAST_HTTP_CHUNK, head, http_chunk
from tests.support.waiting import until

MIB = 1024 * 1024


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def with_length(body: bytes, encoding: str) -> bytes:
    fields = b"content-encoding: %b\r\ncontent-length: %d" % (encoding.encode(), len(body))
    return b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (fields, body)


def with_chunks(*pieces: bytes) -> bytes:
    return head(headers={"content-encoding": "gzip"}) + b"".join(map(http_chunk, pieces)) + LAST_HTTP_CHUNK


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP", gzip.compress),
        ("identity, gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("none", bytes),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_compressed_answer_may_come_in_any_pieces(
    encoding: str, pack: Callable[[bytes], bytes], step: int
) -> None:
    body = bytes(range(256)) * 8
    sent = with_length(pack(body), encoding)
    answer, _ = await open_response()
    reading = asyncio.create_task(read(answer))
    for start in range(0, len(sent), step):
        answer.data_received(sent[start : start + step])
        await asyncio.sleep(0)
    assert await reading == body
    assert (answer.is_complete, answer.is_reusable) == (True, True)
    assert "content-encoding" not in answer.headers


async def test_a_connection_serves_plain_answers_after_a_compressed_one() -> None:
    answer, wire = await open_response()
    for sent in (with_chunks(gzip.compress(b"one")), head() + http_chunk(b"one") + LAST_HTTP_CHUNK) * 2:
        answer.data_received(sent)
        assert await read(answer) == b"one"
        assert answer.is_reusable
        answer.reset()
        await answer.send_request(b"GET / HTTP/1.1\r\n\r\n", b"")
    assert not wire.aborted


async def test_each_flush_of_a_compressed_stream_comes_through_at_once() -> None:
    """A token is seen when it is made, and not when some bytes are full."""
    answer, _ = await open_response()
    stream, pieces = zlib.compressobj(wbits=31), list[bytes]()
    answer.data_received(head(headers={"content-encoding": "gzip"}))
    end = answer.push_data(pieces.append, math.inf)
    for number in range(50):
        token = b"data: %d\n\n" % number
        answer.data_received(http_chunk(stream.compress(token) + stream.flush(zlib.Z_SYNC_FLUSH)))
        assert pieces[-1:] == [token]
    answer.data_received(http_chunk(stream.flush()) + LAST_HTTP_CHUNK)
    await asyncio.wait_for(end, 5)
    assert (len(pieces), answer.is_complete, answer.is_reusable) == (50, True, True)


async def read_pieces(answer: HttpConnection, *, is_pushed: bool) -> list[int]:
    """Return the sizes of the pieces of the body."""
    sizes = list[int]()
    while True:
        if answer.is_ready:
            if not (data := answer.read_available()):
                return sizes
            sizes.append(len(data))
        elif is_pushed:
            await answer.push_data(lambda data: sizes.append(len(data)), math.inf)
        else:
            await answer.wait_for_data(math.inf)


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_a_short_body_that_becomes_long_is_read_in_pieces(is_pushed: bool) -> None:
    """Neighbours: only a piece is inflated in one iteration of the event loop, and another tenant is served between."""
    CURRENT_TURN.set(turn_of("loud"))
    loud, wire = await open_response()
    CURRENT_TURN.set(turn_of("quiet"))
    quiet, _ = await open_response()
    reading = asyncio.create_task(read_pieces(loud, is_pushed=is_pushed))
    loud.data_received(with_chunks(gzip.compress(b"\0" * 20 * MIB)))
    quiet.data_received(head() + http_chunk(b"small"))
    assert quiet.read_available() == b"small"
    assert not reading.done()
    sizes = await asyncio.wait_for(reading, 20)
    assert (sum(sizes), max(sizes)) == (20 * MIB, PIECE_BYTES)
    assert (loud.is_complete, loud.is_reusable, wire.reading) == (True, True, True)


async def test_a_body_that_is_not_read_is_not_inflated() -> None:
    answer, wire = await open_response()
    packed = gzip.compress(b"\0" * 20 * MIB)
    answer.data_received(with_chunks(packed[:1000]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not wire.reading
    assert len(answer.read_available()) == PIECE_BYTES
    answer.abort()
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(answer.read_available()) == 0


@pytest.mark.parametrize("length", [True, False])
async def test_a_server_may_close_while_the_end_is_being_inflated(length: bool) -> None:
    """The end is that of the body and not that of the connection, also where the latter says that it is the end."""
    packed = gzip.compress(b"\0" * MIB)
    answer, _ = await open_response()
    sent = with_length(packed, "gzip")
    answer.data_received(sent if length else sent.replace(b"content-length", b"x"))
    answer.connection_lost(None)
    assert len(await read(answer)) == MIB
    assert (answer.is_complete, answer.is_reusable) == (True, False)


async def test_a_connection_that_breaks_within_a_compressed_body_is_a_failure() -> None:
    answer, _ = await open_response()
    answer.data_received(with_length(gzip.compress(b"\0" * MIB), "gzip")[:-9])
    answer.connection_lost(None)
    with pytest.raises(HttpError):
        await read(answer)


async def test_bytes_after_a_compressed_answer_are_dropped() -> None:
    for body in (b"ab", b"\0" * MIB):
        answer, _ = await open_response()
        answer.data_received(with_chunks(gzip.compress(body) + b"rest") + with_chunks(b"another"))
        assert await read(answer) == body
        assert not answer.is_reusable


async def test_a_body_that_is_not_in_its_encoding_is_a_failure() -> None:
    answer, wire = await open_response()
    answer.data_received(with_chunks(b"plain"))
    with pytest.raises(HttpError, match="not in the encoding"):
        await read(answer)
    await until(lambda: wire.aborted)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x"])
async def test_an_encoding_that_is_not_decompressed_is_left_to_the_reader(encoding: str) -> None:
    answer, _ = await open_response()
    answer.data_received(with_length(b"abc", encoding))
    assert await read(answer) == b"abc"
    assert answer.headers["content-encoding"] == encoding
