"""Answers whose deltas are written into a sink as they arrive: all of them, in order, and every end is seen."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.deltas import Delta, Finish, TextDelta
from apis.errors import StackError, UpstreamError, UpstreamTimeout
from apis.sink import LastBatch, ReceivingSink, Sink
from tests.providers.inference.remote import chat_request, sent, started
from tests.support.servers.upstream_server import (
    CUT,
    DONE,
    HANG,
    RESET,
    Act,
    UpstreamServer,
    Wait,
    delta_chunk,
    event,
    head,
    http_chunk,
    text_chunks,
)

WORDS = [f"w{number} " for number in range(40)]


class Consumer(Sink[Delta]):
    """Keeps what is written and put. `is_ready` says after how many written batches to pause."""

    def __init__(self, is_ready: Callable[[int], bool] = lambda _: True) -> None:
        self.deltas: list[Delta] = []
        self.written_count = self.put_count = self.pause_count = 0
        self._is_ready = is_ready

    def write(self, batch: Sequence[Delta]) -> bool:
        self.written_count += 1
        self.deltas += batch
        return self._is_ready(self.written_count)

    async def ready(self) -> None:
        self.pause_count += 1
        await asyncio.sleep(0)

    async def put(self, batch: Sequence[Delta]) -> None:
        self.put_count += 1
        self.deltas += batch

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))


def paced(*texts: str, ending: Sequence[Act] = ()) -> tuple[list[Act], list[asyncio.Event]]:
    """An answer whose words each wait for an event, and these events."""
    events = [asyncio.Event() for _ in texts]
    acts: list[Act] = sent(delta_chunk(role="assistant", content=""))
    for ready, text in zip(events, texts, strict=True):
        acts += [Wait(ready), http_chunk(event(delta_chunk(content=text)))]
    if not ending:
        ending = [http_chunk(event(delta_chunk("stop", content=""))), http_chunk(DONE), b"0\r\n\r\n"]
    return [*acts, *ending], events


async def play(events: Sequence[asyncio.Event], consumer: Consumer, reading: asyncio.Task[None]) -> None:
    """Send one word after another, each when the one before it has arrived, until the reading ends."""
    for number, ready in enumerate(events):
        ready.set()
        async with asyncio.timeout(5):
            while len(consumer.deltas) <= number and not reading.done():  # noqa: ASYNC110  # an arrival sets no event
                await asyncio.sleep(0)


async def consume(
    consumer: Consumer, words: Sequence[str], ending: Sequence[Act] = (), **fields: Any
) -> BaseException | None:
    answer, events = paced(*words, ending=ending)
    async with UpstreamServer(answer) as upstream, started(upstream.base_url, max_retries=0, **fields) as vllm:
        reading = asyncio.create_task(vllm.stream(chat_request(), consumer))
        await play(events, consumer, reading)
        async with asyncio.timeout(5):
            await asyncio.wait({reading})
        return reading.exception()


async def test_words_are_written_and_the_end_is_put() -> None:
    consumer = Consumer()
    assert await consume(consumer, WORDS) is None
    assert consumer.text == "".join(WORDS)
    assert isinstance(consumer.deltas[-1], Finish)
    assert consumer.written_count >= len(WORDS) - 1  # the last one may arrive together with the end
    assert consumer.put_count == 1


async def test_a_sink_that_is_not_ready_is_waited_for() -> None:
    consumer = Consumer(lambda count: count % 3 != 0)
    assert await consume(consumer, WORDS) is None
    assert consumer.text == "".join(WORDS)
    assert consumer.pause_count == consumer.written_count // 3


class Waiting(Consumer):
    """Is never ready again, and sets an event as soon as it is waited for."""

    def __init__(self) -> None:
        super().__init__(lambda _: False)
        self.is_waited_for = asyncio.Event()

    async def ready(self) -> None:
        self.is_waited_for.set()
        await asyncio.Event().wait()


async def test_while_the_sink_is_waited_for_the_upstream_is_not_read() -> None:
    chunk = http_chunk(event(delta_chunk(content="x" * 60_000)))
    answer: list[Act] = [*sent(delta_chunk(content="a")), *[chunk] * 400, HANG]
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        consumer = Waiting()
        reading = asyncio.create_task(vllm.stream(chat_request(), consumer))
        await asyncio.wait_for(consumer.is_waited_for.wait(), 5)
        await asyncio.sleep(0.1)
        assert consumer.written_count == 1
        assert len(consumer.text) < 1024 * 1024
        reading.cancel()
        await asyncio.wait({reading})


async def test_a_sink_that_makes_the_stream_wait_costs_the_upstream_no_time() -> None:
    """The gap of a server is counted from when it is read again."""

    class Slow(Consumer):
        async def ready(self) -> None:
            await asyncio.sleep(0.3)

    consumer = Slow(lambda count: count != 1)
    assert await consume(consumer, WORDS[:3], token_gap_timeout_s=0.2) is None
    assert consumer.text == "".join(WORDS[:3])


async def test_an_exception_of_the_receiver_ends_the_chat_and_its_connection() -> None:
    answer, events = paced("a", "b", "c", ending=[HANG])
    async with UpstreamServer(answer) as upstream, started(upstream.base_url, max_retries=0) as vllm:

        def receive(batch: Sequence[Delta]) -> Sequence[Delta]:
            if len(consumer.deltas) == 1:
                raise LookupError("a bug of the receiver")
            return batch

        consumer = Consumer()
        reading = asyncio.create_task(vllm.stream(chat_request(), ReceivingSink(consumer, receive)))
        await play(events[:1], consumer, reading)
        events[1].set()
        with pytest.raises(LookupError):
            await asyncio.wait_for(reading, 5)
        events[2].set()
        await asyncio.wait_for(upstream.left.wait(), 5)


@pytest.mark.parametrize("ending", [[HANG], []], ids=["written", "put"])
async def test_an_error_of_the_consumer_is_no_failure_of_the_server(ending: list[Act]) -> None:
    """Written or put, it opens no breaker, although it is of the kind that a server's failure is."""

    def refuse(batch: Sequence[Delta]) -> Sequence[Delta]:
        if ending or isinstance(batch[-1], Finish):
            raise UpstreamError("The deltas make no sense.")
        return batch

    answer, events = paced("a", "b", ending=ending)
    for each in events:
        each.set()
    fields = {"max_retries": 0, "breaker_failures": 1}
    async with UpstreamServer(answer) as upstream, started(upstream.base_url, **fields) as vllm:
        with pytest.raises(UpstreamError, match="make no sense"):
            await vllm.stream(chat_request(), ReceivingSink(LastBatch[Delta](), refuse))
        assert not vllm.upstreams()[0].is_blocked


