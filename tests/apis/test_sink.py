"""Stream: batches are pulled or pushed in their order, and a reader that leaves ends what makes them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

import pytest

from apis.errors import Overloaded
from apis.sink import ConvertedSink, LastBatch, ReceivingSink, Sink, Stream, put_all

Produce = Callable[[Sink[int]], Awaitable[None]]


async def test_batches_come_in_order_then_the_end() -> None:
    async def produce(sink: Sink[int]) -> None:
        await sink.put([1])
        sink.write([2])
        await asyncio.sleep(0)
        await sink.put([3])

    async with aclosing(Stream(produce)) as stream:
        assert [[*batch] async for batch in stream] == [[1], [2], [3]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_error_comes_after_the_batches_before_it_and_once() -> None:
    async def produce(sink: Sink[int]) -> None:
        await sink.put([1])
        raise Overloaded("the end")

    async with aclosing(Stream(produce)) as stream:
        assert await anext(stream) == [1]
        with pytest.raises(Overloaded):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_what_is_put_waits_for_a_slow_reader_and_what_is_written_says_so() -> None:
    put, answers = list[int](), list[bool]()

    async def produce(sink: Sink[int]) -> None:
        answers.extend(sink.write([0]) for _ in range(9))
        for number in range(100):
            put.append(number)
            await sink.put([number])

    async with aclosing(Stream(produce)) as stream:
        await anext(stream)
        await asyncio.sleep(0.01)
        assert answers == [True] * 7 + [False] * 2
        assert put == [0]
        assert sum([1 async for _ in stream]) == 8 + 100


async def test_written_batches_are_pushed_while_the_reader_waits() -> None:
    pushed: list[int] = []
    can_go_on = asyncio.Event()

    def receive(batch: list[int]) -> bool:
        pushed.extend(batch)
        return len(pushed) < 2

    async def produce(sink: Sink[int]) -> None:
        await sink.put([0])
        await can_go_on.wait()
        for number in (1, 2, 3):
            sink.write([number])
        await sink.put([4])

    async with aclosing(Stream(produce)) as stream:
        assert await anext(stream) == [0]
        stream.push_to(receive)  # pyright: ignore[reportArgumentType] - these batches are lists
        asyncio.get_running_loop().call_later(0.01, can_go_on.set)
        assert await anext(stream) == [3]  # after the second one the receiver was not ready
        assert pushed == [1, 2]
        assert await anext(stream) == [4]  # what is put is never pushed


async def test_nothing_is_pushed_past_a_reader_that_is_at_work() -> None:
    pushed: list[object] = []
    async with aclosing(Stream(_write_later)) as stream:
        await anext(stream)
        stream.push_to(lambda batch: not pushed.append(batch))
        await asyncio.sleep(0.02)  # the reader has not asked for more
        assert pushed == []
        assert await anext(stream) == [1]


async def _write_later(sink: Sink[int]) -> None:
    await sink.put([0])
    await asyncio.sleep(0.01)
    sink.write([1])


@pytest.mark.parametrize("closes", [True, False])
async def test_a_reader_that_leaves_ends_the_work_first(closes: bool) -> None:
    ended: list[str] = []

    async def produce(sink: Sink[int]) -> None:
        try:
            await sink.put([1])
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # also where the end takes a while
            ended.append("work")
            raise

    async def read() -> None:
        async with aclosing(Stream(produce)) as stream:
            async for _ in stream:
                if closes:
                    break
        ended.append("reader")

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.005)
    if not closes:
        reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert ended == (["work", "reader"] if closes else ["work"])


async def test_work_that_ends_in_its_own_way_is_read_although_the_reader_is_cancelled() -> None:
    """The end of a process: the last event says so, and then the error."""

    async def produce(sink: Sink[int]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            for _ in range(20):
                await sink.put([9])
            raise Overloaded("the end") from None

    batches_read: list[int] = []

    async def read() -> None:
        async with aclosing(Stream(produce)) as stream:
            async for batch in stream:
                batches_read.extend(batch)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.005)
    reading.cancel()
    with pytest.raises(Overloaded):
        await reading
    assert batches_read == [9] * 20


async def test_a_stream_that_is_not_read_begins_nothing() -> None:
    begun: list[int] = []

    async def produce(_: Sink[int]) -> None:
        begun.append(1)

    stream = Stream(produce)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert begun == []


async def test_only_the_last_batch_is_kept() -> None:
    sink = LastBatch[int]()
    assert sink.write([1])
    await sink.put([2, 3])
    assert sink.batch == [2, 3]


class Received(Sink[int]):
    """Keeps what is written, put and waited for, in order; it is never ready at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def write(self, batch: Sequence[int]) -> bool:
        self.calls.append(("write", [*batch]))
        return False

    async def ready(self) -> None:
        self.calls.append(("ready", []))

    async def put(self, batch: Sequence[int]) -> None:
        self.calls.append(("put", [*batch]))


def double(batch: Sequence[int]) -> list[int]:
    return [2 * number for number in batch if number]


async def test_a_converted_sink_passes_on_all_but_empty_batches() -> None:
    received = Received()
    sink = ConvertedSink(ConvertedSink(received, double), double)
    assert not sink.write([1, 0])
    assert sink.write([0])
    await sink.ready()
    await sink.put([3])
    await sink.put([0])
    assert received.calls == [("write", [4]), ("ready", []), ("put", [12])]


@pytest.mark.parametrize("call", ["write", "put"])
async def test_an_error_of_the_receiver_is_marked(call: str) -> None:
    def refuse(_: Sequence[int]) -> list[int]:
        raise Overloaded("of the receiver")

    sink = ReceivingSink(Received(), refuse)
    with pytest.raises(Overloaded) as refused:
        await sink.put([1]) if call == "put" else sink.write([1])
    assert refused.value.is_of_receiver


async def test_put_waits_by_default_where_the_sink_is_not_ready() -> None:
    class Simple(Received):
        put = Sink[int].put

    received = Simple()
    await put_all(batches(), received)
    assert received.calls == [("write", [1]), ("ready", []), ("write", [2]), ("ready", [])]


async def batches() -> AsyncGenerator[list[int]]:
    yield [1]
    yield [2]
