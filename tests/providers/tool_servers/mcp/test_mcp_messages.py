"""Messages of MCP servers of the field: bodies of JSON and event streams in every form that is in use."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from apis.errors import FetchFailed
from providers.tool_servers.mcp.messages import EventMender
from tests.support.servers.mcp_calls import called, declared, failure, listed, text_of, tools_of
from tests.support.servers.mcp_field import reached

Json = dict[str, Any]


def _sse(body: bytes) -> tuple[bytes, str, int]:
    return body, "text/event-stream", 200


def _json(value: Any, status: int = 200) -> tuple[bytes, str, int]:
    return json.dumps(value).encode(), "application/json", status


PING: Final = {"jsonrpc": "2.0", "id": 99, "method": "ping"}
NOTE: Final = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}
WIRES: Final[dict[str, Callable[[Json], tuple[bytes, str, int]]]] = {
    "a list": lambda answer: _json([answer]),
    "a list with a notification": lambda answer: _json([NOTE, answer]),
    "the id as a text": lambda answer: _json({**answer, "id": str(answer["id"])}),
    "the id as a fraction": lambda answer: _json({**answer, "id": float(answer["id"])}),
    "the id null": lambda answer: _json({**answer, "id": None}),
    "no id and no version": lambda answer: _json({"result": answer["result"]}),
    "an error that is null": lambda answer: _json({**answer, "error": None, "method": None}),
    "a mark": lambda answer: (b"\xef\xbb\xbf" + json.dumps(answer).encode(), "application/json", 200),
    "wrong UTF-8": lambda answer: (json.dumps({**answer, "x": "#"}).encode().replace(b"#", b"\xff"), "text/html", 200),
    "status 201": lambda answer: _json(answer, 201),
    "status 202": lambda answer: _json(answer, 202),
    "a stream": lambda answer: _sse(b"event: message\ndata: %b\n\n" % json.dumps(answer).encode()),
    "a stream with CRLF": lambda answer: _sse(b"data: %b\r\n\r\n" % json.dumps(answer).encode()),
    "a stream without a blank line": lambda answer: _sse(b"data: %b" % json.dumps(answer).encode()),
    "a stream with a mark": lambda answer: _sse(b"\xef\xbb\xbfdata: %b\n\n" % json.dumps(answer).encode()),
    "lines of data": lambda answer: _sse(
        b"".join(b"data: %b\n" % line for line in json.dumps(answer, indent=1).encode().split(b"\n")) + b"\n"
    ),
    "another name": lambda answer: _sse(b"event: result\ndata: %b\n\n" % json.dumps(answer).encode()),
    "garbage before it": lambda answer: _sse(
        b": hi\n\ndata: none\n\nevent: ping\ndata: {}\n\ndata: %b\n\n" % json.dumps(answer).encode()
    ),
    "a list in a stream": lambda answer: _sse(b"data: %b\n\n" % json.dumps([PING, NOTE, answer]).encode()),
    "odd parameters": lambda answer: _sse(
        b"data: %b\n\ndata: %b\n\n" % (json.dumps({**PING, "params": [1]}).encode(), json.dumps(answer).encode())
    ),
    "a stream by another type": lambda answer: (
        b"data: %b\n\n" % json.dumps(answer).encode(),
        "Text/Event-Stream; charset=utf-8",
        200,
    ),
}


@pytest.mark.parametrize("wire", WIRES)
async def test_an_answer_is_read_in_every_form(wire: str) -> None:
    """Lists and calls alike."""
    async with reached({"wire": WIRES[wire]}) as (server, mcp):
        assert [tool.name for tool in await tools_of(mcp, listed(declared(server.url)))] == ["good"]
        assert await text_of(mcp, called(declared(server.url), "good")) == "RESULT of good"
        assert len(server.calls) == 1


async def test_an_answer_to_another_request_fails_at_once() -> None:
    """It may be another caller's."""

    def answer_another(answer: Json) -> tuple[bytes, str, int]:
        return _json({**answer, "id": 987654})

    async with reached({}) as (server, mcp):
        await tools_of(mcp, listed(declared(server.url)))
        server.habit["wire"] = answer_another
        async with asyncio.timeout(5):
            failed = await failure(mcp, called(declared(server.url), "good"))
    assert "another request" in failed.message


async def test_an_event_stream_is_mended_in_pieces_of_every_size() -> None:
    """Pieces end anywhere, and names, ids and empty events stay where they are of use."""
    raw = (
        b"\xef\xbb\xbfevent: endpoint\r\ndata: /x\r\n\r\nid: 5\ndata:\n\n"
        b': hi\rdata: {\rdata: "result": {}}\r\revent: x\ndata: {'
    )
    message = b'data: {"jsonrpc": "2.0", "id": 1, "result": {}}'
    mended = b"event: endpoint\ndata: /x\n\nid: 5\ndata:\n\nevent: message\n%b\n\n" % message
    for size in (1, 2, 3, 7, len(raw)):
        mender = EventMender({"id": 1}, has_names=True)
        pieces = [mender.feed(raw[at : at + size]) for at in range(0, len(raw), size)]
        assert b"".join([*pieces, mender.end()]) == mended + b"event: x\ndata: {\n\n"


async def test_an_event_without_an_end_is_refused() -> None:
    """A line, or many lines of data; comments are no part of one."""
    for piece in (b"x" * 65536, b"data: 1\n" * 8192):
        mender = EventMender({})
        with pytest.raises(FetchFailed, match="larger than allowed"):
            [mender.feed(piece) for _ in range(100)]
    mender = EventMender({})
    assert not any(mender.feed(b": keep-alive\n\n" * 4096) for _ in range(100))


async def test_the_session_id_may_have_any_characters() -> None:
    """It is sent back as it was."""
    async with reached({"session": "séance ✓"}) as (server, mcp):
        assert await text_of(mcp, called(declared(server.url), "good")) == "RESULT of good"
        assert server.initialized == 1
