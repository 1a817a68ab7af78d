"""uvicorn's HTTP/1.1 connection, with bounds on how slowly and how much a client may send."""

import asyncio
import math
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from providers.common.fair_turns import TURN_WORK, turn_of
from stack.http.peer import peer_state
from stack.serving.open_connections import OpenConnections, TrackedPeer
from stack.serving.refusals import BAD_REQUEST, HEAD_TOO_LARGE, OVERLOADED, TOO_SLOW
from stack.serving.response_transport import CONTINUE, ResponseTransport

_SLICE_BYTES: Final = 4096
"""Bytes that are parsed at a time: they hold at most some two hundred requests, of 2 KiB each when parsed."""
_MAX_PIPELINED: Final = 16
"""Parsed requests that wait for the responses before them; more stay unparsed, and then unread."""
_MAX_HEADERS: Final = 256
_HEAD_WORK: Final = TURN_WORK // 72
"""Work on the head of a request: 64 small requests of a tenant begin in one iteration of the event loop. Streams that
begin together get their tokens together, and one that wakes the process alone costs most."""
_BODY_PIECE_WORK: Final = 10
"""Work on one piece of a body, and one more for each 64 bytes of it: a client may send chunks of one byte."""
_CHECK_INTERVALS_S: Final = (0.02, 0.1, 0.5, 1.0)
"""Pauses between the checks of a half-closed connection; the last one repeats."""
_TCP_CLOSE: Final = b"\x07"
_HAS_TCP_INFO: Final = hasattr(socket, "TCP_INFO")


class _RefusedError(Exception):
    """Ends the parser inside a callback."""


class HoldableFlow(FlowControl):
    """uvicorn's flow control, which does not resume reading while `held`."""

    held = False

    def hold(self) -> None:
        """Pause reading until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Resume reading."""
        self.held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.held:
            super().resume_reading()


