"""MCP and the URLs that nothing may follow: none is connected to, whether a request or the config names it."""

import asyncio
from contextlib import suppress
from itertools import cycle
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from providers.tool_servers.mcp.provider import MCP
from providers.tool_servers.mcp.wire import Transport
from tests.support.servers.fetcher_hosts import Canary, Site, fetching
from tests.support.servers.forbidden_urls import forbidden
from tests.support.servers.mcp_calls import declared, failure, listed


async def test_no_forbidden_url_is_ever_connected_to() -> None:
    async with Canary() as canary, fetching([canary.port, 80, 443]) as safe:
        mcp = MCP(MCP.Config.model_validate({}), safe)
        try:
            for url in forbidden(canary.port):
                await failure(mcp, listed(declared(url, authorization="sk-secret")))
        finally:
            await mcp.close()
        assert canary.connections == 0


@pytest.mark.parametrize("transport", ["streamable_http", "sse"])
async def test_no_forbidden_url_of_the_config_is_ever_connected_to(transport: Transport) -> None:
    async with Canary() as canary, fetching([canary.port, 80, 443]) as safe:
        servers: dict[str, Any] = {}
        for url in forbidden(canary.port):
            with suppress(ValidationError):
                server = {"url": url, "transport": transport}
                MCP.Config.model_validate({"servers": {"a": server}})
                servers[f"server_{len(servers)}"] = server
        assert len(servers) > 20
        mcp = MCP(MCP.Config.model_validate({"servers": servers}), safe)
        try:
            for label in servers:
                await failure(mcp, listed({"server_label": label, "authorization": "sk-secret"}))
        finally:
            await mcp.close()
        assert canary.connections == 0


@pytest.mark.parametrize("transport", ["streamable_http", "sse"])
async def test_no_redirect_leads_to_a_forbidden_url(transport: Transport) -> None:
    """Each status leads to some of them: what a redirect is and where it leads are looked at apart."""
    async with Canary() as canary, Site() as site, fetching([canary.port, site.port, 80, 443]) as safe:
        there, statuses = "", cycle((301, 302, 303, 307, 308))

        async def away(request: web.Request) -> web.StreamResponse:
            return web.Response(status=next(statuses), headers={"Location": there})

        path = "/sse" if transport == "sse" else "/mcp"
        site.pages[path] = away
        mcp = MCP(MCP.Config.model_validate({}), safe)
        try:
            for url in forbidden(canary.port):
                # What cannot stand in a header cannot be sent as one.
                if url.isascii() and url.isprintable() and len(url) < 4096:
                    there = url
                    await failure(mcp, listed(declared(f"{site.url}{path}")))
        finally:
            await mcp.close()
        assert canary.connections == 0


async def test_a_redirect_within_the_origin_is_followed_with_the_credentials_and_no_other_is() -> None:
    async with Site() as site, Site() as other, fetching([site.port, other.port]) as safe:
        queries: list[str] = []

        async def away(request: web.Request) -> web.StreamResponse:
            queries.append(request.headers["Authorization"])
            return web.Response(status=307, headers={"Location": "/second"})

        async def further(request: web.Request) -> web.StreamResponse:
            queries.append(request.headers["Authorization"])
            return web.Response(status=307, headers={"Location": f"{other.url}/mcp"})

        site.pages.update({"/mcp": away, "/second": further})
        mcp = MCP(MCP.Config.model_validate({}), safe)
        async with asyncio.timeout(30):
            await failure(mcp, listed(declared(f"{site.url}/mcp", authorization="sk-secret")))
            await mcp.close()
        assert set(queries) == {"Bearer sk-secret"}
        assert len(queries) >= 2
        assert other.requests == []
