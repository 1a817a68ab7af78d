"""The beginning of a stream: its first events are built once, while the model is waited for."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent, ResponseTextDeltaEvent

from apis.errors import Overloaded
from apis.events import EventBatch
from apis.inference import CALL_ATTEMPTS, CallAttempts
from apis.shared_timeout import SharedTimeout
from apis.sink import Sink, Stream
from providers.responses.context.item_views import ItemView
from providers.responses.run import live_events
from providers.responses.run.live_events import LiveEvents

LONG_S = 600.0


def delta_event(text: str) -> ResponseTextDeltaEvent:
    return ResponseTextDeltaEvent.model_construct(type="response.output_text.delta", delta=text, sequence_number=0)


class Model:
    """Answers with one batch, or refuses, once it is `ready`; `built` counts the calls that built the first events."""

    attempts: CallAttempts

    def __init__(
        self,
        refusal: Overloaded | None = None,
        wait_s: float = LONG_S,
        *,
        is_streamed: bool = True,
        is_sent: bool = False,
    ) -> None:
        self.refusal = refusal
        self.is_sent = is_sent
        self.ready = asyncio.Event()
        self.built = 0
        self.wait_s = wait_s
        self.is_streamed = is_streamed

    async def respond(self, sink: Sink[ResponseStreamEvent]) -> None:
        live = LiveEvents(sink, ItemView(), is_streamed=self.is_streamed)
        live.open(self.build, SharedTimeout(self.wait_s), awaits_tool_lists=False)
        if (attempts := CALL_ATTEMPTS.get()) is not None:
            self.attempts = attempts
            attempts.is_sent = self.is_sent
        try:
            await self.ready.wait()
            if self.refusal is not None:
                raise self.refusal
            await live.put([delta_event("delta")])
            await live.end([delta_event("end")])
        finally:
            live.close()

    def build(self) -> EventBatch:
        self.built += 1
        return [delta_event("created"), delta_event("in_progress")]


async def read(model: Model) -> list[list[str]]:
    async with aclosing(Stream(model.respond)) as batches:
        return [texts(batch) async for batch in batches]


def texts(batch: Sequence[Any]) -> list[str]:
    return [f"{event.sequence_number} {event.delta}" for event in batch]


async def test_the_first_events_are_built_while_the_model_is_waited_for() -> None:
    model = Model()
    reading = asyncio.create_task(read(model))
    for _ in range(6):
        await asyncio.sleep(0)
    assert model.built == 1
    model.ready.set()
    assert await reading == [["0 created", "1 in_progress", "2 delta"], ["3 end"]]
    assert model.built == 1


async def test_a_model_that_answers_at_once_has_them_built_once() -> None:
    model = Model()
    model.ready.set()
    assert (await read(model))[0] == ["0 created", "1 in_progress", "2 delta"]
    await asyncio.sleep(0.01)
    assert model.built == 1


async def test_they_come_alone_where_the_model_takes_longer() -> None:
    model = Model(wait_s=0.01)
    async with aclosing(Stream(model.respond)) as batches:
        assert texts(await anext(batches)) == ["0 created", "1 in_progress"]
        model.ready.set()
        assert texts(await anext(batches)) == ["2 delta"]
    assert model.built == 1


async def test_an_early_refusal_is_no_stream() -> None:
    model = Model(Overloaded("busy"))
    model.ready.set()
    with pytest.raises(Overloaded):
        await read(model)


async def test_only_the_end_is_shown_where_nothing_is_streamed() -> None:
    model = Model(is_streamed=False)
    model.ready.set()
    assert await read(model) == [["0 end"]]
    assert model.built == 0


@pytest.mark.parametrize("has_failed", [False, True])
async def test_the_first_events_wait_until_a_server_has_taken_the_call(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_events, "_HEAD_WAIT_S", 0.02 if has_failed else LONG_S)
    model = Model(wait_s=0.005, is_sent=True)
    async with aclosing(Stream(model.respond)) as batches:
        reading = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0.001)
        model.attempts.has_failed = has_failed
        await asyncio.sleep(0.06)
        assert not reading.done()
        model.attempts.accept()
        assert texts(await reading) == ["0 created", "1 in_progress"]


async def test_they_do_not_wait_for_ever_for_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "_HEAD_WAIT_S", 0.01)
    model = Model(wait_s=0.005, is_sent=True)
    async with aclosing(Stream(model.respond)) as batches:
        assert texts(await anext(batches)) == ["0 created", "1 in_progress"]
