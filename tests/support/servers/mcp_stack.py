"""A stack whose models may use MCP servers on one loopback address."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from apis.fair_share import ONE_TENANT, Tenants
from apis.inference import Model
from providers.fetcher.safe import GuardedFetcher
from providers.inference.scripted import Scripted
from providers.tool_servers.mcp.provider import MCP
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import chat_requests, messages
from tests.support.servers.mcp_server import LOOPBACK, Kind, RealServer
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
DONE: Script = [{"text": "Done."}]


class LoopbackMCP(MCP):
    """MCP with a Fetcher of its own, which may go to these ports of the loopback address."""

    class Config(MCP.Config):
        ports: list[int] = Field(default_factory=list[int])

    def __init__(self, config: Config, tenants: Tenants = ONE_TENANT) -> None:
        networks = {"allowed_private_networks": [f"{LOOPBACK}/32"], "allowed_ports": config.ports or [80]}
        self._safe = GuardedFetcher(GuardedFetcher.Config.model_validate(networks))
        super().__init__(config, self._safe, tenants)

    async def start(self) -> None:
        await self._safe.start()
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._safe.close()


class Grouping(Scripted):
    """A scripted model that knows namespaces of functions, as those of Harmony do."""

    class Config(Scripted.Config):
        pass

    async def models(self) -> Sequence[Model]:
        return [
            Model(id=each.id, owned_by=each.owned_by, created=each.created, native_tools=frozenset({"python"}))
            for each in await super().models()
        ]


def with_mcp(*urls: str, **config: Any) -> Json:
    """A tool_servers section that may reach these URLs."""
    ports = [urlsplit(url).port for url in urls]
    return {
        "provider": "tests.support.servers.mcp_stack:LoopbackMCP",
        "ports": ports,
        "list_timeout_s": 5,
        "call_timeout_s": 5,
        **config,
    }


def playing(*turns: Script, grouped: bool = False) -> Json:
    """An inference section that plays these turns."""
    provider = "tests.support.servers.mcp_stack:Grouping" if grouped else "scripted"
    return {"provider": provider, "turns": list(turns)}


@asynccontextmanager
async def stacked(
    *turns: Script, kind: Kind = "streamable_http", grouped: bool = False, **sections: Any
) -> AsyncGenerator[tuple[Served, RealServer]]:
    """A stack whose model plays `turns`, and a real MCP server that it can reach."""
    real = RealServer()
    async with (
        real.serving(kind),
        serving(playing(*turns, grouped=grouped), tool_servers=with_mcp(real.url), **sections) as served,
    ):
        yield served, real


def mcp(real: RealServer, **fields: Any) -> Json:
    """The server as a request declares it; none of its tools needs approval."""
    return {"type": "mcp", "server_label": "real", "server_url": real.url, "require_approval": "never", **fields}


def offered(served: Served) -> list[str]:
    """The names of the tools that the model was offered last."""
    return [tool.name for tool in chat_requests(served)[-1].tools or ()]


def tool_outputs(served: Served) -> dict[str, str]:
    """The outputs of tool calls that the model was sent last, by call id."""
    return {each["tool_call_id"]: each["content"] for each in messages(served) if each["role"] == "tool"}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]
