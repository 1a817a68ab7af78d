"""ResponseTransport: few system calls for the parts of one response."""

import asyncio
from collections.abc import Callable
from typing import Final

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim response to a client that waits before it sends its body."""
_MAX_HELD_BYTES: Final = 16 * 1024
"""Bytes of a response that wait for the end of the loop's turn; more are written at once."""


class ResponseTransport:
    """Transport that uvicorn writes one response to: what it writes in one turn of the event loop leaves in one system
    call, and the head with the first part of the body, as ASGI allows. `close` closes the connection after it."""

    __slots__ = ("_close", "_is_head", "_is_scheduled", "_loop", "_transport", "held_data")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._close = close
        self._is_head = True
        self._is_scheduled = False
        self.held_data = b""

    def write(self, data: bytes) -> None:
        self.held_data += data
        if len(self.held_data) > _MAX_HELD_BYTES:
            self.flush()
        elif self._is_head and data != CONTINUE:
            self._is_head = False
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_as_scheduled)

    def _flush_as_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._close()

    def flush(self) -> None:
        """Write what is held, unless the client has left meanwhile."""
        if self.held_data:
            held, self.held_data = self.held_data, b""
            if not self._transport.is_closing():
                self._transport.write(held)
