"""An answer over HTTP/1.1, as it comes over its connection, which then may serve again.

Every token of every stream comes through here, so it is as thin as may be: httptools parses straight into a list, and a
reader waits on a plain future, with one timer for all its waits.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

import httptools

HIGH_WATER_BYTES: Final = 256 * 1024
"""Of what has come and is not taken; then the server has to wait."""
MAX_BARREN_BYTES: Final = 64 * 1024
"""Of headers, trailers and the like between two pieces of a body."""
PIECE_BYTES: Final = 64 * 1024
"""Larger bodies go out in such pieces, so that sending one does not hold up the streams of others."""


class HttpFailed(OSError):
    """No connection, or one that broke, or over which came what is no HTTP."""


class Answer(asyncio.Protocol):
    """A connection, and the answer that comes over it. Wait for `more` unless it is `ready`, then `take` what is there.

    `status` is 0 until the headers are there, whose names are in lower case. `over` says that the body ended cleanly.
    """

    __slots__ = (
        "_barren_bytes",
        "_due",
        "_end",
        "_failure",
        "_loop",
        "_on_lost",
        "_parser",
        "_paused",
        "_pieces",
        "_room",
        "_sent",
        "_size",
        "_timer",
        "_transport",
        "_until",
        "_waiter",
        "closing",
        "headers",
        "on_body",
        "over",
        "ready",
        "reusable",
        "status",
    )
    _transport: asyncio.Transport

    def __init__(self, on_lost: "Callable[[Answer], None]") -> None:
        """`on_lost` is told when the connection is gone."""
        self.closing = False
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._until = math.inf
        self._paused = False
        self.rest()

    def rest(self) -> None:
        """Between two answers."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.over = self.ready = True
        self.reusable = self._sent = False
        self._failure: HttpFailed | None = None
        self._size = self._barren_bytes = self._end = 0
        self._pieces.clear()
        self._stop_timer()
        self._resume()

    async def begin(self, head: bytes, body: bytes) -> None:
        """Send a request. Returns early when the server answers before it has all of it. Raises HttpFailed."""
        self.over = self.ready = False
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            for start in range(0, len(body), PIECE_BYTES):
                while self._room is not None:
                    await self._room
                self.check()
                if self.status:
                    return
                self._transport.write(body[start : start + PIECE_BYTES])
        self._sent = True

    def more(self, until: float) -> "asyncio.Future[None]":
        """To be awaited: something has come, or there is an end. Raises TimeoutError at the loop's time `until`."""
        waiter = self._waiter = self._loop.create_future()
        self._until = until
        if until < self._due:
            self._stop_timer()
            self._due = until
            self._timer = self._loop.call_at(until, self._fire)
        return waiter

    def take(self) -> bytes:
        """What has come of the body; nothing means the end when it was `ready`. Raises HttpFailed."""
        pieces = self._pieces
        if not pieces:
            self.check()
            return b""
        read = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        self.ready = self.over or self._failure is not None
        if self._paused:
            self._resume()
        return read

    async def body(self, limit: int, until: float) -> bytes:
        """The body up to `limit` bytes. Raises HttpFailed, and TimeoutError at the loop's time `until`."""
        body = bytearray()
        while len(body) < limit:
            if not self.ready:
                await self.more(until)
            body += self.take()
            if self.over:  # whose last bytes were taken with the rest
                break
        return bytes(body[:limit])

    def check(self) -> None:
        """Raises HttpFailed when the connection broke in the middle of the answer."""
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        """Close the connection at once."""
        self.closing = True
        self._stop_timer()
        self._transport.abort()

    def _fire(self) -> None:
        """One timer for the whole answer, because one for each wait costs as much as the wait."""
        self._due, self._timer = math.inf, None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._loop.time() < self._until:
            self._due = self._until
            self._timer = self._loop.call_at(self._until, self._fire)
        else:
            waiter.set_exception(TimeoutError())

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = math.inf

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, message: str) -> None:
        if not self.over and self._failure is None:
            self._failure = HttpFailed(message)
            self.ready = True
        self.closing = True
        self._transport.abort()
        self._wake()

    # --- what the transport tells ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # that of a stream protocol is a Transport

    def data_received(self, data: bytes) -> None:
        if self.over:  # nobody asked
            self.reusable = False
            self.abort()
            return
        pieces = self._pieces
        had = len(pieces)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._drop_excess()
            self.reusable = False
            self._fail("What came is no HTTP.")
            return
        if len(pieces) > had:
            self.ready = True
            self._barren_bytes = 0
            self._size += len(data)
            if self._size > HIGH_WATER_BYTES and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        else:
            self._barren_bytes += len(data)
            if self._barren_bytes > MAX_BARREN_BYTES:
                self._fail("The headers are too large.")
                return
        if self.over:
            self._drop_excess()
        if self.ready:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and exc is None and not self.closing and not self._framed():
            self.over = self.ready = True
        self.closing = True
        self.reusable = False
        self._fail("The connection broke.")
        self.resume_writing()
        self._on_lost(self)
        # else it and the parser hold one another until the garbage collector comes
        del self._parser

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _drop_excess(self) -> None:
        """What came behind the end is no part of the answer, and whoever sends it is not to be asked again."""
        if self.closing:
            self.reusable = False
            del self._pieces[self._end :]

    def _framed(self) -> bool:
        """Whether the body has an end of its own; else the closing of the connection is its end."""
        return "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")

    # --- what the parser tells ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.over:
            return
        if status < 200:  # an interim answer: the real one is to come
            self.headers = {}
        else:
            self.status = status
            self._wake()

    def on_message_begin(self) -> None:
        if self.over:  # two answers to one question
            self.closing = True

    def on_message_complete(self) -> None:
        if self.status and not self.over:
            self._end = len(self._pieces)
            self.over = self.ready = True
            self.reusable = self._sent and self._parser.should_keep_alive()
