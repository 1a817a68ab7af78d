"""MCP servers of several tenants: shares of the sessions, and the operator's rules for configured servers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from apis.fair_share import Tenants
from apis.tool_servers import InvalidDeclaration
from apis.wire.tools import McpTool
from providers.fetcher.safe import GuardedFetcher
from providers.tool_servers.mcp.provider import MCP
from tests.support.servers.mcp_calls import called, declaration, declared, failure, listed, started, text_of, tools_of
from tests.support.servers.mcp_server import RealServer

TENANTS = Tenants(frozenset({"loud", "quiet"}))


@asynccontextmanager
async def reached(**config: Any) -> AsyncGenerator[tuple[MCP, RealServer]]:
    server = RealServer()
    async with server.serving(), started(server.url, tenants=TENANTS, **config) as mcp:
        yield mcp, server


def hanging(server: RealServer, number: int) -> dict[str, Any]:
    return declared(server.url, authorization=f"token-of-{number}")


async def test_calls_of_one_tenant_that_hang_leave_sessions_for_another() -> None:
    """One tenant's calls to servers that do not answer take its share of the sessions only."""
    async with reached(max_sessions=4) as (mcp, server):
        calls = [asyncio.create_task(text_of(mcp, called(hanging(server, n), "hang", "loud"))) for n in range(2)]
        async with asyncio.timeout(10):
            await server.reached.wait()
        assert "Too many" in (await failure(mcp, called(hanging(server, 3), "hang", "loud"))).message
        assert await text_of(mcp, called(declared(server.url), "echo", "quiet", text="a")) == "a"
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


async def test_a_tenant_at_its_share_replaces_its_own_idle_session() -> None:
    """The session of another tenant stays open."""
    async with reached(max_sessions=4) as (mcp, server):
        for number, tenant in enumerate(("quiet", "loud", "loud", "loud", "loud")):
            await text_of(mcp, called(hanging(server, number), "echo", tenant, text="a"))
        server.methods.clear()
        await text_of(mcp, called(hanging(server, 0), "echo", "quiet", text="a"))
        assert server.methods == ["POST"]  # no new handshake


async def test_a_server_of_the_run_config_is_known_to_its_tenants_alone() -> None:
    """Other tenants get the error that there is none, by label and by connector."""
    server = RealServer()
    async with server.serving():
        rules: dict[str, Any] = {"url": server.url, "tenants": ["quiet"]}
        async with started(server.url, servers={"ours": rules}, connectors={"c": rules}) as mcp:
            for fields in ({"server_label": "ours"}, {"server_label": "any", "connector_id": "c"}):
                assert await tools_of(mcp, listed(fields, "quiet"))
                refused = await failure(mcp, listed(fields, "loud"))
                assert isinstance(refused, InvalidDeclaration)
                with pytest.raises(InvalidDeclaration):
                    await mcp.check_declaration(declaration(fields), tenant="loud")


async def test_only_the_tools_that_both_the_operator_and_the_request_allow_are_there() -> None:
    """The stricter of both rules wins."""
    server = RealServer()
    async with server.serving():
        rules = {"url": server.url, "allowed_tools": ["echo", "note"]}
        async with started(server.url, servers={"ours": rules}) as mcp:
            ours = {"server_label": "ours"}
            assert [tool.name for tool in await tools_of(mcp, listed(ours))] == ["echo", "note"]
            narrowed = {**ours, "allowed_tools": ["note", "fail"]}
            assert [tool.name for tool in await tools_of(mcp, listed(narrowed))] == ["note"]
            for fields, name in ((ours, "fail"), (narrowed, "fail"), (narrowed, "echo")):
                assert "no tool" in (await failure(mcp, called(fields, name, why="x", text="a"))).message


async def test_a_request_cannot_replace_a_header_of_the_run_config() -> None:
    """The operator's headers stay, and the request may add others."""
    server = RealServer()
    async with server.serving():
        rules = {"url": server.url, "headers": {"Authorization": "Bearer of-the-config"}}
        async with started(server.url, servers={"ours": rules}) as mcp:
            for fields in ({"authorization": "mine"}, {"headers": {"authorization": "mine"}}):
                refused = await failure(mcp, listed({"server_label": "ours", **fields}))
                assert isinstance(refused, InvalidDeclaration)
                assert "'authorization'" in refused.message
            await tools_of(mcp, listed({"server_label": "ours", "headers": {"x-own": "1"}}))
            assert server.sent[-1]["authorization"] == "Bearer of-the-config"
            assert server.sent[-1]["x-own"] == "1"


async def test_a_private_server_is_reached_without_opening_its_network_to_requests() -> None:
    """`private` holds for the server of the run config, not for a `server_url` of the same address."""
    server = RealServer()
    async with server.serving():
        rules = {"url": server.url, "private": True}
        fetcher = GuardedFetcher(GuardedFetcher.Config())
        await fetcher.start()
        config = MCP.Config.model_validate({"servers": {"ours": rules}, "connectors": {"c": rules, "d": server.url}})
        mcp = MCP(config, fetcher)
        await mcp.start()
        try:
            assert await tools_of(mcp, listed({"server_label": "ours"}))
            assert await tools_of(mcp, listed({"server_label": "any", "connector_id": "c"}))
            for fields in ({"server_url": server.url}, {"connector_id": "d"}):
                await failure(mcp, listed({"server_label": "ours", **fields}))
        finally:
            await mcp.close()
            await fetcher.close()


def test_the_operator_names_the_tools_that_need_an_approval() -> None:
    """`always`, `never`, or names; what the request declares is not looked at."""
    servers = {name: {"url": "https://a.example/", "require_approval": name} for name in ("always", "never")}
    server = {"url": "https://a.example/", "require_approval": ["write"]}
    mcp = MCP(
        MCP.Config.model_validate({"servers": {**servers, "some": server}}), GuardedFetcher(GuardedFetcher.Config())
    )
    required = {
        label: [
            tool
            for tool in ("read", "write")
            if mcp.find_policy(
                McpTool.model_validate({"type": "mcp", "server_label": label, "require_approval": "never"})
            ).requires_approval(tool)
        ]
        for label in ("always", "never", "some")
    }
    assert required == {"always": ["read", "write"], "never": [], "some": ["write"]}
    with pytest.raises(ValidationError, match="private"):
        MCP.Config.model_validate({"servers": {"a": {"command": "x", "private": True}}})
