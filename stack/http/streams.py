"""Event streams: cancelled when the client disconnects, with comments while there is no event to send."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from apis.errors import Overloaded, StackError, error_to_body
from apis.events import FLAT_EVENTS, INITIAL_EVENTS, TERMINAL_EVENTS, LoggedEvent
from apis.shared_timeout import SharedTimeout
from apis.sink import Sink
from apis.ticks import next_tick
from providers.common.fair_turns import current_turn, run_long
from providers.common.tracebacks import without_traceback
from stack.http.peer import Peer, get_peer
from stack.http.request_record import RequestRecord
from stack.http.sse import DONE_FRAME, KEEP_ALIVE_FRAME

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
Produce = Callable[[Sink[Any]], Coroutine[Any, Any, None]]
"""Puts the batches of a stream into a sink, and returns or raises at its end."""

SHUTTING_DOWN_MESSAGE: Final = (
    "This server is shutting down. Try again: another one answers, or this one when it is back."
)
_TICK_S: Final = 1.0
_LARGE_BYTES: Final = 512 * 1024
"""Bytes of a stream whose last events are written in pieces."""
_PIECE_BYTES: Final = 256 * 1024
_PIECE_WORK: Final = 2048
"""Work of writing one piece, at least that of a token's event."""
HEAD_WAIT_S: Final = 1.0
"""Seconds that the head of a stream waits for the first batch, whose failure is an HTTP status until then."""
EVENT_STREAM_HEADER: Final = (b"content-type", b"text/event-stream; charset=utf-8")
_STREAM_HEADERS: Final = [
    EVENT_STREAM_HEADER,
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


_SHUTDOWN_FRAME: Final = b"data: %b\n\n" % orjson.dumps(error_to_body(Overloaded(SHUTTING_DOWN_MESSAGE)))
"""The last event of a stream that is no stream of a response, which has its own."""


class ClientDisconnected(Exception):
    """The client closed its connection before it had its response."""


class WhileConnected:
    """Context manager: when the client closes its connection, the current task is cancelled, and ClientDisconnected is
    raised in place of the cancellation."""

    __slots__ = ("_is_disconnected", "_peer", "_task", "_watcher")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        """Start to watch the connection. Our own server calls back without a task that waits for that."""
        self._is_disconnected = False
        task = asyncio.current_task()
        assert task is not None  # a request is handled in a task
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._peer = get_peer(scope)
        if self._peer is not None:
            self._peer.watch(self._cancel_work)
        else:
            self._watcher = asyncio.create_task(self._wait_for_disconnect(receive))

    def __enter__(self) -> None:
        return

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._peer is not None:
            self._peer.stop_watching()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its traceback has this object, which must not have the traceback
        if isinstance(exc, asyncio.CancelledError) and self._is_disconnected and self._task.uncancel() == 0:
            raise ClientDisconnected from None

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel_work()

    def _cancel_work(self) -> None:
        self._is_disconnected = True
        self._task.cancel()


async def run_while_connected(http: Request, work: Awaitable[ResultT]) -> ResultT:
    """Return the result of `work`; cancel it and raise ClientDisconnected when the client closes its connection."""
    with WhileConnected(http.scope, http.receive):
        return await work


class StreamMonitor:
    """One task for all open streams: every second it sends a comment on those without an event for `keep_alive_s`.

    The connection itself cuts off a client that does not read.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._open_streams: set[_OpenStream] = set()
        self._comment_tasks: set[asyncio.Task[None]] = set()
        self.head_timeout = SharedTimeout(HEAD_WAIT_S)
        self.is_ending = False
        """True when the process ends, and cancels what runs: each stream then sends a last event."""

    def add(self, stream: "_OpenStream") -> None:
        self._open_streams.add(stream)

    def discard(self, stream: "_OpenStream") -> None:
        self._open_streams.discard(stream)

    @property
    def open_streams(self) -> int:
        """The number of streams that are open now."""
        return len(self._open_streams)

    async def run(self) -> None:
        """Watch the streams until cancelled."""
        while True:
            await asyncio.sleep(next_tick(min(_TICK_S, self._keep_alive_s / 2)) - monotonic())
            now = monotonic()
            for stream in list(self._open_streams):
                silent_s = now - stream.last_write_at
                if not stream.is_writing and silent_s > self._keep_alive_s:
                    self.send_comment(stream)

    def send_comment(self, stream: "_OpenStream") -> asyncio.Task[None]:
        """Send a comment on a stream, without waiting for it."""
        comment = asyncio.create_task(stream.send_comment())
        self._comment_tasks.add(comment)
        comment.add_done_callback(self._comment_tasks.discard)
        return comment


class _OpenStream(Sink[Any]):
    """One stream on its way to its client; it begins with the first write. The first batches wait for the head, and for
    a client that is not ready. After the first output, a batch is written in the call that brings it, past the ASGI
    layers, where our own server runs the app: then there is a `peer`.

    `ending` are the frames that leave with the end of the body; `has_begun` is true from the first batch on, and
    `is_log` of the events of a log.
    """

    __slots__ = (
        "_awaits_output",
        "_batches",
        "_first_comment",
        "_is_blocked",
        "_is_flushing",
        "_pushes",
        "_record",
        "_response",
        "_send",
        "_write_body",
        "_writer",
        "ending",
        "has_begun",
        "is_log",
        "is_open",
        "is_writing",
        "last_write_at",
    )

    def __init__(self, response: "EventStream", send: Send, peer: Peer | None) -> None:
        self.ending = b""
        self.last_write_at = monotonic()
        self.is_open = self.is_writing = self.has_begun = self.is_log = False
        self._response = response
        self._record = response.request_record
        self._send = send
        self._write_body = None if peer is None else peer.body_writer()
        self._first_comment: asyncio.Task[None] | None = None
        self._awaits_output = response.creates_response
        self._batches: list[Sequence[Any]] = []
        self._is_blocked = self._is_flushing = self._pushes = False
        self._writer: asyncio.Task[None] | None = None

    # --- batches ------------------------------------------------------------------------------------------------------

    def write(self, batch: Sequence[Any]) -> bool:
        if self._pushes and not self._is_flushing:
            self._pushes = self._push(self._response.frame(batch))
            self._is_blocked = not self._pushes
            return self._pushes
        self._batches.append(batch)
        if not self._is_flushing:  # who writes may be no task that could wait
            self._is_flushing = True
            self._writer = asyncio.create_task(self._flush())
        return False

    async def put(self, batch: Sequence[Any]) -> None:
        self._batches.append(batch)
        await self.ready()

    async def ready(self) -> None:
        """Write what waits, and return once the client is ready for more."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer
        if (self._batches or self._is_blocked) and not self._is_flushing:
            await self._flush()

    async def _flush(self) -> None:
        self._is_flushing = True
        try:
            if self._is_blocked:
                self._is_blocked = False
                await self.send(b"")  # ASGI's `send` waits before it writes
            while self._batches:
                await self._take(self._batches.pop(0))
            self._pushes = self._write_body is not None and not self._awaits_output
        finally:
            self._is_flushing = False

    async def _take(self, batch: Sequence[Any]) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self.begin()
        is_first_output = self._awaits_output and not self._awaits_first_output(batch)
        self._awaits_output = self._awaits_output and not is_first_output
        self.is_log = self.is_log or (bool(batch) and isinstance(batch[-1], LoggedEvent))
        is_end = not self.is_log and self._is_end(batch)
        if self._holds_large_answer(batch):
            await self._send_in_turns(batch)
        elif is_end:
            self.ending = self._response.frame(batch)
        else:
            await (self._send_at_once if is_first_output else self.send)(self._response.frame(batch))

    def _holds_large_answer(self, batch: Sequence[Any]) -> bool:
        """Return true for a large batch of a log, and for the last events of a large answer or item, which hold all of
        it."""
        if all(isinstance(event, LoggedEvent) for event in batch):
            return sum(len(event.data) for event in batch) > _LARGE_BYTES
        is_large = self._record.sent_bytes > _LARGE_BYTES and (self._response.creates_response or self.is_log)
        return is_large and any(event.type not in FLAT_EVENTS for event in batch)

    async def _send_in_turns(self, batch: Sequence[Any]) -> None:
        """Send a large batch event by event and piece by piece, in the tenant's turns."""
        turn, frame_batch = current_turn(), self._response.frame
        for event in batch:
            frame = frame_batch((event,)) if event.type in FLAT_EVENTS else await run_long(frame_batch, (event,))
            for start in range(0, len(frame), _PIECE_BYTES):
                await turn.wait(_PIECE_WORK)
                await self.send(frame[start : start + _PIECE_BYTES])

    def _is_end(self, batch: Sequence[Any]) -> bool:
        """Return true, and record the last event, if that is the end of the response that the request creates."""
        if not (self._response.creates_response and batch and batch[-1].type in TERMINAL_EVENTS):
            return False
        self._record.observe(batch[-1])
        return True

    def _awaits_first_output(self, batch: Sequence[Any]) -> bool:
        """Return true if neither this batch nor one before it has output; record the time of the first that has."""
        if not batch:
            return True
        if batch[0].type in INITIAL_EVENTS:
            self._record.observe(batch[0])
        if batch[-1].type in INITIAL_EVENTS:
            return True
        self._record.first_output_s = self._record.elapsed_s()
        return False

    # --- bytes --------------------------------------------------------------------------------------------------------

    def begin_early(self) -> None:
        """Begin with a comment, while the first batch is waited for."""
        self._first_comment = self._response.monitor.send_comment(self)

    async def begin(self) -> None:
        """Send the head, unless it was sent early."""
        self._response.monitor.head_timeout.cancel(self.begin_early)
        if self._first_comment is not None:
            await asyncio.wait({self._first_comment})
        if not self.is_open:
            await self._send_head()

    def end(self) -> None:
        """Let nothing more be written but the end."""
        self._response.monitor.head_timeout.cancel(self.begin_early)
        if self._first_comment is not None and not self.is_open:
            self._first_comment.cancel()
        self._response.monitor.discard(self)
        if self._writer is not None:
            self._writer.cancel()

    async def send_comment(self) -> None:
        """Send what keeps the connection alive while there is no event."""
        await self.send(self._response.keep_alive_frame)

    async def send(self, body: bytes, *, more_body: bool = True) -> None:
        self.is_writing = True
        self.last_write_at = monotonic()
        if not self.is_open:
            await self._send_head()
        message: Message = {"type": "http.response.body", "body": body, "more_body": more_body}
        await self._send(message)
        self.is_writing = False

    async def _send_head(self) -> None:
        self.is_open = True
        start: Message = {"type": "http.response.start", "status": self._response.status, "headers": _STREAM_HEADERS}
        await self._send(start)
        self._response.monitor.add(self)

    async def _send_at_once(self, body: bytes) -> None:
        """Write now, together with what `send` has left to the end of the event loop's turn, and wait until the client
        is ready for more."""
        if self._write_body is None or not body:  # an empty chunk would end the body
            await self.send(body)
        elif not self._push(body):
            await self.send(b"")  # ASGI's `send` waits before it writes

    def _push(self, body: bytes) -> bool:
        """Write without waiting, past the ASGI layers; return true if the client is ready for more."""
        assert self._write_body is not None
        if not body:  # events of which this client is shown nothing: an empty chunk would end the body
            return True
        self.last_write_at = monotonic()
        self._record.sent_bytes += len(body)
        return self._write_body(body)


class EventStream(Response):
    """ASGI response of framed batches of events. `produce` puts them into a sink, in the task of the request. An error
    before the first batch is raised, for an HTTP status.

    With `encode_error` the head does not wait longer than HEAD_WAIT_S for the first batch, and an error after it is the
    last frame. Without, the source must send its first events soon, and its errors as events.

    A stream that `outlives_client` is produced to its end although its client disconnects.

    `request_record` is that of the request. If the request creates a response, it observes the first event, the first
    output and the last event.
    """

    keep_alive_frame: ClassVar[bytes] = KEEP_ALIVE_FRAME
    """It is sent while there is no event to send."""
    done_frame: ClassVar[bytes] = DONE_FRAME
    """The last frame of every stream that ends by itself."""
    status: ClassVar[int] = 200
    shutdown_frame: ClassVar[bytes] = _SHUTDOWN_FRAME
    """The last event of a stream that ends because the process does."""

    def __init__(
        self,
        produce: Produce,
        frame: Callable[[Sequence[Any]], bytes],
        monitor: StreamMonitor,
        request_record: RequestRecord,
        *,
        creates_response: bool = False,
        encode_error: Callable[[StackError], bytes] | None = None,
        outlives_client: bool = False,
    ) -> None:
        # not that of Response: the head is another one, and the body has no length
        self.frame = frame
        self.monitor = monitor
        self.request_record = request_record
        self.creates_response = creates_response
        self._produce = produce
        self._encode_error = encode_error
        self._outlives_client = outlives_client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._outlives_client:
            await self._run(send, get_peer(scope))
            return
        try:
            with WhileConnected(scope, receive):
                await self._run(send, get_peer(scope))
        except ClientDisconnected:
            _log.info("a client left its stream early")

    async def _run(self, send: Send, peer: Peer | None) -> None:
        stream = _OpenStream(self, send, peer)
        last = self.done_frame
        if self._encode_error is not None:
            self.monitor.head_timeout.start(stream.begin_early)
        try:
            await self._produce(stream)
            await stream.ready()
        except StackError as exc:
            without_traceback(exc)
            await stream.ready()
            if not stream.is_open:
                raise
            _log.info("a stream failed: %s", exc.message)
            stream.ending += b"" if self._encode_error is None else self._encode_error(exc)
            last = b"" if stream.is_log else self.done_frame  # a log is not done: it can be read on from another worker
        except asyncio.CancelledError:
            if not stream.is_open or not self.monitor.is_ending:
                raise
            last = b"" if stream.is_log else self.shutdown_frame + self.done_frame
        finally:
            stream.end()
        if not stream.has_begun:
            await stream.begin()
        await stream.send(stream.ending + last, more_body=False)
