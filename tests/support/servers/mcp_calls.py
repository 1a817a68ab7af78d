"""Calling MCP servers in tests."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from apis.errors import ToolFailed
from apis.tool_runtime import ToolCall, ToolResult
from providers.fetcher.safe import Safe
from providers.tool_runtime.mcp.provider import MCP
from tests.support.servers.mcp_server import LOOPBACK


@asynccontextmanager
async def started(*urls: str, **config: Any) -> AsyncGenerator[MCP]:
    """An MCP that may reach the ports of these URLs, on one loopback address."""
    ports = [urlsplit(url).port for url in urls] or [80]
    fetching = {"allowed_private_networks": [f"{LOOPBACK}/32"], "allowed_ports": ports}
    fetcher = Safe(Safe.Config.model_validate(fetching))
    await fetcher.start()
    mcp = MCP(MCP.Config.model_validate({"list_timeout_s": 5, "call_timeout_s": 5, **config}), fetcher)
    await mcp.start()
    try:
        yield mcp
    finally:
        async with asyncio.timeout(20):
            await mcp.close()
        await fetcher.close()
        assert not [task for task in asyncio.all_tasks() if "Session._live" in repr(task)]


def declared(url: str, **fields: Any) -> dict[str, Any]:
    return {"server_label": "label", "server_url": url, **fields}


def called(server: Mapping[str, Any] | None, name: str, /, tenant: str = "t", **arguments: Any) -> ToolCall:
    return ToolCall("call_1", "mcp_call", {"name": name, "arguments": arguments}, {"server": server}, tenant)


def listed(server: Mapping[str, Any] | None, tenant: str = "t") -> ToolCall:
    return ToolCall("call_1", "mcp_list_tools", {}, {"server": server}, tenant)


async def outcome(mcp: MCP, call: ToolCall) -> ToolResult:
    async with asyncio.timeout(15):
        return await mcp.call(call)


async def failure(mcp: MCP, call: ToolCall) -> ToolFailed:
    async with asyncio.timeout(15):
        with pytest.raises(ToolFailed) as failed:
            await mcp.call(call)
    assert 0 < len(failed.value.message.encode()) <= 1024
    assert failed.value.message.isprintable()
    return failed.value
