"""Prints what one request costs while many streams are open, in one of many projects with limits, or with the tools of
many MCP servers, each as a ratio to few of them in the same run. `pytest -m bench -s`.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from tests.support.sdk.client import sdk_client
from tests.support.servers.machines import Deployment, deployed, measure_calls
from tests.support.servers.mcp_server import RealServer
from tests.support.servers.mcp_stack import with_mcp
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]
STREAMS: Final = 5000
PROJECTS: Final = 500
SERVERS: Final = 20
TOOLS: Final = 100
CALLS: Final = 200
SLOW: Final[list[dict[str, Any]]] = [{"text": "a"}, {"wait_s": 600}, {"text": "b"}]
Call = Callable[[], Awaitable[Any]]


async def measure(deployment: Deployment, call: Call, count: int = CALLS) -> tuple[float, float]:
    """Return the CPU of a call in milliseconds, and the median of its times in milliseconds."""
    cpu_ms, times_ms = await measure_calls(deployment.cpu_s, call, count)
    return cpu_ms, statistics.median(times_ms)


def report(name: str, few: tuple[float, float], many: tuple[float, float]) -> None:
    print(f"{name}: CPU {few[0]:.2f} and {many[0]:.2f} ms, {many[0] / few[0]:.2f}; p50 {many[1] / few[1]:.2f}")


def build_config(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "server": {"log_level": "warning", "api_keys": [ROOT]},
        "inference": {"provider": "scripted", "turns": [[{"text": "hello"}]]},
        "kv_store": {"provider": "sqlite", "path": str(folder / "store.db"), "survives_power_loss": False},
        "responses": {"provider": "loop"},
        **sections,
    }


async def test_a_request_while_many_streams_are_open(tmp_path: Path) -> None:
    slow = {"provider": "scripted", "turns": [SLOW]}
    quick = {"provider": "scripted", "turns": [[{"text": "hello"}]]}
    models = {"slow": {"slow": "scripted"}, "quick": {"quick": "scripted"}}
    inference = {"provider": "router", "providers": {"slow": slow, "quick": quick}, "models": models}
    config = build_config(tmp_path, inference=inference)
    config["server"] = {"log_level": "warning", "max_silent_per_address": 8192}
    async with (
        deployed(tmp_path, config) as deployment,
        sdk_client(deployment.url) as client,
    ):

        async def create() -> None:
            await client.responses.create(model="quick", input="hi")

        await measure(deployment, create)
        few, memory = await measure(deployment, create), deployment.memory_bytes()
        writers: list[asyncio.StreamWriter] = []
        places = asyncio.Semaphore(64)
        opening = [asyncio.create_task(open_stream(deployment.url, writers, places)) for _ in range(STREAMS)]
        await asyncio.gather(*opening)
        many, more = await measure(deployment, create), deployment.memory_bytes()
        report(f"{len(writers)} open streams", few, many)
        print(f"{(more - memory) / 1024 / STREAMS:.1f} KiB of memory for each, over three machines")
        for writer in writers:
            writer.transport.abort()


async def open_stream(url: str, writers: list[asyncio.StreamWriter], places: asyncio.Semaphore) -> None:
    """Begin a stream, and return when its first text has come."""
    address = urlsplit(url)
    body = b'{"model":"slow","input":"hi","stream":true,"store":false}'
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    async with places:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        await reader.readuntil(b"response.output_text.delta")
        writers.append(writer)


async def test_a_request_in_one_of_many_projects(tmp_path: Path) -> None:
    async with (
        deployed(tmp_path, build_config(tmp_path, **CHAINED)) as deployment,
        sdk_client(deployment.url, "sk-root") as administrator,
    ):
        organization = organization_of(administrator)
        limits = {"max_requests_per_1_minute": 1_000_000, "max_tokens_per_1_minute": 1_000_000_000}
        _, key = await new_project(organization, limits)
        async with sdk_client(deployment.url, key) as client:

            async def create() -> None:
                await client.responses.create(model="scripted", input="hi")

            await measure(deployment, create)
            few = await measure(deployment, create)
            places = asyncio.Semaphore(8)

            async def use_new_project() -> None:
                async with places:
                    _, other = await new_project(organization, limits)
                    async with sdk_client(deployment.url, other) as user:
                        await user.responses.create(model="scripted", input="hi")

            await asyncio.gather(*(use_new_project() for _ in range(PROJECTS - 1)))
            report(f"{PROJECTS} projects with limits", few, await measure(deployment, create))


async def test_a_request_with_tools_of_many_servers(tmp_path: Path) -> None:
    async with AsyncExitStack() as running:
        servers = [RealServer() for _ in range(SERVERS)]
        for server in servers:
            for number in range(TOOLS):
                server.mcp.tool(name=f"wide_{number}")(lambda: "yes")
            await running.enter_async_context(server.serving("streamable_http"))
        config = build_config(tmp_path, tool_servers=with_mcp(*(server.url for server in servers)))
        deployment = await running.enter_async_context(deployed(tmp_path, config))
        client = await running.enter_async_context(sdk_client(deployment.url, "sk-root"))

        def declare(server: RealServer, number: int, count: int) -> dict[str, Any]:
            names = [f"wide_{each}" for each in range(count)]
            fields = {"server_label": f"s{number}", "server_url": server.url, "allowed_tools": names}
            return {"type": "mcp", "require_approval": "never", **fields}

        one = [declare(servers[0], 0, TOOLS)]
        all_servers = [declare(server, number, TOOLS // SERVERS) for number, server in enumerate(servers)]
        figures: list[tuple[float, float]] = []
        for tools in (one, all_servers):
            sent: Any = tools

            async def create(sent: Any = sent) -> None:
                response = await client.responses.create(model="scripted", input="hi", tools=sent)
                assert response.status == "completed"

            await measure(deployment, create, 40)
            figures.append(await measure(deployment, create, 80))
        report(f"{TOOLS} of {SERVERS * TOOLS} tools, of {SERVERS} servers instead of 1", *figures)
