"""Answers that take long: watched for clients that leave or stall, and kept alive while there is nothing to say."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from apis.errors import StackError
from apis.events import LoggedEvent
from stack.http.request_record import Visit
from stack.http.sse import DONE, KEEP_ALIVE

_log = logging.getLogger(__name__)
Result = TypeVar("Result")

_TICK_S: Final = 1.0
_STALL_S: Final = 60.0
_BEGINNING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
EVENT_STREAM: Final = (b"content-type", b"text/event-stream; charset=utf-8")
_HEADERS: Final = [
    EVENT_STREAM,
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, and cancel it as soon as the client leaves. Raises ClientGone then."""
    task = asyncio.current_task()
    assert task is not None  # a coroutine that runs, runs in a task
    gone = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal gone
        if not watcher.cancelled():
            gone = True
            task.cancel()

    watcher = asyncio.create_task(_disconnected(receive))
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.remove_done_callback(leave)
        watcher.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Pulse:
    """One task for all open streams: every second it sends a comment on those that have been silent for
    `keep_alive_s`, and ends those whose client has taken nothing for a minute."""

    def __init__(self, keep_alive_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._open: set[_Open] = set()
        self._comments: set[asyncio.Task[None]] = set()

    def add(self, stream: "_Open") -> None:
        self._open.add(stream)

    def discard(self, stream: "_Open") -> None:
        self._open.discard(stream)

    @property
    def open_streams(self) -> int:
        """How many streams are open now."""
        return len(self._open)

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_TICK_S, self._keep_alive_s / 2))
            now = loop.time()
            for stream in list(self._open):
                silent_s = now - stream.wrote_at
                if stream.writing and silent_s > _STALL_S:
                    stream.task.cancel()
                elif not stream.writing and silent_s > self._keep_alive_s:
                    comment = asyncio.create_task(stream.write(KEEP_ALIVE))
                    self._comments.add(comment)
                    comment.add_done_callback(self._comments.discard)


class _Open:
    """One open stream's connection."""

    __slots__ = ("_send", "_time", "task", "writing", "wrote_at")

    def __init__(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None  # a request is a task of the server's
        self.task = task
        self._send = send
        self._time = asyncio.get_running_loop().time
        self.wrote_at = self._time()
        self.writing = False

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self.writing = True
        self.wrote_at = self._time()
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await self._send(message)
        self.writing = False


class EventStream(Response):
    """An ASGI answer: batches of events, framed. An error before the first batch is raised, for an HTTP status. The
    `visit` that makes a response by it is told of its beginning, its first output and its end."""

    def __init__(
        self,
        batches: AsyncGenerator[Sequence[Any]],
        frame: Callable[[Sequence[Any]], bytes],
        pulse: Pulse,
        visit: Visit | None = None,
    ) -> None:
        super().__init__()
        self._batches = batches
        self._frame = frame
        self._pulse = pulse
        self._visit = visit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(send))
        except ClientGone:
            _log.info("a client left its stream early")

    async def _run(self, send: Send) -> None:
        stream: _Open | None = None
        async with aclosing(self._batches) as batches:
            batch: Sequence[Any] = ()
            last = DONE
            waits = self._visit is not None
            try:
                async for batch in batches:
                    if stream is None:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        stream = _Open(send)
                        self._pulse.add(stream)
                    if waits:
                        waits = self._waits_after(batch)
                    await stream.write(self._frame(batch))
            except StackError as exc:
                if stream is None:
                    raise
                # the stream has already said so in its own terms: raising is for those who drain it
                _log.info("a stream failed: %s", exc.message)
                if batch and isinstance(batch[-1], LoggedEvent):
                    last = b""  # but for a log, which can be read on elsewhere: it is not done
            finally:
                if stream is not None:
                    self._pulse.discard(stream)
                if self._visit is not None and batch:
                    self._visit.told(batch[-1])
        if stream is not None:
            await stream.write(last, more=False)

    def _waits_after(self, batch: Sequence[Any]) -> bool:
        """Whether the first output is still to come after this batch, the first one or the one after."""
        assert self._visit is not None
        if not batch:
            return True
        if batch[-1].type in _BEGINNING:
            self._visit.told(batch[-1])
            return True
        self._visit.first_output_s = self._visit.passed_s()
        return False
