"""An MCP server that demands a token and gives it away wherever it can, with the token endpoint of its OAuth server."""

import asyncio
import base64
import json
from typing import Any
from urllib.parse import parse_qs, quote

from aiohttp import web

from tests.support.servers.fetcher_hosts import Site

Json = dict[str, Any]


class GuardedServer(Site):
    """`accepted` are the tokens that it takes, `tokens` those that it got, `grants` the forms that came to its token
    endpoint, each of which gives the next of `next_tokens`. Calls of its tool wait for `calls_may_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: set[str] = set()
        self.tokens: list[str | None] = []
        self.grants: list[dict[str, str]] = []
        self.grant_headers: list[dict[str, str]] = []
        self.next_tokens: list[Json] = []
        self.grants_may_end = asyncio.Event()
        self.grants_may_end.set()
        self.grant_error = "invalid_grant"
        self.is_called = asyncio.Event()
        self.calls_may_end = asyncio.Event()
        self.calls_may_end.set()
        self.pages["/mcp"] = self._speak
        self.pages["/token"] = self._grant

    @property
    def mcp_url(self) -> str:
        return f"{self.url}/mcp"

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        self.tokens.append(token or None)
        if self.accepted and (scheme != "Bearer" or token not in self.accepted):
            return web.Response(status=401, text=f"not with {token}")
        if request.method != "POST":
            return web.Response(status=405)
        message: Json = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "tools/call":
            self.is_called.set()
            await self.calls_may_end.wait()
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], **self._result(message, token)})

    def _result(self, message: Json, token: str) -> Json:
        match message["method"]:
            case "initialize":
                capabilities: Json = {"tools": {}}
                server = {"name": token or "guarded", "version": "1"}
                version = message["params"]["protocolVersion"]
                return {"result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": server}}
            case "tools/list":
                tool = {"name": "tell", "description": f"Tells {token}.", "inputSchema": {"type": "object"}}
                properties = {"a": {"type": "string", "default": token}}
                others: list[Json] = [
                    {"name": token or "other", "inputSchema": {"type": "object"}},
                    {"name": "default", "inputSchema": {"type": "object", "properties": properties}},
                    {"name": "hint", "inputSchema": {"type": "object"}, "annotations": {"hint": token}},
                ]
                return {"result": {"tools": [tool, *others]}}
            case "tools/call":
                text = json.dumps(
                    [token, token[::-1], quote(token, safe=""), base64.b64encode(token.encode()).decode()]
                )
                return {"result": {"content": [{"type": "text", "text": f"I know {text}"}]}}
            case _:
                return {"error": {"code": -32601, "message": f"no such method for {token}"}}

    async def _grant(self, request: web.Request) -> web.StreamResponse:
        form = {name: values[0] for name, values in parse_qs(await request.text()).items()}
        self.grants.append(form)
        self.grant_headers.append(dict(request.headers))
        await self.grants_may_end.wait()
        if not self.next_tokens:
            return web.json_response({"error": self.grant_error, "error_description": str(form)}, status=400)
        return web.json_response(self.next_tokens.pop(0))
