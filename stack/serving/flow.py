"""How a connection waits, with objects that are small while nothing waits: a server has thousands of them."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl


class LazyEvent:
    """An asyncio.Event that costs 60 bytes until it is waited for; one of asyncio's own has a queue of 800."""

    __slots__ = ("_event", "_is_set")

    def __init__(self, *, is_set: bool) -> None:
        self._is_set = is_set
        self._event: asyncio.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        self._is_set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> bool:
        """Wait until the event is set; return true."""
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()
        return True


class HoldableFlow(FlowControl):
    """uvicorn's flow control, which does not resume reading while `held`."""

    held = False

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_writable_event = LazyEvent(is_set=True)  # type: ignore[assignment]  # as much of an Event as is used

    def hold(self) -> None:
        """Pause reading until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Resume reading."""
        self.held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()
