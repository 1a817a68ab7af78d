"""MCP with servers of the field: recorded ones, and others of their kinds."""

import asyncio
import json
from typing import Any, Final

import pytest

from apis.tool_servers import ToolServerFailed
from providers.tool_servers.mcp.answers import mend_call_result
from providers.tool_servers.mcp.lost_sessions import names_lost_session
from tests.support.servers.mcp_calls import called, code, declared, failure, listed, perform, started, text_of, tools_of
from tests.support.servers.mcp_field import FieldServer, reached, recorded

Json = dict[str, Any]
SESSION_ERROR: Final = {"code": -32001, "message": "Session not found"}


def rpc(error: Json, request_id: Any = "{request id}") -> Json:
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def said(code: int, message: str, **more: Any) -> Json:
    return rpc({"code": code, "message": message, **more})


# --- sessions that are forgotten -------------------------------------------------------------------------------------

FORGOTTEN: Final = {
    "404, text": {"status": 404, "body": "no", "headers": {"content-type": "text/plain"}},
    "404, empty": {"status": 404, "body": ""},
    "404, another error": {"status": 404, "body": said(-32603, "Internal error")},
    "404, id of a server": {"status": 404, "body": rpc(SESSION_ERROR, "server-error")},
    "410": {"status": 410, "body": {"error": "Gone"}},
    "401, words": {"status": 401, "body": "Unauthorized: Session not found", "headers": {"content-type": "text/plain"}},
    "401": {"status": 401, "body": ""},
    "400, TypeScript": {"status": 400, "body": rpc({"code": -32000, "message": "Bad Request: Server not initialized"})},
    "400, no id": {
        "status": 400,
        "body": rpc({"code": -32000, "message": "Bad Request: No valid session ID provided"}, None),
    },
    "400, text": {"status": 400, "body": "Invalid session ID\n", "headers": {"content-type": "text/plain"}},
    "400, detail": {"status": 400, "body": {"detail": {"reason": "SESSION_EXPIRED"}}},
    "422": {"status": 422, "body": "Unexpected message, expect initialize request"},
    "500": {"status": 500, "body": said(-32603, "Session 3f-8a91 does not exist")},
    "200, -32000": {"status": 200, "body": said(-32000, "Unknown session")},
    "200, -32600": {"status": 200, "body": said(-32600, "Session has been terminated")},
    "200, -32602": {"status": 200, "body": said(-32602, "Received request before initialization was complete")},
    "200, -32002": {"status": 200, "body": said(-32002, "Server not initialized")},
    "200, in the data": {"status": 200, "body": said(-32600, "Invalid Request", data="session expired")},
    "200, no id": {"status": 200, "body": rpc(SESSION_ERROR, None)},
    "200, another id": {"status": 200, "body": rpc(SESSION_ERROR, "server-error")},
    "200, a text as the error": {"status": 200, "body": {"error": "session not found"}},
    "200, a text": {"status": 200, "body": "session not found", "headers": {"content-type": "text/plain"}},
    "200, a stream": {
        "status": 200,
        "body": f"event: message\ndata: {json.dumps(rpc(SESSION_ERROR, 1))}\n\n",
        "headers": {"content-type": "text/event-stream"},
    },
    "200, a stream by another name": {
        "status": 200,
        "body": f"data: {json.dumps(rpc(SESSION_ERROR, 1))}\n\n",
        "headers": {"content-type": "text/plain"},
    },
}


@pytest.mark.parametrize("shape", FORGOTTEN)
async def test_a_forgotten_session_is_opened_again_after_any_error_of_the_server(shape: str) -> None:
    """No call and no list is lost, and what the server did not run is run once."""
    async with reached({"forgotten": FORGOTTEN[shape]}) as (server, mcp):
        for count, call in enumerate((called(declared(server.url), "good"), listed(declared(server.url))), 1):
            await text_of(mcp, called(declared(server.url), "good"))
            server.forget()
            await asyncio.gather(*(perform(mcp, call) for _ in range(3)))
            assert server.initialized == count + 1
        assert len(server.calls) == 5


