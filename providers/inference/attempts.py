"""Attempt: one of several providers or servers that are asked in turn, until one of them has an output."""

from collections.abc import Sequence
from typing import Final, TypeVar

from apis.sink import Sink
from providers.inference.circuit_breaker import CircuitBreaker

T = TypeVar("T")


class Attempt:
    """A request that a breaker guards: it counts the beginning of the output as a success. After it no other attempt
    follows."""

    __slots__ = ("_breaker", "_is_probe", "has_output")

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.has_output = False
        self._breaker: Final = breaker
        self._is_probe: Final = breaker.begin_request()

    def begin_output(self) -> None:
        """Record that there is an output."""
        if not self.has_output:
            self.has_output = True
            self._breaker.record_success()

    def end(self) -> None:
        """Record the end of the attempt, however it ended."""
        self._breaker.end_request(is_probe=self._is_probe)

    def watch(self, sink: Sink[T]) -> Sink[T]:
        """Return a sink that passes everything on to `sink`, and records the first batch."""
        return _WatchedSink(sink, self)


class _WatchedSink(Sink[T]):
    __slots__ = ("_attempt", "_sink")

    def __init__(self, sink: Sink[T], attempt: Attempt) -> None:
        self._sink = sink
        self._attempt = attempt

    def write(self, batch: Sequence[T]) -> bool:
        if not self._attempt.has_output:
            self._attempt.begin_output()
        return self._sink.write(batch)

    async def ready(self) -> None:
        await self._sink.ready()

    async def put(self, batch: Sequence[T]) -> None:
        self._attempt.begin_output()
        await self._sink.put(batch)
