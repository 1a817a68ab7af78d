"""Where a chat may be cut, and that what has begun is not begun again."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, TextDelta
from apis.errors import ContextLengthExceeded
from providers.inference.scripted import Scripted
from providers.responses.context.truncation import TruncatingInference, drop_messages_before, find_turn_offsets

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
