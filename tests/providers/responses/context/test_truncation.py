"""Where a chat may be cut, and that what has begun is not begun again."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, TextDelta
from apis.errors import ContextLengthExceeded
from providers.inference.scripted import Scripted
from providers.responses.context.truncation import (
    TruncatingInference,
    count_call_images,
    drop_messages_before,
    find_turn_offsets,
)

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def chat(roles: str) -> ChatRequest:
    messages = [{"role": ROLES[role], "content": f"{role}{at}"} for at, role in enumerate(roles)]
    return ChatRequest.model_validate({"model": "scripted", "messages": messages})


@pytest.mark.parametrize(
    ("roles", "cuts"),
    [
        ("u", []),
        ("duu", []),
        ("duau", [3]),
        ("duatatau", [7]),
        ("auau", [1, 3]),
        ("suauuadu", [3, 7]),
    ],
)
def test_a_chat_is_cut_where_a_turn_begins(roles: str, cuts: list[int]) -> None:
    assert find_turn_offsets(chat(roles).messages) == cuts


def test_instructions_stay_wherever_they_are() -> None:
    assert [each.content for each in drop_messages_before(chat("suaduau"), 6).messages] == ["s0", "d3", "u6"]


class Breaking(Scripted):
    """Finds only in mid-answer that the chat is too long."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        self.requests.append(request)
        yield (TextDelta("a"),)
        raise ContextLengthExceeded("Too long.")


async def test_what_has_begun_is_not_begun_again() -> None:
    model = Breaking(Scripted.Config())
    async with aclosing(TruncatingInference(model).chat(chat("uau"))) as answer:
        assert await anext(answer) == (TextDelta("a"),)
        with pytest.raises(ContextLengthExceeded):
            await anext(answer)
    assert len(model.requests) == 1


async def test_a_chat_that_is_left_stops_its_generation() -> None:
    model = Scripted(Scripted.Config())
    async with aclosing(TruncatingInference(model).chat(chat("uau"))) as answer:
        await anext(answer)
    assert model.abandoned_chats == 1


class Narrow(Scripted):
    """Reads chats of a few images only."""

    room = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if count_call_images(request) > self.room:
            raise ContextLengthExceeded("Too long.")
        async with aclosing(super().chat(request)) as batches:
            async for batch in batches:
                yield batch


@pytest.mark.parametrize(("room", "images"), [(9, 5), (4, 2), (1, 1), (0, None)])
async def test_a_turn_that_is_too_long_loses_its_oldest_screenshots(room: int, images: int | None) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    steps: list[dict[str, Any]] = []
    for at in range(5):
        called = {"id": f"c{at}", "type": "function", "function": {"name": "computer", "arguments": "{}"}}
        output = [{"type": "text", "text": f"step {at}"}, image]
        steps += [{"role": "assistant", "tool_calls": [called]}]
        steps += [{"role": "tool", "tool_call_id": f"c{at}", "content": output}]
    request = ChatRequest.model_validate(
        {"model": "scripted", "messages": [{"role": "user", "content": [image]}, *steps]}
    )
    model = Narrow(Scripted.Config())
    model.room = room
    if images is None:
        with pytest.raises(ContextLengthExceeded):
            _ = [batch async for batch in TruncatingInference(model).chat(request)]
        return
    assert [batch async for batch in TruncatingInference(model).chat(request)]
    (last_request,) = model.requests
    assert count_call_images(last_request) == images
    contents = [message.content for message in last_request.messages if message.role == "tool"]
    assert [[part.type for part in content or () if not isinstance(part, str)] for content in contents] == [
        *[["text", "text"]] * (5 - images),
        *[["text", "image_url"]] * images,
    ]
    assert last_request.messages[0] == request.messages[0]
