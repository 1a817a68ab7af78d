"""Sink: who takes the batches of a stream. Stream: what a coroutine puts into a sink, for a reader that pulls.

What makes a stream is a coroutine that puts each batch into a sink, and returns or raises at the end. Every stage on
the way is a sink that passes on what it has made of a batch, so that a token runs from the socket of its source to the
socket of its client in one call, without a change of tasks:

    socket -> source's callback -> write -> write -> ... -> client's socket

A reader that wants one batch after another, as all do at the beginning of a stream, has a Stream: it runs the coroutine
in a task. It may then have later batches pushed, see `Stream.push_to`.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from apis.errors import StackError

T = TypeVar("T")
U = TypeVar("U")
T_contra = TypeVar("T_contra", contravariant=True)

_MAX_WAITING: Final = 8
"""Batches that may wait for their reader."""


class Sink(ABC, Generic[T_contra]):
    """Takes the batches of one stream."""

    @abstractmethod
    def write(self, batch: Sequence[T_contra]) -> bool:
        """Take a batch that has just arrived, without waiting. Return true where another may follow; after false, call
        `ready` at once. An exception ends the stream."""

    async def ready(self) -> None:
        """Return when another batch may follow."""

    async def put(self, batch: Sequence[T_contra]) -> None:
        """Take a batch, and return when another one may follow."""
        if not self.write(batch):
            await self.ready()


class ConvertedSink(Sink[T], Generic[T, U]):
    """Passes on what `convert` makes of each batch, and nothing where that is empty."""

    def __init__(self, sink: Sink[U], convert: Callable[[Sequence[T]], Sequence[U]]) -> None:
        self._sink = sink
        self._convert = convert

    def write(self, batch: Sequence[T]) -> bool:
        output = self._convert(batch)
        return self._sink.write(output) if output else True

    async def ready(self) -> None:
        await self._sink.ready()

    async def put(self, batch: Sequence[T]) -> None:
        if output := self._convert(batch):
            await self._sink.put(output)


class ReceivingSink(Sink[T], Generic[T, U]):
    """Passes on what the receiver of a stream makes of each batch; nothing where that is empty, unless `passes_empty`.
    An error on the way is marked: no source of the batches is its cause."""

    def __init__(
        self, sink: Sink[U], receive: Callable[[Sequence[T]], Sequence[U]], *, passes_empty: bool = False
    ) -> None:
        self._sink = sink
        self._receive = receive
        self._passes_empty = passes_empty

    def write(self, batch: Sequence[T]) -> bool:
        try:
            output = self._receive(batch)
            return self._sink.write(output) if output or self._passes_empty else True
        except StackError as exc:
            exc.is_of_receiver = True
            raise

    async def ready(self) -> None:
        try:
            await self._sink.ready()
        except StackError as exc:
            exc.is_of_receiver = True
            raise

    async def put(self, batch: Sequence[T]) -> None:
        try:
            output = self._receive(batch)
            if output or self._passes_empty:
                await self._sink.put(output)
        except StackError as exc:
            exc.is_of_receiver = True
            raise


class LastBatch(Sink[T]):
    """Keeps the newest batch, and lets go of all others."""

    def __init__(self) -> None:
        self.batch: Sequence[T] = ()

    def write(self, batch: Sequence[T]) -> bool:
        self.batch = batch
        return True


class Stream(AsyncGenerator[Sequence[T], None], Sink[T]):
    """The batches that `produce` puts into the sink that it is called with: this one. It begins with the first batch
    that is asked for, in a task with the context of the reader. Read it within `contextlib.aclosing`.

    Closing it cancels the coroutine and waits for its end. So does a reader that is cancelled; where the coroutine then
    ends in its own way instead, with further batches or an error, these come in place of the cancellation.
    """

    def __init__(self, produce: "Callable[[Sink[T]], Coroutine[Any, Any, None]]") -> None:
        self._produce = produce
        self._task: asyncio.Task[None] | None = None
        self._batches: deque[Sequence[T]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._receive: Callable[[Sequence[T]], bool] | None = None
        self._is_over = self._is_closing = False

    def push_to(self, receive: Callable[[Sequence[T]], bool]) -> None:
        """Have batches that are written while the reader waits for one pushed to `receive`, in the callback in which
        they arrive. It must not block, and returns true if it is ready for another one; after false, batches are pulled
        until this is called again. What is put is always pulled."""
        self._receive = receive

    def write(self, batch: Sequence[T]) -> bool:
        if self._receive is not None and self._waiter is not None and not self._batches:
            if not self._receive(batch):
                self._receive = None
            return True
        self._append(batch)
        return len(self._batches) < _MAX_WAITING

    async def put(self, batch: Sequence[T]) -> None:
        self._append(batch)
        await self.ready()

    async def ready(self) -> None:
        while len(self._batches) >= _MAX_WAITING and not self._is_closing:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def __anext__(self) -> Sequence[T]:
        if self._task is None:
            if self._is_over:
                raise StopAsyncIteration
            self._task = _start(self._run())
        if not self._batches and not self._task.done():
            await self._wait(self._task)
        if self._batches:
            if self._room is not None:
                _wake(self._room)
            return self._batches.popleft()
        self._is_over = True
        task, self._task = self._task, None
        try:
            task.result()
        finally:
            del task  # its exception has this frame, and would hold itself by it
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._is_over = True
        if self._task is not None:
            await self._cancel(self._task)
            if not self._task.cancelled():
                self._task.exception()  # retrieved, although nothing reads any more
        self._batches.clear()

    async def asend(self, value: None, /) -> Sequence[T]:
        return await self.__anext__()

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Sequence[T]:
        await self.aclose()
        raise typ if isinstance(typ, BaseException) else typ()

    async def _wait(self, task: asyncio.Task[None]) -> None:
        """Wait for a batch or the end."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            await self._cancel(task)
            if task.cancelled() or (not self._batches and task.exception() is None):
                raise
        finally:
            self._waiter = None

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        self._is_closing = True
        if not task.done():
            task.cancel()
            await asyncio.wait({task})

    def _append(self, batch: Sequence[T]) -> None:
        self._batches.append(batch)
        if self._waiter is not None:
            _wake(self._waiter)

    async def _run(self) -> None:
        try:
            await self._produce(self)
        finally:
            if self._waiter is not None:  # in this step of the task, not one turn of the loop after its end
                _wake(self._waiter)


async def put_all(batches: AsyncGenerator[Sequence[T]], sink: Sink[T]) -> None:
    """Put the batches of a generator into a sink, and close it."""
    async with aclosing(batches):
        async for batch in batches:
            await sink.put(batch)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Return a task of the coroutine, which has begun already where Python can do that: from 3.12 on."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.get_running_loop().create_task(work)  # asyncio.create_task would also give it a name