@pytest.mark.parametrize("name", ["sess_200err", "sess_rpc404", "sess_rpc404str"])
async def test_a_recorded_server_that_was_restarted_is_used_on(name: str) -> None:
    """The errors are those of servers of the official SDKs."""
    async with reached(recorded(name)) as (server, mcp):
        for _ in range(2):
            assert await text_of(mcp, called(declared(server.url), "lookup")) == "RESULT of lookup"
            server.forget()
        assert server.initialized == 2


async def test_a_session_that_is_lost_before_its_first_call_is_opened_again() -> None:
    """A server of several machines, the first of which knows no session of the other."""
    async with reached({"forgotten": FORGOTTEN["404, empty"]}) as (server, mcp):
        holding = asyncio.create_task(server.initialized_once.wait())
        call = asyncio.create_task(text_of(mcp, called(declared(server.url), "good")))
        await holding
        server.forget()
        assert await call == "RESULT of good"


REFUSED: Final = {
    "internal error": {"status": 200, "body": said(-32603, "Internal error")},
    "a session of the tool's": {"status": 200, "body": said(-32602, "Unknown session 'shell-1'")},
    "500": {"status": 500, "body": "no"},
    "503": {"status": 503, "body": ""},
}


@pytest.mark.parametrize("shape", REFUSED)
async def test_a_call_that_may_have_run_is_not_repeated(shape: str) -> None:
    """Other errors say nothing about the session."""
    async with reached({"forgotten": REFUSED[shape]}) as (server, mcp):
        await text_of(mcp, called(declared(server.url), "good"))
        server.forget()
        methods = len(server.methods)
        await failure(mcp, called(declared(server.url), "good"))
        assert server.methods[methods:] == ["tools/call"]


async def test_a_session_that_ends_in_mid_call_is_not_used_again_and_the_call_is_not_repeated() -> None:
    """After a stream has begun, a session that has ended may have done the work."""
    message = json.dumps({"jsonrpc": "2.0", "id": 0, "error": {"code": -32000, "message": "Session terminated"}})
    shape = {"status": 200, "body": f"data: {message}\n\n", "headers": {"content-type": "text/event-stream"}}
    async with reached({"forgotten": shape}) as (server, mcp):
        await text_of(mcp, called(declared(server.url), "good"))
        server.forget()
        methods = len(server.methods)
        assert "terminated" in (await failure(mcp, called(declared(server.url), "good"))).message
        assert server.methods[methods:] == ["tools/call"]
        assert await text_of(mcp, called(declared(server.url), "good")) == "RESULT of good"


async def test_calls_that_fail_do_not_keep_a_dead_session() -> None:
    """Only an answer of the server's renews the time for which a session may be idle."""
    async with reached({"forgotten": REFUSED["internal error"]}, idle_s=0.2) as (server, mcp):
        await text_of(mcp, called(declared(server.url), "good"))
        server.forget()
        failures = 0
        async with asyncio.timeout(10):
            while True:
                try:
                    await perform(mcp, called(declared(server.url), "good"))
                    break
                except ToolServerFailed:
                    failures += 1
        assert failures > 1


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        ("Session f81d4fae-7dec-11d0-a765-00a0c91e6bf6 was not found on this server", True),
        ("Invalid or missing session ID", True),
        ("No transport found for sessionId", True),
        ("Mcp-Session-Id header is required", True),
        ("The session could not be found", True),
        ("The client has not been initialized yet", True),
        ("session_id 'abc' is unknown", True),
        ("I do not know this session", True),
        ("Session abc timed out", True),
        ("Unknown tool: session_list", False),
        ("Invalid arguments: session must be a string", False),
        ("Tool timed out in session 5", False),
        ("Session limit reached", False),
        ("The database is not initialized", False),
        ("Unauthorized", False),
        ("", False),
    ],
)
def test_words_say_whether_a_server_knows_the_session(words: str, is_lost: bool) -> None:
    """Servers say it in words of their own."""
    assert names_lost_session(words) is is_lost


