"""HTTP of the load: the client of the token path, whose bodies are passed on in the callbacks that bring them.

A general HTTP client costs more CPU per read than the server that is measured.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson

from providers.common.net.http.client import HttpClient, HttpConnectError
from providers.common.net.http.connection import HttpConnection, HttpError
from stack.bench.figures import RequestFailed

_MAX_ERROR_BYTES: Final = 64 * 1024
_IDLE_S: Final = 60.0
"""Seconds that a connection waits for the next request of its client; a server closes it after more."""
OnBody = Callable[[bytes], None]


class LoadClient:
    """One client of the load: opens its connection when it needs one. Not for concurrent requests."""

    def __init__(self, base_url: str, key: str, timeout_s: float) -> None:
        self._base_url = base_url
        self._headers = f"authorization: Bearer {key}\r\naccept: */*\r\n".encode()
        self._timeout_s = timeout_s
        self._http = HttpClient(idle_s=_IDLE_S)

    async def send(self, method: str, path: str, body: bytes, on_body: OnBody) -> None:
        """Send a request and pass the body of its answer on in pieces. Raises RequestFailed, also for a status of 400
        and more, whose body is not passed on."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        url, headers = self._base_url + path, self._headers
        if body:
            headers += b"content-type: application/json\r\n"
        try:
            connection = await self._http.send(method, url, headers, body or None, self._timeout_s, deadline)
            try:
                if connection.status >= 400:
                    raise await _read_error(connection, deadline)
                await _pass_on(connection, on_body, deadline)
            finally:
                self._http.release(connection)
        except TimeoutError:
            raise RequestFailed("timeout", f"No complete answer within {self._timeout_s:g} s.") from None
        except HttpError as exc:
            kind = "cannot connect" if isinstance(exc, HttpConnectError) else "connection closed"
            raise RequestFailed(kind, str(exc)) from exc

    async def load_json(self, method: str, path: str, body: bytes = b"") -> Any:
        """Send a request and return the JSON of its answer. Raises RequestFailed."""
        parts: list[bytes] = []
        await self.send(method, path, body, parts.append)
        try:
            return orjson.loads(b"".join(parts))
        except orjson.JSONDecodeError as exc:
            raise RequestFailed("not JSON", f"{method} {path}: {exc}") from None

    async def close(self) -> None:
        await self._http.close()


async def _pass_on(connection: HttpConnection, on_body: OnBody, deadline: float) -> None:
    """Pass the body of an answer on. Raises HttpError and TimeoutError."""
    while True:
        if not connection.is_ready:
            await connection.push_data(on_body, deadline)
        if data := connection.read_available():
            on_body(data)
        if connection.is_complete:
            return


async def _read_error(connection: HttpConnection, deadline: float) -> RequestFailed:
    body = await connection.read_body(_MAX_ERROR_BYTES, deadline)
    retry_after = connection.headers.get("retry-after", "")
    code = message = ""
    try:
        error = orjson.loads(body)["error"]
        code, message = str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message = body[:200].decode(errors="replace")
    retry_after_s = float(retry_after) if retry_after.isdigit() else 0.0
    return RequestFailed(f"{connection.status} {code}".rstrip(), message, retry_after_s)
