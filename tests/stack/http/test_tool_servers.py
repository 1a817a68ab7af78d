"""GET /v1/stack/tool_servers: the state of an MCP server that answers, that wants a sign-in, that is away."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import NotFoundError

from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.servers.ports import free_port
from tests.support.servers.serving import serving


@asynccontextmanager
async def refusing() -> AsyncGenerator[str]:
    """A server that answers every request with 401."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


async def test_the_state_of_each_server_is_said_with_its_reason() -> None:
    real, away = RealServer(), f"http://127.0.0.1:{free_port()}/mcp"
    async with real.serving(), refusing() as closed:
        urls = {"real": real.url, "closed": closed, "away": away}
        servers = {label: {"url": url, "private": True} for label, url in urls.items()}
        async with serving(tool_servers=with_mcp(*urls.values(), servers=servers)) as served:

            async def find(label: str) -> Any:
                return await served.client.get(f"/stack/tool_servers/{label}", cast_to=object)

            answers = {label: await find(label) for label in urls}
            with pytest.raises(NotFoundError, match="No MCP server 'other'"):
                await find("other")
    assert {label: answer["state"] for label, answer in answers.items()} == {
        "real": "ready",
        "closed": "needs_sign_in",
        "away": "failed",
    }
    assert "note" in answers["real"]["tools"]
    assert "`tool_servers.servers.closed.headers`" in answers["closed"]["reason"]
    assert answers["away"]["reason"]
