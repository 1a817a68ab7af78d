"""uvicorn's WebSocket connection, with bounds on stalled clients, and a drain that waits for the app."""

import asyncio
from typing import Any, ClassVar, Final, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from stack.http.peer import get_peer
from stack.serving.open_connections import TrackedPeer
from stack.serving.refusals import BAD_REQUEST

DRAIN_MESSAGE_TYPE: Final = "websocket.drain"
"""The type of a message of our own to the app, when the server drains: the app closes the WebSocket when it is done."""


class WebSocketServerConnection(WebSocketsSansIOProtocol):
    """Aborts the connection of a client that reads nothing for `stall_s`, or that is still open `linger_s` after the
    app is done with it, and refuses a message in more than `max_fragments` frames."""

    stall_s: ClassVar[float] = 60.0
    linger_s: ClassVar[float] = 5.0
    max_fragments: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._abort_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._peer = get_peer({"state": self.app_state})

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            # the first data is the request's whole head, which exceeds a limit of the parser
            self.transport.write(BAD_REQUEST)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after(self.stall_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_abort()
        super().connection_lost(exc)
        if isinstance(self._peer, TrackedPeer):
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

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= self.max_fragments:
            self.conn.fail(1009, "too many fragments")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent:
            # the client broke the protocol and was sent a close frame, while the app had more to send
            raise ClientDisconnected
        await super().send(message)
        if not self.handshake_complete and self.close_sent:
            self.handshake_complete = True  # it was refused, which uvicorn would log as an error

    def _abort_after(self, seconds: float) -> None:
        self._cancel_abort()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
