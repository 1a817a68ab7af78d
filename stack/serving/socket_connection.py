"""uvicorn's WebSocket connection, with bounds on what clients send and on stalled ones, and a drain that waits for the
app."""

import asyncio
from typing import Any, ClassVar, Final, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from providers.common.fair_turns import TenantTurn, turn_of
from stack.http.peer import DRAIN_MESSAGE_TYPE, get_peer
from stack.serving.connection import HttpServerConnection
from stack.serving.open_connections import TrackedPeer
from stack.serving.refusals import BAD_REQUEST

_PIECE_BYTES: Final = 1024
"""Bytes that are parsed at a time: at most 170 frames."""
_FRAME_WORK: Final = 80
"""Work on one frame, and one more for each 16 bytes of it."""
_UNCOUNTED_BYTES: Final = 64 * 1024
"""Bytes of an unfinished message that are not counted: nearly all messages are smaller."""
_CLOSE_POLICY: Final = 1008
_CLOSE_TRY_AGAIN: Final = 1013


class WebSocketServerConnection(WebSocketsSansIOProtocol):
    """Parses what it receives in the turns of its tenant, and no further than to a message that waits for the app.

    Aborts the connection of a client that reads nothing for `stall_s`, or that is still open `linger_s` after the
    app is done with it. Closes it after more than `max_control_frames` pings and pongs in a second, a message in more
    than `max_fragments` frames or slower than a request's body may be, and an unfinished message whose bytes find no
    place among the bodies in progress.
    """

    stall_s: ClassVar[float] = 60.0
    linger_s: ClassVar[float] = 5.0
    max_fragments: ClassVar[int] = 1024
    max_control_frames: ClassVar[int] = 100

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._abort_timer: asyncio.TimerHandle | None = None
        self._draining = False
        peer = get_peer({"state": self.app_state})
        self._peer = peer if isinstance(peer, TrackedPeer) else None
        if self._peer is not None:
            self._peer.write_text = self._write_text
        self._unparsed = bytearray()
        self._is_queued = False
        self._control_frames = 0
        self._control_frames_since = 0.0
        self._message_timer: asyncio.TimerHandle | None = None
        self._timed_bytes = 0
        self._frame_bytes = 0

    @property
    def _turn(self) -> TenantTurn:
        return turn_of("") if self._peer is None else self._peer.turn

    @property
    def _has_message(self) -> bool:
        """True while a message waits for the app, which drops messages after its own close frame."""
        return not (self.close_sent or self.queue.empty())

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            super().data_received(data)
            if not self.handshake_initiated and not self.transport.is_closing():
                # the first data is the request's whole head, which exceeds a limit of the parser
                self.transport.write(BAD_REQUEST)
                self.transport.close()
            return
        self._unparsed += data
        self._parse_unparsed()

    def _parse_unparsed(self) -> None:
        """Parse what was received, piece by piece, in the turns of the tenant and while no message waits for the app;
        the rest is not read."""
        turn = self._turn
        while self._unparsed and not self._has_message and not self.transport.is_closing():
            if not turn.takes():
                if not self._is_queued:
                    self._is_queued = True
                    turn.queue(self._parse_in_turn, _FRAME_WORK)
                break
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self._timed_bytes += len(piece)
            self._frame_bytes += len(piece)
            turn.spent += len(piece) >> 4
            super().data_received(piece)
            self._check_unfinished_message()
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
        elif not self._unparsed and not self._has_message and self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _parse_in_turn(self) -> None:
        self._is_queued = False
        self._parse_unparsed()

    def handle_events(self) -> None:
        if self.conn.events:
            self._frame_bytes = len(self.conn.reader.buffer)
            self._turn.spent += _FRAME_WORK * len(self.conn.events)
            super().handle_events()

    def _check_unfinished_message(self) -> None:
        """Count the bytes of a message that is not whole, and bound the time that it takes."""
        is_fragmented = self.conn.current_size is not None
        size_bytes = self._frame_bytes + (self.conn.current_size or 0)
        if self.transport.is_closing() or not (size_bytes or is_fragmented):
            self._stop_message_timer()
        elif self._message_timer is None:
            self._start_message_timer()
        if size_bytes > _UNCOUNTED_BYTES and self._peer is not None and not self._peer.cover_message(size_bytes):
            self._fail(_CLOSE_TRY_AGAIN, "the bodies of the requests in progress are too large together")

    def _start_message_timer(self) -> None:
        self._timed_bytes = 0
        self._message_timer = self.loop.call_later(HttpServerConnection.body_s, self._on_message_timer)

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _on_message_timer(self) -> None:
        self._message_timer = None
        min_bytes = HttpServerConnection.body_s * HttpServerConnection.body_bytes_per_s
        if self._unparsed or self._has_message or self._timed_bytes >= min_bytes:
            self._start_message_timer()  # the rest may have come, and is not read yet
        else:
            self._fail(_CLOSE_POLICY, "the rest of the message did not come in time")

    def _fail(self, code: int, reason: str) -> None:
        """Close the connection because of what the client sends."""
        if not self.close_sent and not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after(self.stall_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_abort()
        self._stop_message_timer()
        self._unparsed.clear()
        super().connection_lost(exc)
        if self._peer is not None:
            self._peer.close()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if self._draining:
            self.transport.close()
        if self in self.connections:
            self._abort_after(self.linger_s)

    def shutdown(self) -> None:
        if self.transport.is_closing():
            return
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        elif not self._draining:
            self._draining = True
            self.queue.put_nowait(cast(Any, {"type": DRAIN_MESSAGE_TYPE}))

    def handle_text(self, event: Any) -> None:
        super().handle_text(event)
        event.data = b""  # the parser has its last frame until the next one comes

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= self.max_fragments:
            self._fail(1009, "too many fragments")
        else:
            super().handle_cont(event)
            event.data = b""  # as above

    def handle_ping(self) -> None:
        if self._allows_control_frame():
            super().handle_ping()

    def handle_pong(self, event: Any) -> None:
        if self._allows_control_frame():
            super().handle_pong(event)

    def _allows_control_frame(self) -> bool:
        now = self.loop.time()
        if now - self._control_frames_since > 1:
            self._control_frames, self._control_frames_since = 0, now
        self._control_frames += 1
        if self._control_frames > self.max_control_frames:
            self._fail(_CLOSE_POLICY, "too many control frames")
        return not self.close_sent

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # which uvicorn would log as an error
                self.frames = []
                self._fail(1007, "the text is not UTF-8")
                return
        super().send_receive_event_to_app()

    def _write_text(self, text: str) -> bool:
        """See `Peer.write_text`."""
        if not self.handshake_complete or self.close_sent or self.transport.is_closing():
            return False
        self.conn.send_text(text.encode())
        self.transport.write(b"".join(self.conn.data_to_send()))
        return self.writable.is_set()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self._parse_unparsed()
        return message

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent:
            # the client broke the protocol and was sent a close frame, while the app had more to send
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self._parse_unparsed()  # the close frame of the client may wait after its messages
        if not self.handshake_complete and self.close_sent:
            self.handshake_complete = True  # it was refused, which uvicorn would log as an error

    def _abort_after(self, seconds: float) -> None:
        self._cancel_abort()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
