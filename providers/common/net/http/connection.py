"""One HTTP/1.1 connection and the response it receives; the connection can be reused for further requests.

Every token of every stream passes through this class, so it does as little as possible: httptools parses straight into
a list, and a reader waits on a plain future with one timer for all its waits.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import httptools

from providers.common.fair_turns import current_turn
from providers.common.net.http.inflater import EncodingError, Inflater, inflater_of

HIGH_WATER_BYTES: Final = 32 * 1024
"""Bytes of unread body at which reading pauses, so that the server has to wait. A reader takes all of them at once."""
_UNPARSED_BYTES: Final = 8 * 1024
"""Bytes beyond the tenant's turn at which reading pauses. To pause and go on costs as much as some tokens."""
MAX_NON_BODY_BYTES: Final = 64 * 1024
"""Bytes of headers, trailers and chunk framing allowed between two chunks of a body."""
WRITE_CHUNK_BYTES: Final = 64 * 1024
"""Bytes written at once; a larger body is split, so that sending it does not delay other streams."""


class HttpError(OSError):
    """The connection could not be opened, broke, or received data that is not HTTP."""


class HttpConnection(asyncio.Protocol):
    """Connection with its current response. Await `wait_for_data` unless `is_ready`, then call `read_available`; or let
    `push_data` pass data on as it arrives, without waking the reader.

    `status` is 0 until the headers have arrived; their names are in lower case, and their reader may clear them, since
    an answer may take minutes. `is_complete` says that the body ended cleanly. `deadline` is the loop time at which the
    current wait ends; a later one may be set meanwhile.

    A body that a gateway compressed arrives decompressed, in pieces, and its headers then name no encoding.
    """

    __slots__ = (
        "_body_chunk_count",
        "_buffered_bytes",
        "_chunks",
        "_drain_waiter",
        "_failure",
        "_inflater",
        "_is_body_framed",
        "_is_end_held",
        "_is_paused",
        "_is_queued",
        "_is_request_sent",
        "_loop",
        "_non_body_bytes",
        "_on_closed",
        "_on_data",
        "_parser",
        "_timer",
        "_timer_at",
        "_transport",
        "_unparsed",
        "_waiter",
        "deadline",
        "headers",
        "is_closing",
        "is_complete",
        "is_ready",
        "is_reusable",
        "on_body",
        "status",
        "turn",
    )
    _transport: asyncio.Transport

    def __init__(self, on_closed: "Callable[[HttpConnection], None]") -> None:
        """Create the protocol; `on_closed` is called when the connection is lost."""
        self.is_closing = False
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._on_data: Callable[[bytes], None] | None = None
        self._drain_waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self.deadline = math.inf
        self._is_paused = self._is_queued = False
        self._unparsed = b""
        self.turn = current_turn()
        self.reset()

    def reset(self) -> None:
        """Prepare for the next response."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = self.is_ready = True
        self.is_reusable = self._is_request_sent = self._is_body_framed = self._is_end_held = False
        self._inflater: Inflater | None = None
        self._failure: HttpError | None = None
        self._buffered_bytes = self._non_body_bytes = self._body_chunk_count = 0
        self._chunks.clear()
        self._unparsed = b""
        self.deadline = math.inf  # the timer stays: the next response may need none of its own
        self._go_on()

    async def send_request(self, head: bytes, body: bytes, deadline: float = math.inf) -> None:
        """Send a request. Returns early when the server responds before it has received all of it. Raises HttpError,
        and TimeoutError at the loop time `deadline`."""
        self.is_complete = self.is_ready = False
        self.turn = current_turn()
        if len(body) <= WRITE_CHUNK_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            for start in range(0, len(body), WRITE_CHUNK_BYTES):
                while self._drain_waiter is not None:
                    async with asyncio.timeout_at(deadline):
                        await self._drain_waiter
                self.raise_if_failed()
                if self.status:
                    return
                self._transport.write(body[start : start + WRITE_CHUNK_BYTES])
        self._is_request_sent = True

    def wait_for_data(self, deadline: float) -> "asyncio.Future[None]":
        """Return a future that resolves when data or the end has arrived, and raises TimeoutError at the loop time
        `deadline`."""
        waiter = self._waiter = self._loop.create_future()
        self.deadline = deadline
        if deadline < self._timer_at:
            self._stop_timer()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._on_timer)
        return waiter

    def push_data(self, on_data: Callable[[bytes], None], deadline: float) -> "asyncio.Future[None]":
        """Call `on_data` with body bytes as they arrive, in the transport's own callback. Return a future that resolves
        with the end of the response or with `wake`, and raises TimeoutError at the loop time `deadline`, unless the
        attribute is set to a later one. The last data is not passed on: it is available when the future has
        resolved."""
        waiter = self.wait_for_data(deadline)
        self._on_data = on_data
        return waiter

    def wake(self) -> None:
        """Resolve the current wait."""
        waiter, self._waiter, self._on_data = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def read_available(self) -> bytes:
        """Return the body bytes received so far; empty bytes while `is_ready` mean the end. Raises HttpError."""
        chunks = self._chunks
        if not chunks:
            self.raise_if_failed()
            return b""
        data = b"".join(chunks)  # a single chunk is not copied
        chunks.clear()
        self._buffered_bytes = 0
        self.is_ready = self.is_complete or self._failure is not None
        if self._is_paused or self._unparsed:
            self._go_on()
        return data

    async def read_body(self, limit_bytes: int, deadline: float) -> bytes:
        """Return the body up to `limit_bytes`. Raises HttpError, and TimeoutError at the loop time `deadline`."""
        body = bytearray()
        while len(body) < limit_bytes:
            if not self.is_ready:
                await self.wait_for_data(deadline)
            body += self.read_available()
            if self.is_complete:  # the last bytes were read together with the end
                break
            if self._loop.time() > deadline:  # the timer meets no reader that waits while there is always data
                raise TimeoutError
        return bytes(body[:limit_bytes])

    def raise_if_failed(self) -> None:
        """Raise HttpError when the connection broke before the end of the response."""
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_closing = True
        self._unparsed, self._inflater = b"", None
        self._stop_timer()
        self._transport.abort()

    def _on_timer(self) -> None:
        """Check the deadline. There is one timer for the whole response, because one per wait costs as much as the
        wait."""
        self._timer_at, self._timer = math.inf, None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self.deadline == math.inf:
            return
        if self._loop.time() < self.deadline:
            self._timer_at = self.deadline
            self._timer = self._loop.call_at(self.deadline, self._on_timer)
        else:
            self._on_data = None
            waiter.set_exception(TimeoutError())

    def _go_on(self) -> None:
        """Parse what was received and is not parsed yet, in the tenant's turns, and then read on."""
        if self._unparsed or self._holds_inflatable():
            if not self._is_queued:
                self._is_queued = True
                self.turn.queue(self._parse_piece, min(len(self._unparsed), self.turn.piece_work))
        elif self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _parse_piece(self) -> None:
        self._is_queued = False
        if self.is_ready:  # its reader has not read the piece before
            return
        if self._holds_inflatable():
            self._parse(b"")
            if not self.is_ready:
                self._go_on()
        elif self._unparsed:
            size_bytes = self.turn.piece_work
            piece, self._unparsed = self._unparsed[:size_bytes], self._unparsed[size_bytes:]
            self._parse(piece)
            if self.is_complete and self._unparsed:
                self._unparsed = b""
                self.is_reusable = False
            elif not self.is_ready:
                self._go_on()

    def _holds_inflatable(self) -> bool:
        return self._inflater is not None and self._inflater.holds_more

    def _inflate(self, inflater: Inflater, chunk_count: int) -> None:
        """Replace the compressed chunks that were just received by a piece of the body. While more is held, it is
        inflated in the tenant's turns, and the end of the response waits for it. Raises EncodingError."""
        chunks = self._chunks
        if self.is_complete:
            self._drop_excess()
        deflated = b"".join(chunks[chunk_count:])
        del chunks[chunk_count:]
        piece = inflater.inflate(deflated)
        if piece:
            chunks.append(piece)
            self._buffered_bytes += len(piece)
            self.turn.takes(len(piece))
        self._body_chunk_count = len(chunks)
        if inflater.holds_more:
            if self.is_complete:
                self.is_complete, self._is_end_held = False, True
            self.is_ready = chunk_count > 0
            self._pause_reading()
            self._go_on()
        elif self._is_end_held:
            self.is_complete = self.is_ready = True

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = math.inf

    def _fail(self, message: str) -> None:
        if not (self.is_complete or self._is_end_held) and self._failure is None:
            self._failure = HttpError(message)
            self.is_ready = True
        self.is_closing = True
        self._transport.abort()
        self.wake()

    # --- callbacks of the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # that of a stream protocol is a Transport

    def data_received(self, data: bytes) -> None:
        if self.is_complete:  # no request is in progress
            self.is_reusable = False
            self.abort()
            return
        if (
            self.turn.takes(len(data))
            and not self._unparsed
            and (self._inflater is None or not self._holds_inflatable())
        ):
            self._parse(data)
        else:
            self._unparsed += data
            if len(self._unparsed) > _UNPARSED_BYTES:
                self._pause_reading()
            self._go_on()

    def _parse(self, data: bytes) -> None:
        chunks = self._chunks
        chunk_count = len(chunks)
        try:
            if data:
                self._parser.feed_data(data)
            if self._inflater is not None:
                self._inflate(self._inflater, chunk_count)
        except EncodingError as exc:
            self.is_complete = self._is_end_held = False
            self._fail(str(exc))
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._drop_excess()
            self.is_reusable = False
            self._fail("What came is no HTTP.")
            return
        if len(chunks) > chunk_count:
            self._non_body_bytes = 0
            on_data, waiter = self._on_data, self._waiter
            if on_data is not None and waiter is not None and not waiter.done() and not self.is_complete:
                body = b"".join(chunks)  # a single chunk is not copied
                chunks.clear()
                on_data(body)
                return
            self.is_ready = True
            self._buffered_bytes += len(data)
            if self._buffered_bytes > HIGH_WATER_BYTES:
                self._pause_reading()
        else:
            self._non_body_bytes += len(data)
            if self._non_body_bytes > MAX_NON_BODY_BYTES:
                self._fail("The headers are too large.")
                return
        if self.is_complete:
            self._drop_excess()
        if self.is_ready:
            self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unparsed and not self.is_closing:
            self._parse(self._unparsed)
        self._unparsed = b""
        if self.status and exc is None and not self.is_closing and not self._is_body_framed:
            if self._holds_inflatable():
                self._is_end_held = True
            else:
                self.is_complete = self.is_ready = True
        self.is_closing = True
        self.is_reusable = False
        self._stop_timer()
        self._fail("The connection broke.")
        self.resume_writing()
        self._on_closed(self)
        # Otherwise connection and parser reference each other until the garbage collector runs.
        del self._parser

    def pause_writing(self) -> None:
        self._drain_waiter = self._loop.create_future()

    def resume_writing(self) -> None:
        waiter, self._drain_waiter = self._drain_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _drop_excess(self) -> None:
        """Drop bytes after the end of the response. A server that sends them does not get another request."""
        if self.is_closing:
            self.is_reusable = False
            del self._chunks[self._body_chunk_count :]

    # --- callbacks of the parser -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # otherwise a trailer
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.is_complete:
            return
        if status < 100:
            self._fail("What came is no HTTP.")
        elif status < 200:  # interim response: the final one follows
            self.headers = {}
        else:
            self.status = status
            # otherwise the end of the connection ends the body
            self._is_body_framed = "content-length" in self.headers or "chunked" in self.headers.get(
                "transfer-encoding", ""
            )
            self._find_inflater()
            self.wake()

    def _find_inflater(self) -> None:
        """Prepare for a body that is compressed. An encoding that is not decompressed stays in the headers."""
        encoding = self.headers.get("content-encoding")
        if encoding is not None:
            with suppress(EncodingError):
                self._inflater = inflater_of(encoding)
                del self.headers["content-encoding"]

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second response to one request
            self.is_closing = True

    def on_message_complete(self) -> None:
        if self.status and not self.is_complete:
            self._body_chunk_count = len(self._chunks)
            self.is_complete = self.is_ready = True
            self.is_reusable = self._is_request_sent and self._parser.should_keep_alive()
