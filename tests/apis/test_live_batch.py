"""Live batches: converted by every stage, pulled or pushed."""

from collections.abc import Sequence

from apis.live_batch import LiveBatch, Receiver, convert_batch


class _Source:
    """Offers to push, and remembers who asked for it."""

    def __init__(self) -> None:
        self.receivers: list[Receiver[int]] = []

    def batch(self, *numbers: int) -> LiveBatch[int]:
        return LiveBatch(numbers, self.receivers.append)


def _texts(numbers: Sequence[int]) -> list[str]:
    return [str(number) for number in numbers if number]


def test_each_stage_converts_the_batch_and_the_pushed_ones() -> None:
    source, received = _Source(), list[Sequence[str]]()

    def receive(batch: Sequence[str]) -> bool:
        received.append(batch)
        return len(received) < 2

    batch = convert_batch(convert_batch(source.batch(1, 2), lambda numbers: [10 * n for n in numbers]), _texts)
    assert batch == ["10", "20"]
    assert isinstance(batch, LiveBatch)
    batch.push_to(receive)
    (push,) = source.receivers
    assert push([3])
    assert not push([4, 5])
    assert received == [["30"], ["40", "50"]]


def test_a_pushed_batch_that_becomes_empty_does_not_reach_the_receiver() -> None:
    source = _Source()
    batch = convert_batch(source.batch(1), _texts)
    assert isinstance(batch, LiveBatch)
    batch.push_to(lambda _: False)
    assert source.receivers[0]([0])


def test_a_plain_batch_stays_plain() -> None:
    assert type(convert_batch([1, 0], _texts)) is list