async def test_a_cancelled_consumer_gets_no_more() -> None:
    consumer = Consumer()
    answer, events = paced("a", "b", "c", ending=[HANG])
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        reading = asyncio.create_task(vllm.stream(chat_request(), consumer))
        await play(events[:2], consumer, reading)
        reading.cancel()
        events[2].set()  # may arrive before the cancelled task has run
        await asyncio.wait({reading}, timeout=5)
        assert reading.cancelled()
        await asyncio.wait_for(upstream.left.wait(), 5)
        assert consumer.text in ("ab", "abc")


@pytest.mark.parametrize("ending", [[CUT], [RESET], [b"broken"], [http_chunk(b"data: {\n\n")]], ids=str)
async def test_an_upstream_that_breaks_off_between_words_fails_the_chat(ending: list[Act]) -> None:
    consumer = Consumer()
    assert isinstance(await consume(consumer, WORDS[:5], [*ending, HANG]), UpstreamError)
    assert consumer.text == "".join(WORDS[:5])


async def test_an_upstream_that_falls_silent_between_words_meets_the_token_gap() -> None:
    consumer = Consumer()
    error = await consume(consumer, WORDS[:3], [HANG], token_gap_timeout_s=0.2)
    assert isinstance(error, UpstreamTimeout)
    assert "token_gap_timeout_s" in error.message


async def test_keep_alive_comments_between_words_are_no_tokens() -> None:
    comments: list[Act] = [http_chunk(b": still here\n\n")] * 20
    error = await consume(Consumer(), WORDS[:3], [*comments, HANG], token_gap_timeout_s=0.2)
    assert isinstance(error, UpstreamTimeout)


async def test_answers_have_bounds() -> None:
    consumer = Consumer()
    error = await consume(consumer, ["x" * 500] * 3, [HANG], max_answer_bytes=1024)
    assert isinstance(error, UpstreamError)
    assert "max_answer_bytes" in error.message
    assert len(consumer.text) == 1000


@given(st.data())
@settings(max_examples=25)
def test_however_the_bytes_are_cut_and_whenever_the_sink_pauses_the_deltas_are_the_same(
    data: st.DataObject,
) -> None:
    body = b"".join(event(chunk) for chunk in text_chunks("héllo ", "wörld ", "☃ ", "end")) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(1, len(body) - 1), max_size=12, unique=True)))
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    pauses = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))

    async def run() -> Consumer:
        acts: list[Act] = [head()]
        for piece in pieces:
            acts += [http_chunk(piece)]
        consumer = Consumer(lambda count: pauses[count % len(pauses)])
        async with UpstreamServer([*acts, b"0\r\n\r\n"]) as upstream, started(upstream.base_url) as vllm:
            try:
                await vllm.stream(chat_request(), consumer)
            except StackError as exc:  # pragma: no cover
                raise AssertionError(exc.message) from exc
        return consumer

    consumer = asyncio.run(run())
    assert consumer.text == "héllo wörld ☃ end"
    assert sum(isinstance(delta, Finish) for delta in consumer.deltas) == 1
