"""LiveBatch: a batch of a stream whose next batches can be pushed to the consumer instead of pulled by it.

A stream is an async generator: its consumer pulls one batch after another, and each pull wakes every generator between
the source and the consumer. While a model generates, a batch is one token, and the pulls cost more than the work. So a
source that receives its data in a callback yields LiveBatches. The consumer may call `push_to` with a function, and
then pulls on as before: while that pull waits, the source calls the function with each new batch, directly in its
callback. The pull returns with the next batch that needs control: the last one, one after the receiver was not ready,
or an error.

    pulled:   socket -> task switch -> all generators down, and up again -> consumer
    pushed:   socket -> source's callback -> conversions -> receiver

A stage that yields the same batch object needs no code for this. One that replaces each batch by a function of it uses
`convert_batch`. One that yields other objects ends the offer, and everything is pulled: that is always correct.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

Receiver = Callable[[Sequence[T]], bool]
"""Consumer of pushed batches. It takes the batch in any case, and returns true if it is ready for another one; after
false, the next batch is pulled. It must not block. Its exception ends the stream."""
Conversion = Callable[[Sequence[T]], Sequence[U]]
"""Function of one stage that makes another batch of each batch."""


class LiveBatch(list[T], Generic[T]):
    """A batch with the function that asks its source to push. The request holds until the source yields again."""

    __slots__ = ("_conversions", "_push_source_to")

    def __init__(
        self,
        batch: Sequence[T],
        push_source_to: Callable[[Receiver[Any]], None],
        conversions: "Sequence[Conversion[Any, Any]]" = (),
    ) -> None:
        """Create a batch of the source that `push_source_to` asks, or what `conversions` have made of one."""
        super().__init__(batch)
        self._push_source_to = push_source_to
        self._conversions = conversions

    def push_to(self, receive: Receiver[T]) -> None:
        """Ask the source to push its next batches to `receive`, converted as this one was."""
        conversions = self._conversions
        if not conversions:
            self._push_source_to(receive)
            return

        def convert_and_receive(batch: "Sequence[Any]") -> bool:  # one call for all stages, because each token makes it
            for convert in conversions:
                batch = convert(batch)
                if not batch:
                    return True
            return receive(batch)

        self._push_source_to(convert_and_receive)

    def convert(self, convert: "Conversion[T, U]") -> "LiveBatch[U]":
        """Return the live batch of `convert(self)`."""
        return LiveBatch(convert(self), self._push_source_to, (*self._conversions, convert))


def convert_batch(batch: Sequence[T], convert: Conversion[T, U]) -> Sequence[U]:
    """Return `convert(batch)`; live if `batch` is, and pushed batches are then converted, too. A pushed batch that
    becomes empty does not reach the receiver."""
    return batch.convert(convert) if isinstance(batch, LiveBatch) else convert(batch)
