"""Console: the built-in page, static files in front of the API.

Its files hold nothing secret, so they need no key; the page calls the public API with the key that its user enters.
"""

import asyncio
import gzip
import hashlib
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER: Final = Path(__file__).resolve().parent
_PREFIX: Final = "/console/"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
"""Nothing but the page's own files runs or styles it, and it talks to its own origin alone."""


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    etag: str
    content: bytes
    compressed: bytes


class Console:
    """ASGI layer that answers `/` and `/console/...` and hands every other request to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and (scope["path"] == "/" or scope["path"].startswith(_PREFIX)):
            return _respond(scope, receive, send)
        return self._app(scope, receive, send)


async def _respond(scope: Scope, receive: Receive, send: Send) -> None:
    files = await asyncio.to_thread(_load_files)
    file = files.get(scope["path"].removeprefix(_PREFIX) if scope["path"] != "/" else "index.html")
    if scope["method"] not in ("GET", "HEAD"):
        response = Response(status_code=405, headers={"allow": "GET, HEAD"})
    elif file is None:
        response = Response("There is no such file.\n", 404, HEADERS, "text/plain; charset=utf-8")
    else:
        response = _file_response(file, Headers(scope=scope))
    await response(scope, receive, send)


def _file_response(file: _File, request: Headers) -> Response:
    headers = {**HEADERS, "etag": file.etag, "content-type": file.media_type}
    if request.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"})
    return Response(file.content, headers=headers)


@cache
def _load_files() -> dict[str, _File]:
    """Return the page's files by their paths below the folder, read and compressed once for a process."""
    files: dict[str, _File] = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            compressed = gzip.compress(content, 9, mtime=0)
            files[path.relative_to(FOLDER).as_posix()] = _File(_MEDIA_TYPES[path.suffix], etag, content, compressed)
    return files
