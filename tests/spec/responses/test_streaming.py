"""Streams as an OpenAI client sees them."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.support.sdk.answer_shapes import SHAPES, Script, call
from tests.support.sdk.requests import bare, called, create, responses, stream
from tests.support.servers.serving import scripted, serving


async def types_of(*script: dict[str, Any]) -> list[str]:
    """The names of a scripted answer's events, between its beginning and its end."""
    async with serving(scripted([*script])) as served:
        types = [event.type.removeprefix("response.") for event in await stream(served)]
    assert types[:2] == ["created", "in_progress"]
    assert types[-1] == "completed"
    return types[2:-1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_what_the_sdk_accumulates_equals_the_terminal_event_and_what_is_stored(shape: Script) -> None:
    async with serving(scripted(shape)) as served:
        async with responses(served).stream(model="scripted", input="hi", **called(served)) as events:
            last = [event async for event in events][-1]
            final = await events.get_final_response()
        assert last.type == "response.completed"
        stored = await responses(served).retrieve(final.id)
        assert bare(stored) == bare(final) == bare(last.response)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_a_response_is_the_same_streamed_or_not(shape: Script) -> None:
    async with serving(scripted(shape)) as served:
        whole = await create(served)
        streamed = (await stream(served))[-1].response

    def nameless(response: Any) -> Any:
        fields = bare(response)
        for item in [fields, *fields["output"]]:
            del item["id"]
        return {**fields, "created_at": 0, "completed_at": 0}

    assert nameless(whole) == nameless(streamed)


async def test_a_message_is_streamed_from_added_to_done() -> None:
    assert await types_of({"text": ["Hel", "lo"]}) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


async def test_reasoning_has_a_content_part_around_its_text() -> None:
    assert await types_of({"reasoning": ["th", "ink"]}) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


async def test_a_refusal_is_a_part_of_its_own_kind() -> None:
    assert await types_of({"refusal": ["N", "o"]}) == [
        "output_item.added",
        "content_part.added",
        "refusal.delta",
        "refusal.delta",
        "refusal.done",
        "content_part.done",
        "output_item.done",
    ]


async def test_arguments_of_a_call_are_streamed_as_they_are_written() -> None:
    assert await types_of(call("get", '{"a"', ": 1}")) == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


async def test_the_input_of_a_custom_call_is_streamed_as_it_is_written() -> None:
    assert await types_of(call("patch", "***", " End", custom=True)) == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]


async def test_a_model_that_says_nothing_completes_with_no_output() -> None:
    assert await types_of() == []


async def test_each_piece_of_the_model_is_a_delta_of_its_own() -> None:
    async with serving(scripted([{"text": ["a", "b", "", "c"]}])) as served:
        events = await stream(served)
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["a", "b", "", "c"]


async def test_a_change_of_phase_begins_a_new_message() -> None:
    async with serving(scripted(SHAPES["a preamble and an answer"])) as served:
        output = (await stream(served))[-1].response.output
    assert [(item.type, item.phase, item.content[0].text) for item in output] == [
        ("message", "commentary", "Let me see."),
        ("message", "final_answer", "It is."),
    ]


async def test_text_and_refusal_are_two_parts_of_one_message() -> None:
    async with serving(scripted(SHAPES["text, then a refusal in the same message"])) as served:
        (message,) = (await stream(served))[-1].response.output
    assert [part.type for part in message.content] == ["output_text", "refusal"]


async def test_deltas_of_parallel_calls_name_their_own_items_one_after_another() -> None:
    """LangChain adds each delta to the newest call, and an engine may write several in turns."""
    async with serving(scripted(SHAPES["calls in parallel"])) as served:
        events = await stream(served)
    texts: dict[str, str] = {}
    order: list[int] = []
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            order.append(event.output_index)
    assert [*texts.values()] == ['{"a":1}', '{"b":2}', '{"c":3}']
    assert order == sorted(order)
    assert {*order} == {0, 1, 2}
    assert texts == {item.id: item.arguments for item in events[-1].response.output}


async def test_every_kind_of_item_has_the_prefix_clients_know() -> None:
    shape = [{"reasoning": "hm"}, {"text": "a"}, call(), call("patch", "x", custom=True)]
    async with serving(scripted(shape)) as served:
        response = (await stream(served))[-1].response
    assert response.id.startswith("resp_")
    assert [item.id.partition("_")[0] for item in response.output] == ["rs", "msg", "fc", "ctc"]


async def test_ids_never_repeat() -> None:
    async with serving(scripted(SHAPES["reasoning between calls"])) as served:
        responses = [(await stream(served))[-1].response for _ in range(5)]
    ids = Counter(each.id for response in responses for each in (response, *response.output))
    assert set(ids.values()) == {1}


async def test_the_first_event_has_the_whole_response_without_output() -> None:
    async with serving() as served:
        events = await stream(served, instructions="Be brief.", metadata={"a": "b"})
    for event in events[:2]:
        assert event.response.status == "in_progress"
        assert event.response.output == []
        assert event.response.usage is None
        assert event.response.completed_at is None
        assert event.response.instructions == "Be brief."
        assert event.response.metadata == {"a": "b"}
        assert event.response.created_at == events[-1].response.created_at


async def test_the_stream_helper_gives_texts_with_snapshots() -> None:
    script = scripted([{"text": ["a", "b", "c"]}])
    async with serving(script) as served, responses(served).stream(model="scripted", input="hi") as events:
        snapshots = [event.snapshot async for event in events if event.type == "response.output_text.delta"]
    assert snapshots == ["a", "ab", "abc"]


async def test_many_streams_at_once_do_not_mix() -> None:
    async with serving() as served:
        texts = [f"number {number}" + " of many" * 20 for number in range(20)]
        streams = await asyncio.gather(*(stream(served, input=text) for text in texts))
    assert [events[-1].response.output_text for events in streams] == texts


async def test_times_are_whole_seconds() -> None:
    async with serving() as served:
        raw = await responses(served).with_raw_response.create(model="scripted", input="hi")
        assert raw.http_response.json()["created_at"] == int(raw.http_response.json()["created_at"])
        assert '"created_at":1' in raw.http_response.text
        assert ".0," not in raw.http_response.text.partition('"created_at":')[2][:14]
