"""Every point at which an upstream's stream can die, for every kind of answer: a failure, and never a finish."""

from collections.abc import Sequence

import pytest

from apis.deltas import Finish, TextDelta, Usage
from apis.errors import UpstreamError
from tests.conformance.inference import drain
from tests.providers.inference.remote import ROLE, chat_request, failure, sent, started
from tests.support.servers.upstream_server import (
    CUT,
    DONE,
    LAST_HTTP_CHUNK,
    RESET,
    Act,
    Chunk,
    UpstreamServer,
    call_chunk,
    delta_chunk,
    event,
    head,
    http_chunk,
    text_chunks,
    usage_chunk,
)

OK_DELTAS = [TextDelta("Hel"), TextDelta("lo"), Finish("stop", Usage(11, 7))]

KINDS: dict[str, tuple[Chunk, Chunk, str]] = {
    "text": (delta_chunk(content="Hel"), delta_chunk(content="lo"), "stop"),
    "reasoning": (delta_chunk(reasoning="Hm"), delta_chunk(reasoning="m"), "stop"),
    "call": (call_chunk(0, '{"a', call_id="c", name="f"), call_chunk(0, '":1}'), "tool_calls"),
}


def deaths(first: Chunk, second: Chunk, reason: str) -> dict[str, Sequence[Act]]:
    half = event(second)[: len(event(second)) // 2]
    finish = delta_chunk(reason)
    body = b"".join(event(chunk) for chunk in (ROLE, first, second, finish, usage_chunk())) + DONE
    length = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    until_closed = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return {
        "before the answer": [CUT],
        "reset before the answer": [RESET],
        "within the headers": [head()[:30], CUT],
        "after the headers": [head(), CUT],
        "before the first token": [*sent(ROLE), CUT],
        "between two events": [*sent(ROLE, first), CUT],
        "reset between two events": [*sent(ROLE, first), RESET],
        "within a line": [*sent(ROLE, first), http_chunk(half), CUT],
        "within a line, with a proper end": [*sent(ROLE, first), http_chunk(half), LAST_HTTP_CHUNK],
        "within an HTTP chunk": [*sent(ROLE, first), http_chunk(event(second))[:-9], CUT],
        "with a proper end and no finish": [*sent(ROLE, first, second), LAST_HTTP_CHUNK],
        "with [DONE] and no finish": [*sent(ROLE, first, second), http_chunk(DONE), LAST_HTTP_CHUNK],
        "after the finish": [*sent(ROLE, first, second, finish), CUT],
        "reset after the finish": [*sent(ROLE, first, second, finish), RESET],
        "after the usage": [*sent(ROLE, first, second, finish, usage_chunk()), CUT],
        "aborted": [*sent(ROLE, first, delta_chunk("abort")), http_chunk(DONE), LAST_HTTP_CHUNK],
        "with an error": [
            *sent(ROLE, first, {"error": {"message": "x", "code": 500}}),
            http_chunk(DONE),
            LAST_HTTP_CHUNK,
        ],
        "before its announced length": [length + body[:-20], CUT],
        "where only the closing ends it": [until_closed + body[: body.index(b'"finish_reason": "')], CUT],
        "with a chunk size that is none": [*sent(ROLE, first), b"zz\r\n", CUT],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("death", deaths(*KINDS["text"]))
async def test_a_stream_that_dies_is_a_failure_and_never_a_finish(death: str, kind: str) -> None:
    error, deltas = await failure(deaths(*KINDS[kind])[death])
    assert isinstance(error, UpstreamError)
    assert not any(isinstance(delta, Finish) for delta in deltas)


async def test_where_only_the_closing_ends_it_a_finish_is_a_finish() -> None:
    headers = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    body = b"".join(event(chunk) for chunk in text_chunks("Hel", "lo"))
    async with UpstreamServer([headers + body, CUT]) as upstream, started(upstream.base_url) as vllm:
        assert await drain(vllm, chat_request()) == OK_DELTAS
