"""An MCP server without an SDK, which does what servers of the field do. Its habit is a recorded one, or a test's:

tools      the entries of tools/list, as they are; `{time}` in a text is the number of the list
page_size  tools on a page; all on one without it
result     the result of every call, as it is; without it the call is repeated in a text
forgotten  status, body and headers of the answer to a session that the server does not know; `{request id}` in the
           body is that of the request
wire       a function that makes the body of an answer to a list or a call, and its content type and status, from the
           answer
session    a prefix of the ids of sessions
asks       a request that the server makes to its client on the GET stream at each call, which waits for the answer
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from providers.tool_servers.mcp.provider import MCP
from tests.support.servers.mcp_calls import started
from tests.support.servers.mcp_hostile import event, initialized, refusal, result, sse
from tests.support.servers.mcp_server import LOOPBACK

RECORDED: Final = Path(__file__).parents[1] / "data/field/mcp"
GOOD: Final = {"name": "good", "inputSchema": {"type": "object", "properties": {"q": {"type": "string"}}}}


def recorded(name: str) -> dict[str, Any]:
    """The habit of a server of the field."""
    return json.loads((RECORDED / f"{name}.mcp.json").read_text())


@asynccontextmanager
async def reached(habit: Mapping[str, Any], **config: Any) -> AsyncGenerator[tuple["FieldServer", MCP]]:
    """A server with a habit, and a client that may reach it."""
    async with FieldServer(habit) as server, started(server.url, **config) as mcp:
        yield server, mcp


class FieldServer:
    """`methods` are the methods of the requests; `initialized` counts the sessions, `calls` the calls that were run."""

    def __init__(self, habit: Mapping[str, Any]) -> None:
        self.habit: dict[str, Any] = {"tools": [GOOD], **habit}
        self.methods: list[str] = []
        self.calls: list[Any] = []
        self.initialized = 0
        self.url = ""
        self.initialized_once = asyncio.Event()
        self.was_asked = asyncio.Event()
        self._answer: asyncio.Future[Any] | None = None
        self._holds_answers = False
        self._sessions: set[str] = set()
        self._stream: web.StreamResponse | None = None
        self._opened = asyncio.Event()
        self._runner: web.AppRunner | None = None

    def hold_answers(self) -> None:
        """Let no call that asks the client come to its end."""
        self._holds_answers = True

    def forget(self) -> None:
        """Forget all sessions, as a restart does."""
        self._sessions.clear()

    async def __aenter__(self) -> "FieldServer":
        app = web.Application()
        app.router.add_post("/mcp", self._post)
        app.router.add_get("/mcp", self._get)
        app.router.add_delete("/mcp", self._delete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self.url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}/mcp"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if "asks" not in self.habit:
            return web.Response(status=405)
        self._stream = await sse(request)
        self._opened.set()
        await asyncio.Event().wait()
        return self._stream

    async def _post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        method, request_id = message.get("method", ""), message.get("id")
        if not method:
            if self._answer is not None and not self._holds_answers:
                self._answer.set_result(message)
            return web.Response(status=202)
        self.methods.append(method)
        if method == "server/discover":
            return web.json_response(refusal(request_id, -32601, "Method not found"))
        if method == "initialize":
            self.initialized += 1
            session = f"{self.habit.get('session', 'session')}-{self.initialized}"
            self._sessions.add(session)
            headers = {"mcp-session-id": session}
            self.initialized_once.set()
            answer = {**initialized(message), **self.habit.get("handshake", {})}
            return web.json_response(result(request_id, answer), headers=headers)
        if request.headers.get("mcp-session-id") not in self._sessions:
            return self._forgotten(request_id)
        if request_id is None:
            return web.Response(status=202)
        if method == "tools/list":
            return self._send(await self._list(request_id, message.get("params") or {}))
        self.calls.append(message["params"])
        if "asks" in self.habit:
            return web.json_response(result(request_id, await self._ask()))
        echo = f"RESULT of {message['params']['name']}"
        answer = self.habit.get("result", {"content": [{"type": "text", "text": echo}]})
        return self._send(result(request_id, answer))

    def _send(self, answer: Any) -> web.Response:
        if "wire" not in self.habit:
            return web.json_response(answer)
        body, content_type, status = self.habit["wire"](answer)
        return web.Response(body=body, status=status, headers={"content-type": content_type})

    def _forgotten(self, request_id: Any) -> web.Response:
        shape = self.habit["forgotten"]
        body, headers = shape["body"], {"content-type": "application/json", **shape.get("headers", {})}
        text = body if isinstance(body, str) else json.dumps(body).replace('"{request id}"', json.dumps(request_id))
        return web.Response(status=shape["status"], text=text, headers=headers)

    async def _list(self, request_id: Any, params: Mapping[str, Any]) -> Any:
        if "page" in self.habit:
            try:
                page = self.habit["page"](params.get("cursor"))
                return result(request_id, await page if isawaitable(page) else page)
            except ValueError as exc:
                return refusal(request_id, -32602, str(exc))
        count = str(self.methods.count("tools/list"))
        tools = json.loads(json.dumps(self.habit["tools"]).replace("{time}", count))
        start, size = int(params.get("cursor") or 0), self.habit.get("page_size", len(tools))
        end = start + size
        more = {"nextCursor": str(end)} if end < len(tools) else {}
        return result(request_id, {"tools": tools[start:end], **more})

    async def _ask(self) -> Any:
        """Ask the client on the GET stream, and return its answer as the call's result."""
        await self._opened.wait()
        assert self._stream is not None
        self._answer = asyncio.get_running_loop().create_future()
        await self._stream.write(event({"jsonrpc": "2.0", "id": 7, **self.habit["asks"]}))
        self.was_asked.set()
        return {"content": [{"type": "text", "text": json.dumps(await self._answer)}], "isError": True}
