"""The built-in page: the files of `stack/console`, which are served in front of the API.

Its files hold nothing secret, so they need no key; the page calls the public API with the key that its user enters, or
that an identity provider sends it. How to sign in there is in `sign_in.json`, which needs no key either.
"""

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apis.accounts.sign_in import SignIn
from apis.errors import StackError
from stack.http.answers import error_response
from stack.http.context import Services

FOLDER: Final = Path(__file__).resolve().parents[3] / "console"
PAGE_PREFIX: Final = "/console/"
_PAGE: Final = "index.html"
_SIGN_IN: Final = "sign_in.json"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_POLICY: Final = "content-security-policy"
HEADERS: Final = {
    _POLICY: (
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
"""Nothing but the page's own files runs or styles it, and it talks to its own origin alone, unless people sign in: see
`_page_headers`."""


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    digest: str
    content: bytes
    compressed: bytes


async def serve_page(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request for `/` or a path below `/console/`."""
    response = await _build_response(scope)
    await response(scope, receive, send)


async def _build_response(scope: Scope) -> Response:
    name = scope["path"].removeprefix(PAGE_PREFIX) if scope["path"] != "/" else _PAGE
    if scope["method"] not in ("GET", "HEAD"):
        return Response(status_code=405, headers={"allow": "GET, HEAD"})
    if name == _SIGN_IN:
        return await _sign_in_response(scope)
    file = (await asyncio.to_thread(_load_files)).get(name)
    if file is None:
        return Response("There is no such file.\n", 404, HEADERS, "text/plain; charset=utf-8")
    headers = await _page_headers(scope) if name == _PAGE else HEADERS
    return _file_response(file, Headers(scope=scope), headers)


async def _sign_in_response(scope: Scope) -> Response:
    """Return how people sign in, null where they cannot."""
    try:
        sign_in = await _load_sign_in(scope)
    except StackError as exc:
        return error_response(exc)
    return Response(orjson.dumps(sign_in and asdict(sign_in)), 200, HEADERS, _MEDIA_TYPES[".json"])


async def _page_headers(scope: Scope) -> Mapping[str, str]:
    """Return the headers of the page, which sends the code of a sign-in to the issuer's token endpoint."""
    try:
        sign_in = await _load_sign_in(scope)
    except StackError:
        return HEADERS
    if sign_in is None:
        return HEADERS
    connect = f"connect-src 'self' {sign_in.token_origin};"
    return {**HEADERS, _POLICY: HEADERS[_POLICY].replace("connect-src 'self';", connect)}


async def _load_sign_in(scope: Scope) -> SignIn | None:
    """Return that of the accounts, which exist while the app's lifespan lasts. Raises StoreUnavailable."""
    services: Services | None = scope["app"].state.services
    return None if services is None else await services.stack.accounts.load_sign_in()


def _file_response(file: _File, request: Headers, headers: Mapping[str, str]) -> Response:
    # a browser that has the page keeps the policy that came with it, unless the answer says that both have changed
    policy_digest = "" if headers is HEADERS else f"-{hashlib.sha256(headers[_POLICY].encode()).hexdigest()[:8]}"
    etag = f'"{file.digest}{policy_digest}"'
    headers = {**headers, "etag": etag, "content-type": file.media_type}
    if request.get("if-none-match") == etag:
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
            digest = hashlib.sha256(content).hexdigest()[:32]
            compressed = gzip.compress(content, 9, mtime=0)
            files[path.relative_to(FOLDER).as_posix()] = _File(_MEDIA_TYPES[path.suffix], digest, content, compressed)
    return files