class HttpServerConnection(HttpToolsProtocol):
    """Bounds a connection in time and size, and parses what it receives in the turns of its tenant, or of its address
    before a request has passed authentication.

    It is closed if nothing comes in `silent_s`, if a request head is incomplete after `head_s`, if head and trailers,
    which are dropped, are larger than `max_head_bytes` together, if a body is slower than `body_bytes_per_s`, checked
    every `body_s`, and if the client reads nothing of a response for `stall_s`. A connection on which no request has
    passed authentication may idle for `anonymous_idle_s`.

    Pipelined requests are parsed a few at a time. A client that has closed only its half of the connection is served.
    """

    peer: TrackedPeer

    silent_s: ClassVar[float] = 30.0
    """Seconds until the first byte: a client that opens thousands of connections may need some for the last of them."""
    head_s: ClassVar[float] = 10.0
    max_head_bytes: ClassVar[int] = 64 * 1024
    body_s: ClassVar[float] = 60.0
    body_bytes_per_s: ClassVar[int] = 1024
    stall_s: ClassVar[float] = 60.0
    anonymous_idle_s: ClassVar[float] = 5.0
    linger_s: ClassVar[float] = 2.0
    """Seconds in which a client may go on sending a request that was refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._body_bytes = 0
        self._trailer_bytes = 0
        self._trailer_count = 0
        self._unparsed = bytearray()
        self._is_queued = False
        self._is_lingering = False
        self._active_cycle: Any = None
        self._drain_idle_s: float | None = None

    @property
    def has_request(self) -> bool:
        """True once the head of a request has been received."""
        return bool(self.cycle)

    @property
    def is_idle(self) -> bool:
        """True while no request runs on the connection."""
        return self._active_cycle is None or (self._active_cycle.response_complete and not self.pipeline)

    @property
    def is_silent(self) -> bool:
        """True while no request runs on the connection or waits to be parsed; the head of one may be on its way."""
        return self.is_idle and not self._unparsed and self.transport.get_protocol() is self

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        self.flow = self._flow = HoldableFlow(transport)
        self.timeout_keep_alive = self.anonymous_idle_s
        registry, address = OpenConnections.of(self.app_state), self.client[0] if self.client else ""
        self.peer = registry.open(self, address, turn_of(f"address {address}"), self.loop.time())
        self.app_state = peer_state(self.app_state, self.peer)
        self._start_timer(self.silent_s)
        if registry.drain_idle_s is not None:
            self.drain(registry.drain_idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cancel_stall()
        self._unparsed.clear()
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in waiting:
            cycle.on_response = _ignore  # else a cycle of references would keep it until a full garbage collection
        active = self._active_cycle
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        super().connection_lost(exc)
        self.peer.close()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if not self._unparsed and len(data) <= _SLICE_BYTES and self.peer.turn.takes():
            self._parse(data)
            if len(self.pipeline) >= _MAX_PIPELINED:
                self._flow.hold()
        else:
            self._unparsed += data
            self._parse_held()

    def _parse_held(self) -> None:
        """Parse what was received, slice by slice, in the turns of the tenant and while not too many requests wait."""
        while self._unparsed and len(self.pipeline) < _MAX_PIPELINED:
            turn = self.peer.turn
            if not turn.takes():
                if not self._is_queued:
                    self._is_queued = True
                    turn.queue(self._parse_in_turn, _HEAD_WORK)
                break
            piece = bytes(self._unparsed[:_SLICE_BYTES])
            del self._unparsed[:_SLICE_BYTES]
            self._parse(piece)
        if self._unparsed or len(self.pipeline) >= _MAX_PIPELINED:
            self._flow.hold()
        elif self._flow.held and not self.transport.is_closing():
            self._flow.release()

    def _parse_in_turn(self) -> None:
        self._is_queued = False
        if not self.transport.is_closing():
            self._parse_held()

    def _parse(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._trailer_bytes += len(data)  # unless it is of the body
        assert self.parser is not None  # uvicorn drops it when the connection is lost
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self._unparsed.clear()
                self.handle_websocket_upgrade()
        except httptools.HttpParserError as exc:
            self._refuse(HEAD_TOO_LARGE if isinstance(exc.__context__, _RefusedError) else BAD_REQUEST)
        else:
            counted_bytes = self._head_bytes if self._in_head else self._head_bytes + self._trailer_bytes
            if counted_bytes > self.max_head_bytes:
                self._refuse(HEAD_TOO_LARGE)

    def _refuse(self, response: bytes) -> None:
        """Send `response` and close; if requests before this one are running, close after their responses instead."""
        self._stop_timer()
        self._unparsed.clear()
        if self.transport.is_closing():
            return
        last, active = self.cycle, self._active_cycle
        if self.has_request and not self._in_head and last.response_complete:
            self.transport.close()  # the fault is in the trailers of a request that was answered
        elif self.is_idle or (active is last and last.more_body and not last.response_started):
            self.transport.write(response)
            self._linger()
        elif last.more_body:
            self.transport.close()
        else:
            last.keep_alive = False
            self._flow.hold()

    def refuse_silent(self, *, at_once: bool) -> None:
        """Close the connection, which is silent, with a 503 that says when to try again: after a moment in which its
        client can read that, or `at_once`."""
        self.transport.write(OVERLOADED)
        if at_once:
            self.transport.close()
        else:
            self._linger()

    def close_after_response(self) -> None:
        """Close the connection after what was written."""
        if self.cycle.more_body or self._unparsed or self.pipeline:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close this half of the connection now and the other one in a moment, and drop what still comes: if bytes
        arrived at a closed connection, or waited there, its system would reset it, and the client lose the response."""
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        self._unparsed.clear()
        active = self._active_cycle
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.transport.held_data = b""
            active.message_event.set()
        self.transport.write_eof()
        self._flow.release()
        self._start_timer(self.linger_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._trailer_bytes = self._trailer_count = 0
        self._start_timer(self.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # as uvicorn does
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))
            return
        # a trailer: it came after the request was checked by its head, and so is not part of it
        self._trailer_count += 1
        if len(self.headers) + self._trailer_count > _MAX_HEADERS:
            raise _RefusedError

    def on_headers_complete(self) -> None:
        if self._head_bytes > self.max_head_bytes // 2:
            self._head_bytes = self._count_head_bytes()
        if len(self.headers) > _MAX_HEADERS or self._head_bytes > self.max_head_bytes:
            raise _RefusedError
        self.peer.turn.spent += _HEAD_WORK
        super().on_headers_complete()
        self._in_head = False
        self._body_bytes = 0
        self._start_timer(self.body_s)
        if self._drain_idle_s is not None and self.has_request:
            self.cycle.keep_alive = False

    def _count_head_bytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active_cycle = cycle
        cycle.transport = ResponseTransport(self.transport, self.loop, self.close_after_response)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._active_cycle.transport.flush()
        if self.pipeline and not self._is_lingering:
            super().on_response_complete()
        else:  # uvicorn would make a timer for the pause after each response
            self.server_state.total_requests += 1
            if self.transport.is_closing() or self._is_lingering:
                return
            self._start_idle_timer()
            self.flow.resume_reading()
        if self._flow.held and not self.transport.is_closing():
            self._parse_held()

    def body_writer(self) -> Callable[[bytes], bool]:
        """Return the function of `Peer.body_writer`."""
        return _drop_body if self._active_cycle.scope["method"] == "HEAD" else self._write_body

    def _write_body(self, body: bytes) -> bool:
        """Write a part of the current response's body, as uvicorn does; return true if the client is ready for more."""
        cycle = self._active_cycle
        if cycle.disconnected or cycle.response_complete or self.transport.is_closing():
            return False
        data = b"%x\r\n%b\r\n" % (len(body), body) if cycle.chunked_encoding else body
        if held_data := cycle.transport.held_data:
            cycle.transport.held_data = b""
            data = held_data + data
        self.transport.write(data)
        return not self._flow.write_paused

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._trailer_bytes = 0
        self.peer.turn.spent += _BODY_PIECE_WORK + (len(body) >> 6)
        super().on_body(body)

    def on_message_complete(self) -> None:
        active = self._active_cycle
        if active is not None and active.response_complete:  # before its request was
            self._start_idle_timer()
        else:
            self._stop_timer()
        super().on_message_complete()
        if not self.pipeline:  # a large body has stopped it, and a client that leaves has to be noticed
            self.flow.resume_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn's own always closes
        if self._is_lingering or self.is_idle or self.cycle.more_body or self._unparsed or not _HAS_TCP_INFO:
            return None
        self._stop_timer()
        self.cycle.keep_alive = False
        self._flow.held = True
        self._probe_half_closed()
        return True

    def _probe_half_closed(self) -> None:
        """Find out if the client has closed both directions: only bytes that reach its system make that reset the
        connection. They are an interim response, or a zero in front of the size of the next chunk."""
        active = self._active_cycle
        if not active.response_started:
            self.transport.write(CONTINUE)
        elif active.chunked_encoding:
            active.transport.flush()
            self.transport.write(b"0")
        self.loop.call_later(_CHECK_INTERVALS_S[0], self._check_half_closed, 1)

    def _check_half_closed(self, count: int) -> None:
        if self.transport.is_closing():
            return
        state = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if state == _TCP_CLOSE:
            self.transport.abort()
        else:
            interval_s = _CHECK_INTERVALS_S[min(count, len(_CHECK_INTERVALS_S) - 1)]
            self.loop.call_later(interval_s, self._check_half_closed, count + 1)

    def drain(self, idle_s: float) -> None:
        """Serve at most one more request, with `connection: close`, and close once nothing was received for `idle_s`:
        closing at once would reset a request that is on its way. A second call does nothing."""
        if self._drain_idle_s is not None or self._is_lingering:
            return
        self._drain_idle_s = self.timeout_keep_alive = idle_s
        if not self.is_idle:
            if not self.cycle.response_started:
                self.cycle.keep_alive = False
        elif not self._in_head or not self.has_request:
            self._start_idle_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stall()
        stall_s = self.stall_s if self.peer.is_admitted else self.head_s
        self._stall_timer = self.loop.call_later(stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _should_upgrade(self) -> bool:
        # refused as any request would be; uvicorn itself would let any number of WebSockets in
        return (
            self.scope["method"] == "GET"
            and not OpenConnections.of(self.app_state).is_crowded
            and super()._should_upgrade()
        )

    def _start_timer(self, seconds: float) -> None:
        """Let the client be late in `seconds`. One timer serves all requests of the connection, because one for each
        head and body costs as much as parsing them: it ends no later than the deadline, and then waits for the rest."""
        self._deadline = deadline = monotonic() + seconds  # the event loop's own clock, without a call of it
        if self._timer is None or self._timer.when() > deadline:
            self._set_timer(deadline)

    def _start_idle_timer(self) -> None:
        """Close the connection if no request begins within `timeout_keep_alive` seconds."""
        self._body_bytes = 0
        self._start_timer(self.timeout_keep_alive)

    def _stop_timer(self) -> None:
        self._deadline = math.inf

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._deadline == math.inf or self.transport.is_closing():
            return
        if monotonic() < self._deadline:
            self._set_timer(self._deadline)
        else:  # in turns, because thousands that came together are late together
            self.peer.turn.queue(self._expire, _HEAD_WORK)

    def _expire(self) -> None:
        if self.transport.is_closing() or monotonic() < self._deadline:  # closed, or no longer late
            return
        if self._is_lingering:
            self.transport.close()
        elif self._flow.held:
            self._start_timer(self.head_s)  # the client may have sent the rest, which is not read yet
        elif not self._in_head and self._body_bytes >= self.body_s * self.body_bytes_per_s:
            self._body_bytes = 0
            self._start_timer(self.body_s)
        else:
            self._refuse(TOO_SLOW)


def _drop_body(_: bytes) -> bool:
    """Take a part of the body of a response to HEAD, which has none."""
    return True


def _ignore() -> None:
    """Replace the callback of a request that is never answered."""
