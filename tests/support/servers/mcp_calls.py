"""Calls to MCP servers in tests of the client."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types.responses.mcp_tool_call_error import McpToolExecutionError

from apis.fair_share import ONE_TENANT, Tenants
from apis.tool_servers import ServerTool, ToolServerFailed
from apis.wire.tools import McpTool
from providers.fetcher.safe import GuardedFetcher
from providers.tool_servers.mcp.provider import MCP
from tests.support.servers.mcp_server import LOOPBACK

Json = dict[str, Any]


@dataclass(frozen=True)
class ServerCall:
    """One call of a server: of the tool `name`, or for its list of tools where that is None."""

    server: Json
    name: str | None
    arguments: Json
    tenant: str = "t"
    listed_tool: ServerTool | None = None


@asynccontextmanager
async def started(*urls: str, tenants: Tenants = ONE_TENANT, **config: Any) -> AsyncGenerator[MCP]:
    """An MCP that may reach the ports of these URLs, on one loopback address."""
    ports = [urlsplit(url).port for url in urls] or [80]
    fetching = {"allowed_private_networks": [f"{LOOPBACK}/32"], "allowed_ports": ports}
    fetcher = GuardedFetcher(GuardedFetcher.Config.model_validate(fetching))
    await fetcher.start()
    mcp = MCP(MCP.Config.model_validate({"list_timeout_s": 5, "call_timeout_s": 5, **config}), fetcher, tenants)
    await mcp.start()
    try:
        yield mcp
    finally:
        async with asyncio.timeout(20):
            await mcp.close()
        await fetcher.close()
        assert not [task for task in asyncio.all_tasks() if "Session._live" in repr(task)]


def declaration(server: Mapping[str, Any]) -> McpTool:
    """The server as a request declares it; its URL and credentials reach the provider unchecked."""
    url = server.get("server_url")
    fields = {name: value for name, value in server.items() if name != "server_url"}
    return McpTool.model_validate({"type": "mcp", **fields}).model_copy(update={"server_url": url})


def declared(url: str, **fields: Any) -> Json:
    return {"server_label": "label", "server_url": url, **fields}


def called(server: Json, name: str, /, tenant: str = "t", **arguments: Any) -> ServerCall:
    return ServerCall(server, name, arguments, tenant)


def listed(server: Json, tenant: str = "t") -> ServerCall:
    return ServerCall(server, None, {}, tenant)


async def perform(mcp: MCP, call: ServerCall) -> Any:
    """Make the call; returns its text, or the list of tools."""
    tool = declaration(call.server)
    if call.name is None:
        return await mcp.list_tools(tool, tenant=call.tenant)
    return await mcp.call_tool(tool, call.name, call.arguments, tenant=call.tenant, listed_tool=call.listed_tool)


async def tools_of(mcp: MCP, call: ServerCall) -> Sequence[ServerTool]:
    async with asyncio.timeout(15):
        return await perform(mcp, call)


async def text_of(mcp: MCP, call: ServerCall) -> str:
    async with asyncio.timeout(15):
        return await perform(mcp, call)


async def failure(mcp: MCP, call: ServerCall) -> ToolServerFailed:
    async with asyncio.timeout(15):
        with pytest.raises(ToolServerFailed) as failed:
            await perform(mcp, call)
    assert 0 < len(failed.value.message.encode()) <= 1024
    assert failed.value.message.isprintable()
    return failed.value


def code(failed: ToolServerFailed) -> int:
    """The code of a failure that is not the tool's own."""
    assert not isinstance(failed.error, McpToolExecutionError)
    return failed.error.code
