"""A real MCP server of the official SDK, over every transport; as a program, over stdio."""

import asyncio
import base64
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Final, Literal

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

LOOPBACK: Final = "127.0.0.2"
Kind = Literal["streamable_http", "sse"]
READ_ONLY: Final = ToolAnnotations(title="Echo\nof it", read_only_hint=True)


class Password(BaseModel):
    """The input that a server requests of a user."""

    password: str


class RealServer:
    """A server; `notes` are the inputs of its tool `note`, `sent` the headers of its requests."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.dropped = asyncio.Event()
        self.notes: list[str] = []
        self.sent: list[dict[str, str]] = []
        self.methods: list[str] = []
        self.requested = asyncio.Event()
        self.knows_discovery = True
        self.forgets = False
        self.refuses = False
        self.refusal_delay_s = 0.0
        self.url = ""
        self.mcp = MCPServer("real", log_level="CRITICAL")
        self._tools()
        self._more_tools()

    def _tools(self) -> None:
        @self.mcp.tool(annotations=READ_ONLY, description="Says\nit\x07 again.")
        def echo(text: str) -> str:
            return text

        @self.mcp.tool(structured_output=False)
        async def note(text: str) -> str:
            self.notes.append(text)
            return f"{len(self.notes)} notes"

        @self.mcp.tool(structured_output=False)
        def fail(why: str) -> str:
            raise ToolError(why)

        @self.mcp.tool(structured_output=False)
        async def hang() -> str:
            self.reached.set()
            try:
                await anyio.sleep_forever()
            finally:
                self.dropped.set()
            return ""

        @self.mcp.tool(structured_output=False)
        def long(characters: int) -> str:
            return "é" * characters

        @self.mcp.tool(structured_output=False)
        def environment() -> str:
            return "\n".join(sorted(os.environ))

        @self.mcp.tool(structured_output=False)
        def die() -> str:
            os._exit(7)

    def _more_tools(self) -> None:
        @self.mcp.tool()
        def all_kinds() -> CallToolResult:
            data = base64.b64encode(b"x" * 300).decode()
            return CallToolResult(
                content=[
                    TextContent(text="words\0 and more"),
                    ImageContent(data=data, mime_type="image/png"),
                    AudioContent(data=data, mime_type="audio/wav"),
                    ResourceLink(uri="https://example.com/a", name="a", description="A page."),
                    EmbeddedResource(resource=TextResourceContents(uri="file:///b.txt", text="inside")),
                    EmbeddedResource(resource=BlobResourceContents(uri="file:///c.bin", blob=data)),
                ]
            )

        @self.mcp.tool()
        def structured() -> CallToolResult:
            return CallToolResult(content=[], structured_content={"degrees": 21})

        @self.mcp.tool(structured_output=False)
        async def elicit(context: Context[Any, Any]) -> str:
            return (await context.elicit("Your password?", Password)).action

    @asynccontextmanager
    async def serving(self, kind: Kind = "streamable_http", **options: Any) -> AsyncGenerator["RealServer"]:
        app = (
            self.mcp.sse_app(host=LOOPBACK) if kind == "sse" else self.mcp.streamable_http_app(host=LOOPBACK, **options)
        )

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.methods.append(scope["method"])
                headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                self.sent.append(headers)
                self.requested.set()
                forgotten, self.forgets = self.forgets, False
                if (
                    forgotten
                    or self.refuses
                    or (headers.get("mcp-method") == "server/discover" and not self.knows_discovery)
                ):
                    await asyncio.sleep(self.refusal_delay_s)
                    await PlainTextResponse(status_code=404 if forgotten else 400)(scope, receive, send)
                    return
            await app(scope, receive, send)

        listener = socket.create_server((LOOPBACK, 0))
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/{'sse' if kind == 'sse' else 'mcp'}"
        server = _Quiet(uvicorn.Config(recorded, log_config=None))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield self
        finally:
            server.leaving.set()
            async with asyncio.timeout(10):
                await task
            listener.close()


class _Quiet(uvicorn.Server):
    """The server without its signal handlers, which are the test runner's, and without its pauses, which add up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leaving = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if tasks := set(self.server_state.tasks):
            _, unfinished = await asyncio.wait(tasks, timeout=1)
            for task in unfinished:
                task.cancel()
        await self.lifespan.shutdown()


if __name__ == "__main__":
    RealServer().mcp.run("stdio")
