"""Requests that follow a stream on its connection, which keeps no parser while it streams."""

import asyncio
import json

import pytest

from tests.stack.http.raw import connection
from tests.support.servers.serving import Served, scripted, serving

STREAM = json.dumps({"model": "scripted", "input": "hi", "stream": True}).encode()
NEXT = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def stream_request(served: Served) -> bytes:
    host = served.url.removeprefix("http://").encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (host, len(STREAM)) + STREAM


@pytest.mark.parametrize("size", [0, 1, 20, len(NEXT)])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_request_in_two_pieces_is_answered_after_the_stream(size: int, waits: bool) -> None:
    """Its first `size` bytes come while the stream runs, or already with the stream's own request."""
    async with (
        serving(scripted([{"text": "One "}, {"wait_s": 0.3}, {"text": "two."}])) as served,
        connection(served.url) as (reader, writer),
    ):
        writer.write(stream_request(served) + (b"" if waits else NEXT[:size]))
        await reader.readuntil(b"output_text.delta")
        if waits:
            writer.write(NEXT[:size])
        body = await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert b"response.completed" in body
        writer.write(NEXT[size:])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_garbage_after_a_stream_is_refused() -> None:
    async with serving() as served, connection(served.url) as (reader, writer):
        writer.write(stream_request(served))
        await reader.readuntil(b"0\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
