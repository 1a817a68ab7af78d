"""Attempt: one of several providers or servers that are asked in turn, until one of them has an output."""

from collections.abc import Sequence
from typing import Final, TypeVar

from apis.sink import ConvertedSink, Sink
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

        def record(batch: Sequence[T]) -> Sequence[T]:
            self.begin_output()
            return batch

        return ConvertedSink(sink, record)
