"""uvicorn's HTTP/1.1 connection, with bounds on how slowly and how much a client may send."""

import asyncio
import math
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEADERS_TOO_LARGE_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class HttpServerConnection(HttpToolsProtocol):
    """Closes a connection whose request head is incomplete after `head_s`, or after `max_head_bytes` and the read that
    exceeds them, and one whose body is slower than `body_bytes_per_s`, checked every `body_s`."""

    # slots, because with more than thirty attributes an instance no longer shares its keys: 1 KiB per connection
    __slots__ = ("_body_bytes", "_deadline", "_head_bytes", "_in_head")

    head_s: ClassVar[float] = 10.0
    max_head_bytes: ClassVar[int] = 64 * 1024
    body_s: ClassVar[float] = 60.0
    body_bytes_per_s: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._body_bytes = 0

    @property
    def has_request(self) -> bool:
        """True once the head of a request has been received."""
        return bool(self.cycle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self._start_timer(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self.transport.write(_HEADERS_TOO_LARGE_RESPONSE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._start_timer(self.head_s)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._body_bytes = 0
        self._start_timer(self.body_s)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        # refused as any request would be; uvicorn itself would let any number of WebSockets in
        crowded = len(self.connections) >= (self.limit_concurrency or math.inf)
        return self.scope["method"] == "GET" and not crowded and super()._should_upgrade()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if not self._in_head and self._body_bytes >= self.body_s * self.body_bytes_per_s:
            self._body_bytes = 0
            self._start_timer(self.body_s)
        else:
            self.transport.close()