async def test_a_session_counts_until_its_last_call_is_over() -> None:
    """A session that is replaced while it serves a call still has its place."""
    habit = {"forgotten": FORGOTTEN["404, empty"], "asks": {"method": "ping"}}
    async with reached(habit, max_sessions=1) as (server, mcp):
        server.hold_answers()
        hanging = asyncio.create_task(text_of(mcp, called(declared(server.url), "good")))
        await server.was_asked.wait()
        server.forget()
        assert "Too many" in (await failure(mcp, listed(declared(server.url)))).message
        assert server.initialized == 1
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await tools_of(mcp, listed(declared(server.url)))


# --- results ---------------------------------------------------------------------------------------------------------

TEXT: Final = {"type": "text", "text": "HELLO"}
RESULTS: Final[dict[str, tuple[Json, str]]] = {
    "an unknown block": (
        {"content": [TEXT, {"type": "widget", "uri": "ui://x"}]},
        'HELLO\n{"type": "widget", "uri": "ui://x"}',
    ),
    "an unknown block with a text": ({"content": [{"type": "markdown", "text": "# A"}, TEXT]}, "# A\nHELLO"),
    "a block without a type": ({"content": [{"text": "A"}]}, "A"),
    "a large unknown block": (
        {"content": [{"type": "x", "data": "A" * 9000}]},
        '{"type": "x", "data": "[9000 characters]"}',
    ),
    "a text without a text": ({"content": [{"type": "text"}, TEXT]}, "HELLO"),
    "a lone surrogate": ({"content": [{"type": "text", "text": "A\ud800"}]}, "A\ufffd"),
    "a text that is null": ({"content": [{"type": "text", "text": None}, TEXT]}, "HELLO"),
    "a text that is an object": (
        {"content": [{"type": "text", "text": {"a": 1}}]},
        '{"type": "text", "text": {"a": 1}}',
    ),
    "an image without a type": ({"content": [TEXT, {"type": "image", "data": "AAAA"}]}, "HELLO\n[image, 3 bytes]"),
    "an image without data": (
        {"content": [TEXT, {"type": "image", "mimeType": "image/png"}]},
        'HELLO\n{"type": "image", "mimeType": "image/png"}',
    ),
    "a sound": (
        {"content": [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]},
        "[audio, audio/wav, 3 bytes]",
    ),
    "a link without a name": ({"content": [{"type": "resource_link", "uri": "https://a/"}]}, "[resource, https://a/]"),
    "a resource without a URI": ({"content": [{"type": "resource", "resource": {"text": "A"}}]}, "[resource]\nA"),
    "a resource without contents": (
        {"content": [TEXT, {"type": "resource", "resource": {"uri": "file:///a"}}]},
        'HELLO\n{"type": "resource", "resource": {"uri": "file:///a"}}',
    ),
    "annotations that are a text": ({"content": [{**TEXT, "annotations": "x", "_meta": 5}]}, "HELLO"),
    "blocks that are texts": ({"content": ["A", 5, None, TEXT]}, "A\n5\nnull\nHELLO"),
    "content that is null": ({"content": None}, "[no output]"),
    "content that is null, and structured": ({"content": None, "structuredContent": {"a": 1}}, '{"a": 1}'),
    "no content, and structured": ({"structuredContent": {"a": 1}}, '{"a": 1}'),
    "content that is a text": ({"content": "HELLO"}, "HELLO"),
    "content that is one block": ({"content": TEXT}, "HELLO"),
    "nothing": ({}, "[no output]"),
    "other fields": ({"contents": 1}, '{"contents": 1}'),
    "a result of before 2025": ({"toolResult": {"a": 1}}, '{"a": 1}'),
    "structured, with a short text": ({"content": [TEXT], "structuredContent": {"a": "é"}}, 'HELLO\n{"a": "é"}'),
    "structured, as text": (
        {"content": [{"type": "text", "text": '{"b": 2,\n "a": 1}'}], "structuredContent": {"a": 1, "b": 2}},
        '{"b": 2,\n "a": 1}',
    ),
    "structured, within a text": (
        {"content": [{"type": "text", "text": 'So:\n```\n{"a":\n "\\u00e9"}\n```'}], "structuredContent": {"a": "é"}},
        'So:\n```\n{"a":\n "\\u00e9"}\n```',
    ),
    "structured, a wrapped text": ({"content": [TEXT], "structuredContent": {"result": "HELLO"}}, "HELLO"),
    "structured, a wrapped number": (
        {"content": [{"type": "text", "text": "5"}], "structuredContent": {"result": 5}},
        "5",
    ),
    "structured, a wrapped list": (
        {"content": [TEXT, {"type": "text", "text": "5"}], "structuredContent": {"result": ["HELLO", 5]}},
        "HELLO\n5",
    ),
    "structured, no object": ({"content": [TEXT], "structuredContent": [1, 2]}, "HELLO\n[1, 2]"),
    "structured, beside an image": (
        {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}], "structuredContent": {"a": 1}},
        '[image, image/png, 3 bytes]\n{"a": 1}',
    ),
    "isError that is null": ({"content": [TEXT], "isError": None}, "HELLO"),
    "_meta that is a list": ({"content": [TEXT], "_meta": [1]}, "HELLO"),
}


