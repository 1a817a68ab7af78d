"""Input that is longer than the model's context: refused, or shortened by whole turns where the request says so."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import BadRequestError

from tests.providers.inference.remote import LIMITS
from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import create, responses, stream
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    Answer,
    Received,
    UpstreamServer,
    error_answer,
    json_answer,
    text_chunks,
)
from tests.support.servers.upstream_server import stream as whole

Json = dict[str, Any]
CONTEXT = 40
TOO_LONG = "This model's maximum context length is 40 tokens."
WORDS = " ".join(["word"] * 10)


def talk(turns: int) -> list[Json]:
    """Turns of about twenty words, each with a call, and a question."""
    items: list[Json] = [{"role": "developer", "content": "Be brief."}]
    for number in range(turns):
        items += [
            {"role": "user", "content": f"question {number} {WORDS}"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"thought {number}"}]},
            {"type": "function_call", "call_id": f"c{number}", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"output {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    return [*items, {"role": "user", "content": "the last question"}]


def length(messages: list[Json]) -> int:
    return sum(len(str(message.get("content") or "").split()) for message in messages)


class Narrow:
    """An upstream whose context holds 40 words, and what it was asked. It may not say so, and may not count."""

    def __init__(self, upstream: UpstreamServer, *, says: bool) -> None:
        self.upstream = upstream
        self.more = 0
        """How much more it holds than it says."""
        model: Json = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}
        if says:
            model["max_model_len"] = CONTEXT
        upstream.routes["/v1/models"] = json_answer({"object": "list", "data": [model]})
        upstream.routes["/v1/chat/completions"] = self._answer
        upstream.routes["/tokenize"] = self._count

    def _answer(self, received: Received) -> Answer:
        room = received.json.get("max_completion_tokens") or 0
        if length(received.json["messages"]) + room > CONTEXT + self.more:
            return error_answer(400, TOO_LONG)
        return whole(text_chunks("Yes."))

    def _count(self, received: Received) -> Answer:
        count = length(received.json["messages"])
        return json_answer({"count": count, "max_model_len": CONTEXT, "tokens": [1] * count})

    def list_chats(self) -> list[list[Json]]:
        """The messages of all chats so far."""
        return [received.json["messages"] for received in self.upstream.chats]


@asynccontextmanager
async def narrow(*, says: bool = True) -> AsyncGenerator[tuple[Served, Narrow]]:
    async with UpstreamServer(models=["m"]) as upstream:
        there = Narrow(upstream, says=says)
        section = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS}
        async with serving(section) as served:
            yield served, there


def brief(messages: list[Json]) -> list[str]:
    """Who said what, in two words."""
    return [" ".join(str(each.get("content") or each["role"]).split()[:2]) for each in messages]


@pytest.mark.parametrize("says", [True, False], ids=["context known", "context not known"])
async def test_the_oldest_turns_are_left_out_whole(says: bool) -> None:
    async with narrow(says=says) as (served, there):
        fields: Json = {"model": "m", "input": talk(10), "tools": [function()], "truncation": "auto"}
        events = await stream(served, **fields)
        chats = there.list_chats()
    final = events[-1].response
    assert final.status == "completed"
    assert final.truncation == "auto"
    sent_texts = brief(chats[-1])
    assert sent_texts[0] == "Be brief."
    assert sent_texts[-1] == "the last"
    assert sent_texts[1].startswith("question")
    calls = {call["id"] for each in chats[-1] for call in each.get("tool_calls") or ()}
    assert calls == {each["tool_call_id"] for each in chats[-1] if each["role"] == "tool"}
    if says:  # one was refused, and its error gave the count
        assert len(chats) == 2
        assert sent_texts == ["Be brief.", "question 9", "assistant", "output 9", "answer 9", "the last"]
        assert chats[-1][2]["reasoning"] == "thought 9"
    else:
        assert len(chats) == 5


async def test_what_fits_is_asked_once_and_nothing_is_counted() -> None:
    async with narrow() as (served, there):
        del there.upstream.routes["/tokenize"]
        response = await create(served, model="m", input=talk(1), tools=[function()], truncation="auto")
        assert len(there.list_chats()) == 1
    assert response.truncation == "auto"


@pytest.mark.parametrize("truncation", ["disabled", None])
async def test_without_truncation_what_is_too_long_is_refused(truncation: str | None) -> None:
    async with narrow() as (served, there):
        with pytest.raises(BadRequestError) as caught:
            await create(served, model="m", input=talk(10), tools=[function()], truncation=truncation)
        assert len(there.list_chats()) == 1
    assert caught.value.code == "context_length_exceeded"


async def test_the_last_turn_is_never_left_out() -> None:
    async with narrow() as (served, _):
        long = [*talk(2), {"role": "user", "content": WORDS * 5}]
        with pytest.raises(BadRequestError) as caught:
            await create(served, model="m", input=long, tools=[function()], truncation="auto")
    assert caught.value.code == "context_length_exceeded"


async def test_what_was_left_out_is_kept_all_the_same() -> None:
    async with narrow() as (served, there):
        first = await create(served, model="m", input=talk(10), tools=[function()], truncation="auto")
        second = await create(
            served, model="m", input="And?", previous_response_id=first.id, tools=[function()], truncation="auto"
        )
        listed = await responses(served).input_items.list(first.id, limit=100)
        sent_texts = brief(there.list_chats()[-1])
    assert second.output_text == "Yes."
    assert len(listed.data) == len(talk(10))
    assert sent_texts[-3:] == ["the last", "Yes.", "And?"]


async def test_the_models_context_says_when_to_compact_and_how_long_a_summary_may_be() -> None:
    async with narrow() as (served, there):
        there.more = 1000  # for the prompt, which is longer than so small a context
        managed = [{"type": "compaction"}]
        response = await create(served, model="m", input=talk(2), tools=[function()], context_management=managed)
        bounded, unbounded, answer = (received.json for received in there.upstream.chats)
    assert [item.type for item in response.output] == ["compaction", "message"]
    # more than the context holds is refused, and then the context is the bound
    assert bounded["max_completion_tokens"] > 0
    assert "max_completion_tokens" not in unbounded
    assert unbounded["messages"] == bounded["messages"]
    assert "tools" not in unbounded
    assert brief(answer["messages"]) == ["Be brief.", "The conversation", "the last"]
