"""LiveBatch: a batch of a stream whose next batches can be pushed to the consumer instead of pulled by it.

A stream is an async generator: its consumer pulls one batch after another, and each pull wakes every generator between
the source and the consumer. While a model generates, a batch is one token, and the pulls cost more than the work. So a
source that receives its data in a callback yields LiveBatches. The consumer may call `push_to` with a function, and
then pulls on as before: while that pull waits, the source calls the function with each new batch, directly in its
callback. The pull returns with the next batch that needs control: the last one, one after the receiver was not ready,
or an error.

    pulled:   socket -> task switch -> five generators down, five up -> consumer
    pushed:   socket -> source's callback -> conversions -> receiver

A stage that yields the same batch object needs no code for this. One that replaces each batch by a function of it uses
`convert_batch`. One that yields other objects ends the offer, and everything is pulled: that is always correct.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

Receiver = Callable[[Sequence[T]], bool]
"""Consumer of pushed batches. It takes the batch in any case, and returns true if it is ready for another one; after
false, the next batch is pulled. It must not block. Its exception ends the stream."""


class LiveBatch(list[T], Generic[T]):
    """A batch with the function that asks its source to push. The request holds until the source yields again."""

    __slots__ = ("push_to",)

    def __init__(self, batch: Sequence[T], push_to: Callable[[Receiver[T]], None]) -> None:
        super().__init__(batch)
        self.push_to = push_to


def convert_batch(batch: Sequence[T], convert: Callable[[Sequence[T]], Sequence[U]]) -> Sequence[U]:
    """Return `convert(batch)`; live if `batch` is, and pushed batches are then converted, too. A pushed batch that
    becomes empty does not reach the receiver."""
    converted = convert(batch)
    if not isinstance(batch, LiveBatch):
        return converted
    return LiveBatch(converted, partial(_push_converted, batch.push_to, convert))


def _push_converted(
    push_source_to: Callable[[Receiver[T]], None], convert: Callable[[Sequence[T]], Sequence[U]], receive: Receiver[U]
) -> None:
    push_source_to(partial(_convert_and_receive, convert, receive))


def _convert_and_receive(
    convert: Callable[[Sequence[T]], Sequence[U]], receive: Receiver[U], pushed: Sequence[T]
) -> bool:
    output = convert(pushed)
    return receive(output) if output else True
