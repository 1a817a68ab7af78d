"""Summaries of reasoning: given where a request asks for them, streamed in OpenAI's events, and stored."""

from typing import Any

import pytest

from tests.support.sdk.conversations import conversations
from tests.support.sdk.requests import chat_requests, create, messages, responses, stream
from tests.support.servers.serving import Served, scripted, serving

THOUGHT = "The user wants a greeting. So: greet."
TURN: list[Any] = [{"reasoning": ["The user wants a greeting. ", "So: greet."]}, {"text": "Hello!"}]
ASKED: Any = {"reasoning": {"summary": "auto"}}
SUMMARY_EVENTS = [
    "reasoning_summary_part.added",
    "reasoning_summary_text.delta",
    "reasoning_summary_text.done",
    "reasoning_summary_part.done",
]


def short(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def two_models(*summaries: Any) -> Any:
    providers = {"main": scripted(TURN, model="main"), "small": scripted(*summaries, model="small")}
    return {"provider": "router", "providers": providers}


def small_requests(served: Served) -> Any:
    inference: Any = served.stack.inference
    return [*inference._providers["small"].requests]  # pyright: ignore[reportPrivateUsage]  # to see what it was sent


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
async def test_the_reasoning_itself_is_the_summary_that_a_request_asks_for(field: str) -> None:
    """The SDK's events in their order, after the text of the reasoning and before its item is done."""
    async with serving(scripted(TURN)) as served:
        events = await stream(served, reasoning={field: "auto"})
        stored = await responses(served).retrieve(events[-1].response.id)
    begin = short(events).index("reasoning_summary_part.added")
    assert short(events)[begin - 1 : begin + 5] == ["content_part.done", *SUMMARY_EVENTS, "output_item.done"]
    added, delta, text_done, part_done, item_done = events[begin : begin + 5]
    assert (added.summary_index, added.part.text, added.output_index) == (0, "", 0)
    assert (delta.delta, text_done.text, part_done.part.text) == (THOUGHT, THOUGHT, THOUGHT)
    assert [(part.type, part.text) for part in item_done.item.summary] == [("summary_text", THOUGHT)]
    assert item_done.item.content[0].text == THOUGHT
    assert stored.output[0].summary == item_done.item.summary == events[-1].response.output[0].summary


async def test_a_response_has_no_summary_unless_it_is_asked_for() -> None:
    async with serving(scripted(TURN)) as served:
        events = await stream(served, reasoning={"effort": "low"})
    assert not [name for name in short(events) if "summary" in name]
    assert events[-1].response.output[0].summary == []


async def test_a_whole_response_has_the_summary_and_the_next_turn_reads_the_reasoning_once() -> None:
    """The summary is for people; the model reads its own reasoning."""
    async with serving(scripted(TURN, [{"text": "Again."}])) as served:
        first = await create(served, **ASKED)
        await create(served, input="more", previous_response_id=first.id)
        sent_messages = messages(served)
    assert first.output[0].summary[0].text == THOUGHT
    assert sent_messages[1]["reasoning"] == THOUGHT


async def test_a_background_response_and_a_conversation_store_the_summary() -> None:
    """Stored items carry it."""
    async with serving(scripted(TURN)) as served:
        conversation = await conversations(served).create()
        queued = await create(served, background=True, conversation=conversation.id, **ASKED)
        async for _ in await responses(served).retrieve(queued.id, stream=True):
            pass
        ended = await responses(served).retrieve(queued.id)
        listed = await conversations(served).items.list(conversation.id, order="asc")
    assert ended.output[0].summary[0].text == THOUGHT
    assert [item.summary[0].text for item in listed.data if item.type == "reasoning"] == [THOUGHT]


async def test_a_model_that_the_config_names_writes_the_summary() -> None:
    """Streamed as it is written, and of the length that the request asks for."""
    written = [{"reasoning": "shorter..."}, {"text": ["I chose ", "to greet."]}]
    async with serving(two_models(written), responses={"summary_model": "small"}) as served:
        events = await stream(served, model="main", reasoning={"summary": "concise"})
        (request,) = small_requests(served)
    item = events[-1].response.output[0]
    assert [event.delta for event in events if "summary_text.delta" in event.type] == ["I chose ", "to greet."]
    assert (item.summary[0].text, item.content[0].text) == ("I chose to greet.", THOUGHT)
    assert THOUGHT in request.messages[0].content
    assert "one or two sentences" in request.messages[0].content
    assert events[-1].response.output_text == "Hello!"


@pytest.mark.parametrize("failing", [[{"fail": "gone"}], [{"reasoning": "hm"}]], ids=["fails", "writes nothing"])
async def test_a_summary_that_cannot_be_written_is_the_reasoning_and_the_answer_is_unharmed(failing: Any) -> None:
    """The answer never depends on the summarizing model."""
    async with serving(two_models(failing), responses={"summary_model": "small"}) as served:
        response = await create(served, model="main", **ASKED)
    assert (response.status, response.output_text) == ("completed", "Hello!")
    assert response.output[0].summary[0].text == THOUGHT


async def test_each_reasoning_of_a_response_has_its_own_summary() -> None:
    """Also one that ends with a call, and one that the token limit cuts off."""
    call = {"call": "get", "arguments": "{}"}
    async with serving(scripted([{"reasoning": "first"}, call], [{"reasoning": ["x"] * 40}])) as served:
        first = await create(served, **ASKED)
        second = await create(served, max_output_tokens=16, **ASKED)
        assert len(chat_requests(served)) == 2
    assert first.output[0].summary[0].text == "first"
    assert (second.status, second.output[-1].summary[0].text) == ("incomplete", "x" * 16)
