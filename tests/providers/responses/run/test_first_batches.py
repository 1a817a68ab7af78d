"""The beginning of a stream: what comes first is built while the model is waited for, and once."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from apis.errors import Overloaded
from apis.events import EventBatch
from apis.shared_timeout import SharedTimeout
from providers.responses.run.first_batches import FirstBatches

LONG_S = 600.0


class Model:
    """Answers with one batch, or refuses, once it is `ready`; `built` counts the calls that built the first events."""

    def __init__(self, refusal: Overloaded | None = None) -> None:
        self.refusal = refusal
        self.ready = asyncio.Event()
        self.built = 0

    async def answer(self) -> AsyncGenerator[EventBatch]:
        await self.ready.wait()
        if self.refusal is not None:
            raise self.refusal
        yield cast("EventBatch", ["delta"])

    def build(self) -> EventBatch:
        self.built += 1
        return cast("EventBatch", ["created", "in_progress"])

    def first_batches(self, wait_s: float = LONG_S) -> FirstBatches:
        return FirstBatches(self.answer(), SharedTimeout(wait_s), self.build, awaits_tool_lists=False)


async def read(batches: FirstBatches) -> list[list[Any]]:
    async with batches as entered:
        return [list(batch) async for batch in entered]


async def test_the_first_events_are_built_while_the_model_is_waited_for() -> None:
    model = Model()
    reading = asyncio.create_task(read(model.first_batches()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert model.built == 1
    model.ready.set()
    assert await reading == [["created", "in_progress", "delta"]]
    assert model.built == 1


async def test_a_model_that_answers_at_once_has_them_built_once() -> None:
    model = Model()
    model.ready.set()
    assert await read(model.first_batches()) == [["created", "in_progress", "delta"]]
    await asyncio.sleep(0.01)
    assert model.built == 1


async def test_they_come_alone_where_the_model_takes_longer() -> None:
    model = Model()
    async with model.first_batches(wait_s=0.01) as batches:
        iterator = aiter(batches)
        assert await anext(iterator) == ["created", "in_progress"]
        model.ready.set()
        assert await anext(iterator) == ["delta"]
    assert model.built == 1


async def test_an_early_refusal_is_raised_on_entering() -> None:
    model = Model(Overloaded("busy"))
    model.ready.set()
    with pytest.raises(Overloaded):
        await read(model.first_batches())


async def test_a_reader_that_leaves_early_leaves_no_generator_open() -> None:
    """C12: iterating the batches opens no generator of their own that a reader would have to close."""
    model = Model()
    model.ready.set()
    left_open: list[Any] = []
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(hooks.firstiter, left_open.append)
    try:
        answer = model.answer()
        async with FirstBatches(answer, SharedTimeout(LONG_S), model.build, awaits_tool_lists=False) as batches:
            async for _ in batches:
                break
        await answer.aclose()
        del batches
    finally:
        sys.set_asyncgen_hooks(*hooks)
    assert not left_open