@pytest.mark.parametrize("shape", RESULTS)
async def test_a_result_is_read_block_by_block(shape: str) -> None:
    """An odd block does not take the rest along, and structured content is not lost."""
    result, text = RESULTS[shape]
    async with reached({"result": result}) as (server, mcp):
        assert await text_of(mcp, called(declared(server.url), "good")) == text


@pytest.mark.parametrize(("name", "text"), [("r_structured_ack", "STRUCT"), ("r_unknown_block", "HELLO")])
async def test_the_model_reads_what_a_recorded_server_says(name: str, text: str) -> None:
    """The results are those that servers in use send."""
    async with reached(recorded(name)) as (server, mcp):
        assert text in await text_of(mcp, called(declared(server.url), "report"))


@pytest.mark.parametrize("is_error", [True, "true", 1])
async def test_a_failure_of_the_tool_is_one_however_it_says_so(is_error: Any) -> None:
    """With what it says in its structured content."""
    result = {"content": [TEXT], "isError": is_error, "structuredContent": {"why": "full"}}
    async with reached({"result": result}) as (server, mcp):
        failed = await failure(mcp, called(declared(server.url), "good"))
    assert failed.message == 'HELLO {"why": "full"}'
    assert failed.error.type == "mcp_tool_execution_error"


@pytest.mark.parametrize("result", [{"task": {"taskId": "1"}}, {"resultType": "input_required", "requestState": "x"}])
def test_a_result_that_is_still_to_come_is_left_unchanged(result: Json) -> None:
    """It is not taken for an empty result."""
    assert mend_call_result(result) == result


# --- what a server asks of its client --------------------------------------------------------------------------------

ASKED: Final[dict[str, Json]] = {
    "elicitation/create": {"message": "Your name?", "requestedSchema": {"type": "object", "properties": {}}},
    "sampling/createMessage": {"messages": [], "maxTokens": 5},
    "roots/list": {},
}


@pytest.mark.parametrize("method", ASKED)
async def test_a_server_that_asks_outside_of_the_calls_stream_is_refused_at_once(method: str) -> None:
    """Its request reaches the client, which has no user to ask."""
    async with reached({"asks": {"method": method, "params": ASKED[method]}}) as (server, mcp):
        failed = await failure(mcp, called(declared(server.url), "good"))
        assert "not supported" in failed.message
        assert '"code"' in failed.message


async def test_a_private_address_is_refused_with_the_way_to_permit_it() -> None:
    """A server of one's own is a server of the run config."""
    async with FieldServer({}) as server, started("http://127.0.0.2:80/") as mcp:
        failed = await failure(mcp, listed(declared(server.url)))
    assert code(failed) == -32000
    assert "is not open to fetching. To use a server of your own" in failed.message
    assert "tool_servers.servers with private: true" in failed.message
