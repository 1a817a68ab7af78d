"""A local server that speaks Exa's wire format, and every way of failing that a search service has."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

KEY = "sk-exa-0123456789-secret"
HOSTILE = "<html>upstream says: your key " + KEY + " is bad</html>"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page(number: int, **fields: Any) -> dict[str, Any]:
    """One result as Exa sends it."""
    url = f"https://site{number}.example.com/page"
    result = {
        "id": url,
        "url": url,
        "title": f"Title {number}",
        "publishedDate": "2026-01-02T03:04:05.000Z",
        "author": None,
        "highlights": [f"First passage of {number}.", f"Second passage of {number}."],
        "highlightScores": [0.9, 0.5],
    }
    return {**result, **fields}


class FakeExa:
    """Answers each query by its text: a name of `FAILURES`, `hang` or `drip`, or else with `results`."""

    def __init__(self) -> None:
        self.results: list[Any] = [page(number) for number in range(1, 4)]
        self.raw: bytes | None = None
        self.encoding = "identity"
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.reached = asyncio.Event()
        self.dropped = asyncio.Event()
        self.sent_bytes = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FakeExa":
        app = web.Application()
        app.router.add_post("/search", self._search)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _search(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        query: str = body["query"]
        if query in ("hang", "drip", "endless"):
            return await self._never_ending(request, query)
        if query in FAILURES:
            return FAILURES[query]()
        if request.headers.get("x-api-key") != KEY:
            return web.json_response({"requestId": "1", "error": HOSTILE, "tag": "INVALID_API_KEY"}, status=401)
        if self.raw is not None:
            headers = {"Content-Type": "application/json", "Content-Encoding": self.encoding}
            return web.Response(body=self.raw, headers=headers)
        return web.json_response({"requestId": "1", "results": self.results, "costDollars": {"total": 0.005}})

    async def _never_ending(self, request: web.Request, query: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        piece = b" " * 65536 if query == "endless" else b" "
        try:
            if query != "hang":
                await response.prepare(request)
            self.reached.set()
            while query != "hang":
                await response.write(piece)
                self.sent_bytes += len(piece)
                await asyncio.sleep(0 if query == "endless" else 0.02)
            await asyncio.Event().wait()
        finally:
            self.dropped.set()
        raise AssertionError("unreachable")


def _cut_off() -> web.Response:
    response = web.Response(body=b'{"results": [')
    response.headers["Content-Length"] = "1000"
    response.force_close()
    return response


def _zipped() -> web.Response:
    """A bomb: a thousand times as large once inflated."""
    return web.Response(body=gzip.compress(b"[" * 10_000_000), headers={"Content-Encoding": "gzip"})


def _text(status: int, text: str = HOSTILE) -> Callable[[], web.Response]:
    return lambda: web.Response(status=status, text=text, content_type="text/html", headers=_to_elsewhere(status))


def _to_elsewhere(status: int) -> dict[str, str]:
    return {"Location": "/elsewhere"} if 300 <= status < 400 else {}


FAILURES: dict[str, Callable[[], web.StreamResponse]] = {
    **{f"status {status}": _text(status) for status in (302, 307, 400, 401, 402, 403, 404, 418, 422, 429, 500, 503)},
    "html": _text(200),
    "empty body": _text(200, ""),
    "not json": _text(200, '{"results": [' + HOSTILE),
    "no results": _text(200, json.dumps({"error": HOSTILE})),
    "a list": _text(200, "[1, 2]"),
    "null": _text(200, "null"),
    "deep": _text(200, "[" * 200_000),
    "huge number": _text(200, '{"results": ' + "9" * 100_000 + "}"),
    "cut off": _cut_off,
    "zipped": _zipped,
    "unknown encoding": lambda: web.Response(body=b"{}", headers={"Content-Encoding": "br"}),
}
