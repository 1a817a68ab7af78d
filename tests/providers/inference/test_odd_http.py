"""Inference servers whose HTTP is odd: what the protocol allows is read, and all else fails at once, without harm."""

from typing import Final

import pytest

from apis.errors import UpstreamError
from tests.conformance.inference import drain
from tests.providers.inference.remote import chat_request, started
from tests.providers.inference.test_vllm import OK, OK_DELTAS
from tests.support.servers.upstream_server import (
    CUT,
    DONE,
    Answer,
    Repeat,
    UpstreamServer,
    event,
    text_chunks,
    usage_chunk,
)

EVENTS: Final = b"".join(map(event, (*text_chunks("Hel", "lo"), usage_chunk()))) + DONE


def answer(head: bytes, body: bytes = b"") -> Answer:
    return [head.replace(b"LENGTH", b"Content-Length: %d" % len(EVENTS)) + b"\r\n\r\n" + body]


def chunked(head: bytes, extension: bytes = b"", trailer: bytes = b"") -> Answer:
    return answer(head, b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(EVENTS), extension, EVENTS, trailer))


READ: Final[dict[str, Answer]] = {
    "100": [b"HTTP/1.1 100 Continue\r\n\r\n", *OK],
    "103 with headers": [b"HTTP/1.1 103 Early Hints\r\nContent-Encoding: gzip\r\n\r\n", *OK],
    "many interim answers": [b"HTTP/1.1 102 Processing\r\n\r\n" * 50, *OK],
    "chunk extensions": chunked(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b';a=b;c="d"'),
    "trailers": chunked(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", b"", b"X: y\r\nContent-Encoding: gzip\r\n"),
    "an absurd length": answer(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999", EVENTS),
    "HTTP/1.0": [*answer(b"HTTP/1.0 200 OK", EVENTS), CUT],
    "no reason": answer(b"HTTP/1.1 200\r\nLENGTH", EVENTS),
}
REFUSED: Final[dict[str, Answer]] = {
    "204": answer(b"HTTP/1.1 204 No Content"),
    "206": answer(b"HTTP/1.1 206 Partial Content\r\nLENGTH", EVENTS),
    "304": answer(b"HTTP/1.1 304 Not Modified"),
    "307": answer(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /v1/x\r\nContent-Length: 0"),
    "nothing": answer(b"HTTP/1.1 200 OK\r\nContent-Length: 0"),
    "a length of more than 64 bits": answer(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999", EVENTS),
    "a negative length": answer(b"HTTP/1.1 200 OK\r\nContent-Length: -5", EVENTS),
    "two ways of framing": chunked(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5"),
    "a status below 100": answer(b"HTTP/1.1 000 X\r\nLENGTH", EVENTS),
    "a status of 999": answer(b"HTTP/1.1 999 X\r\nLENGTH", EVENTS),
    "another protocol": answer(b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade", EVENTS),
    "a zero in a header": answer(b"HTTP/1.1 200 OK\r\nX: a\0b\r\nLENGTH", EVENTS),
    "interim answers without end": [Repeat(b"HTTP/1.1 100 Continue\r\n\r\n")],
}


@pytest.mark.parametrize("name", READ)
async def test_what_the_protocol_allows_is_read(name: str) -> None:
    async with UpstreamServer(READ[name], OK) as upstream, started(upstream.base_url) as vllm:
        assert await drain(vllm, chat_request()) == OK_DELTAS
        assert await drain(vllm, chat_request()) == OK_DELTAS


@pytest.mark.parametrize("name", REFUSED)
async def test_all_else_fails_and_the_next_answer_is_read(name: str) -> None:
    async with UpstreamServer(REFUSED[name], OK) as upstream, started(upstream.base_url, max_retries=0) as vllm:
        with pytest.raises(UpstreamError, match=r"HTTP|neither chunks"):
            await drain(vllm, chat_request())
        assert await drain(vllm, chat_request()) == OK_DELTAS
