"""The outermost layer: who may come in, by which name, under which request id, and how every error looks."""

import hashlib
import itertools
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import (
    MethodNotAllowed,
    NotFound,
    PermissionDenied,
    StackError,
    Unauthorized,
    UnsupportedMediaType,
    error_to_body,
    internal_error,
)
from stack.config import ServerConfig

_log = logging.getLogger(__name__)
_PROCESS: Final = secrets.token_hex(10)
_numbers = itertools.count()
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
UPLOAD_PATHS: Final = frozenset({"/v1/files", "/files"})
FORM_OR_JSON_PATHS: Final = re.compile(r"(?:/v1)?/containers/[^/]+/files")
_BEGINNINGS: Final = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Edge:
    """ASGI middleware. Denies by default, on the path that routing uses; leaves the caller's tenant in the scope.

    Without API keys the server is of one tenant, and only a browser could be tricked into calling it: so then Host and
    Origin must be names that the config allows. With keys, the key says it all.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._tenants = {_digest(entry.key.get_secret_value().encode()): entry.tenant for entry in config.api_keys}
        named = (config.host, *config.allowed_hosts)
        self._hosts = None if "*" in named else _LOOPBACK | {host.lower() for host in named}
        if self._tenants and not config.allowed_hosts:
            self._hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = f"req_{_PROCESS}{next(_numbers):012x}"
        scope["request_id"] = request_id
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] in _BEGINNINGS:
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, receive, answer)
        except StackError as exc:
            if started:
                raise
            await error_response(exc)(scope, receive, answer)
        except HTTPException as exc:
            await error_response(_routing_error(exc, scope))(scope, receive, answer)
        except Exception:
            _log.exception("request %s failed on a bug", request_id)
            if started:
                raise
            await error_response(internal_error(request_id))(scope, receive, answer)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None:
            self._check_names(headers)
        if scope["path"] in OPEN_PATHS:
            return
        scope["tenant"] = self._tenant(scope["headers"])
        if scope.get("method") == "POST":
            kind, _, parameters = headers.get("content-type", "").partition(";")
            charset = parameters.strip().lower()
            if scope["path"] in UPLOAD_PATHS:
                if kind.strip().lower() != "multipart/form-data":
                    raise UnsupportedMediaType("A file is sent as a form: `Content-Type: multipart/form-data`.")
                return
            if not kind and _has_no_body(headers):
                return
            if kind.strip().lower() == "multipart/form-data" and FORM_OR_JSON_PATHS.fullmatch(scope["path"]):
                return
            if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", 'charset="utf-8"'):
                raise UnsupportedMediaType("The body must be JSON: send `Content-Type: application/json`.")

    def _check_names(self, headers: Headers) -> None:
        assert self._hosts is not None
        origin = headers.get("origin")
        names = {"Host": _host_of(f"//{headers.get('host', '')}")}
        if origin is not None:
            names["Origin"] = _host_of(origin)
        for name, host in names.items():
            if host not in self._hosts:
                raise PermissionDenied(f"This {name} is not allowed here: add it to `server.allowed_hosts`.")

    def _tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        if not self._tenants:
            return "default"
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) == 1 and given[0][:7].lower() == b"bearer ":
            tenant = self._tenants.get(_digest(given[0][7:].strip()))
            if tenant is not None:
                return tenant
        raise Unauthorized("Incorrect API key provided: send `Authorization: Bearer KEY`.")


def _has_no_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON bytes."""
    return Response(body, status, headers, media_type="application/json")


def client_gone() -> Response:
    """What is left to say when nobody listens any more."""
    return Response(status_code=499)


def error_response(error: StackError) -> Response:
    """OpenAI's error body, with what an SDK needs to know about retrying."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, round(error.retry_after_s))}"
    elif error.status == 503:
        headers["retry-after"] = "1"
    if error.repeats_work:
        headers["x-should-retry"] = "false"
    return json_response(orjson.dumps(error_to_body(error)), error.status, headers)


def _routing_error(exc: HTTPException, scope: Scope) -> StackError:
    """What the router raises, in the API's form."""
    method, path = scope.get("method", "WebSocket"), scope["path"][:256]
    if exc.status_code == 405:
        return MethodNotAllowed(f"{path} does not take {method}.")
    return NotFound(f"Unknown request URL: {method} {path}.")


def _digest(key: bytes) -> bytes:
    # keys are looked up by their hash: how long that takes says nothing about the key
    return hashlib.sha256(key).digest()
