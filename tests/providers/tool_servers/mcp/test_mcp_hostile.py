"""MCP against servers that do all that they should not: each is survived, bounded, and said as an error."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import psutil
import pytest
from openai.types.responses.mcp_tool_call_error import McpToolCallError
from pydantic import TypeAdapter

from providers.tool_servers.mcp.provider import MCP
from tests.support.servers.mcp_calls import called, code, declared, failure, listed, started, text_of, tools_of
from tests.support.servers.mcp_hostile import DEEDS, EMPTY_SCHEMA, SECRET, HostileServer, tool
from tests.support.servers.mcp_server import LOOPBACK

ERROR: Final[TypeAdapter[Any]] = TypeAdapter(McpToolCallError)
LIMIT_S: Final = 1.5


@asynccontextmanager
async def reached(**config: Any) -> AsyncGenerator[tuple[HostileServer, HostileServer, MCP]]:
    """A hostile server, another that must get no request, and an MCP that could reach both."""
    async with (
        HostileServer() as server,
        HostileServer() as elsewhere,
        started(server.url, elsewhere.url, call_timeout_s=LIMIT_S, list_timeout_s=5, **config) as mcp,
    ):
        server.elsewhere = elsewhere.url.removesuffix("/mcp")
        yield server, elsewhere, mcp


def expected_type(deed: str) -> str:
    return "http_error" if deed.startswith("status") and deed != "status 202" else "mcp_protocol_error"


@pytest.mark.parametrize("deed", [deed for deed in DEEDS if deed != "echo headers"])
async def test_a_misdeed_in_a_call_is_an_error_and_the_next_call_works(
    deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = psutil.Process().memory_info().rss
    async with reached() as (server, elsewhere, mcp):
        declaration = declared(server.url, authorization=SECRET)
        assert await text_of(mcp, called(declaration, "do")) == "done"
        server.deed = deed
        async with asyncio.timeout(LIMIT_S + 4):
            failed = await failure(mcp, called(declaration, "do"))
        assert ERROR.validate_python(failed.error.model_dump()).type == expected_type(deed)
        assert SECRET not in failed.message + failed.error.model_dump_json() + caplog.text
        server.deed = ""
        assert await text_of(mcp, called(declaration, "do")) == "done"
        assert elsewhere.methods == []
        assert server.sent_bytes < 48 * 1024 * 1024
        assert len(server.answers) <= 100
        assert server.methods.count("GET") <= 5 + 3 * server.initialized
    assert psutil.Process().memory_info().rss - before < 100 * 1024 * 1024


@pytest.mark.parametrize(("deed", "status"), [("status 401", 401), ("status 429", 429), ("status 503", 503)])
async def test_an_http_error_has_the_status_of_its_response(deed: str, status: int) -> None:
    async with reached() as (server, _, mcp):
        server.deed = deed
        failed = await failure(mcp, called(declared(server.url), "do"))
    assert failed.error.model_dump() == {
        "type": "http_error",
        "code": status,
        "message": f"The MCP server answered with HTTP {status}.",
    }


@pytest.mark.parametrize("deed", ["hang", "hang in stream"])
async def test_a_call_that_is_cancelled_leaves_the_server(deed: str) -> None:
    async with reached() as (server, _, mcp):
        server.deed = deed
        call = asyncio.create_task(text_of(mcp, called(declared(server.url), "do")))
        async with asyncio.timeout(10):
            await server.reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.dropped.wait()
        server.deed = ""
        await text_of(mcp, called(declared(server.url), "do"))


async def test_a_call_that_fails_leaves_others_of_its_session_alone() -> None:
    async with reached() as (server, _, mcp):
        server.deed = "hang"
        hanging = asyncio.create_task(failure(mcp, called(declared(server.url), "do")))
        async with asyncio.timeout(10):
            await server.reached.wait()
        server.deed = "die"
        await failure(mcp, called(declared(server.url), "do"))
        assert not hanging.done()
        assert "did not answer" in (await hanging).message


async def test_credentials_that_a_server_returns_are_redacted() -> None:
    async with reached() as (server, _, mcp):
        server.deed = "echo headers"
        server.tools = [
            tool("do", description=f"Knows {SECRET}."),
            tool("leak", inputSchema={"type": "object", "const": SECRET}),
        ]
        declaration = declared(
            server.url, authorization=SECRET, headers={"X-Api-Key": f"{SECRET}-too", "X-Place": "production"}
        )
        text = await text_of(mcp, called(declaration, "do"))
        tools = await tools_of(mcp, listed(declaration))
    assert "Authorization: Bearer [redacted]" in text or "Authorization: [redacted]" in text
    assert "production" in text
    assert SECRET not in text
    assert [tool.description for tool in tools] == ["Knows [redacted]."]


async def test_a_list_is_bounded_and_holds_only_tools_that_a_model_can_be_offered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = [
        *(tool(name) for name in ("", " ", "x" * 129, "a\nb", "a\u2028b", "a\u202eb", "a\0b")),
        tool("big", inputSchema={"type": "object", "description": "x" * 70_000}),
        tool("nul", inputSchema={"type": "object", "description": "\0"}),
    ]
    described = tool(
        "first", description="a\nb\u2028c\x1b[31m" + "é" * 10_000, annotations={"readOnlyHint": True, "x": 1}
    )
    async with reached() as (server, _, mcp):
        server.tools = [described, *wrong, tool("first"), *(tool(f"tool_{number}") for number in range(10_000))]
        tools = await tools_of(mcp, listed(declared(server.url)))
    assert len(tools) == 1024 - 9
    assert [tool.name for tool in tools[:2]] == ["first", "tool_0"]
    assert tools[0].description.startswith("a b c [31mé")
    assert tools[0].description.isprintable()
    assert len(tools[0].description.encode()) <= 4096
    assert tools[0].input_schema == EMPTY_SCHEMA
    assert tools[0].annotations == {"readOnlyHint": True}
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 9
    assert "are left out 11 in all" in said[-1]
    assert all(line.isprintable() for line in said)


async def test_many_large_tools_are_cut() -> None:
    async with reached() as (server, _, mcp):
        server.tools = [tool(f"tool_{number}", inputSchema=large(60_000)) for number in range(50)]
        tools = await tools_of(mcp, listed(declared(server.url)))
    assert [tool.name for tool in tools] == [f"tool_{number}" for number in range(34)]


def large(characters: int) -> dict[str, Any]:
    return {"type": "object", "description": "x" * characters}


@pytest.mark.parametrize("value", ["\ud800", float("nan"), "x" * 1024 * 1024], ids=["surrogate", "nan", "huge"])
async def test_arguments_that_cannot_be_sent_are_not(value: Any) -> None:
    async with reached() as (server, _, mcp):
        assert code(await failure(mcp, called(declared(server.url), "do", value=value))) == -32602
        assert server.methods == []


async def test_a_tool_with_an_invalid_name_is_not_called() -> None:
    async with reached() as (server, _, mcp):
        for name in ("", " ", "x" * 129, "do\n"):
            await failure(mcp, called(declared(server.url), name))
        assert server.methods == []


async def test_a_session_of_the_sse_transport_that_breaks_is_an_error_at_once() -> None:
    async with reached() as (server, elsewhere, mcp):
        declaration = declared(server.url.replace("/mcp", "/sse"))
        for deed, kind in (("status 500", "http_error"), ("stream ends", "mcp_protocol_error")):
            server.deed = deed
            async with asyncio.timeout(LIMIT_S / 2):
                assert (await failure(mcp, called(declaration, "do"))).error.type == kind
            server.deed = ""
            assert await text_of(mcp, called(declaration, "do")) == "done"
        server.deed = "endpoint elsewhere"
        await failure(mcp, called(declaration, "do", tenant="other"))
        assert elsewhere.methods == []


async def test_a_server_that_never_opens_a_session_is_given_up() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    holding = await asyncio.start_server(hold, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{holding.sockets[0].getsockname()[1]}"
    async with holding, started(url, list_timeout_s=LIMIT_S, call_timeout_s=LIMIT_S) as mcp:
        for path in ("mcp", "sse"):
            for call in (listed(declared(f"{url}/{path}")), called(declared(f"{url}/{path}"), "do")):
                assert code(await failure(mcp, call)) == -32001


async def test_a_url_without_an_mcp_server_is_an_http_error() -> None:
    async with reached() as (server, _, mcp):
        assert code(await failure(mcp, listed(declared(server.url.replace("/mcp", "/none"))))) == 404
        assert code(await failure(mcp, listed(declared(server.url.replace("/mcp", "/none/sse"))))) == 404


async def test_a_closed_port_is_an_error() -> None:
    async with HostileServer() as gone:
        url = gone.url
    async with started(url) as mcp:
        assert code(await failure(mcp, listed(declared(url)))) == -32000


async def test_close_in_the_midst_of_calls_ends_them() -> None:
    async with reached() as (server, _, mcp):
        server.deed = "hang"
        hanging = asyncio.create_task(failure(mcp, called(declared(server.url), "do")))
        async with asyncio.timeout(10):
            await server.reached.wait()
            await mcp.close()
            assert code(await hanging) == -32000
            await server.dropped.wait()
