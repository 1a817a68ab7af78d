"""Answers in a given form: JSON of a schema, or JSON at all."""

from typing import Any

import pytest
from openai import InternalServerError
from pydantic import BaseModel

from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import asked, create, messages, refusal, responses, stream
from tests.support.servers.serving import scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, text_chunks
from tests.support.servers.upstream_server import stream as streamed

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
ROME: list[Any] = [{"text": ['{"city": "Rome", ', '"degrees": 21}']}]
WRONG: list[Any] = [{"text": '{"city": "Rome"}'}]


class Weather(BaseModel):
    city: str
    degrees: int


async def test_a_schema_reaches_the_model_and_is_echoed() -> None:
    async with serving(scripted(ROME)) as served:
        response = await create(served, text={"format": {**FORMAT, "description": "The weather."}})
        told = asked(served)[-1].response_format
    assert told is not None
    assert told.model_dump(by_alias=True) == {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "description": "The weather.", "strict": True},
    }
    assert response.text.format.model_dump(by_alias=True) == {**FORMAT, "description": "The weather."}


async def test_json_at_all_reaches_the_model_and_is_echoed() -> None:
    async with serving() as served:
        response = await create(served, text={"format": {"type": "json_object"}})
        told = asked(served)[-1].response_format
    assert told is not None
    assert told.model_dump() == {"type": "json_object"}
    assert response.text.format.type == "json_object"


async def test_plain_text_asks_for_no_format() -> None:
    async with serving() as served:
        await create(served, text={"format": {"type": "text"}})
        assert asked(served)[-1].response_format is None


async def test_a_schema_and_tools_go_together() -> None:
    async with serving(scripted(ROME)) as served:
        await create(served, text={"format": FORMAT}, tools=[function()])
        assert asked(served)[-1].response_format is not None
        assert asked(served)[-1].tools is not None


@pytest.mark.parametrize("phase", [None, "final_answer"])
async def test_the_sdk_parses_the_answer(phase: str | None) -> None:
    script = [{"text": ['{"city": "Rome", ', '"degrees": 21}'], "phase": phase}]
    async with serving(scripted(script)) as served:
        parsed = await responses(served).parse(model="scripted", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Rome", degrees=21)


async def test_the_sdk_parses_the_answer_behind_reasoning_and_a_preamble() -> None:
    script = [
        {"reasoning": "Rome?"},
        {"text": "Let me see.", "phase": "commentary"},
        {"text": '{"city": "Rome", "degrees": 21}', "phase": "final_answer"},
    ]
    async with serving(scripted(script)) as served:
        parsed = await responses(served).parse(model="scripted", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Rome", degrees=21)


async def test_the_sdk_parses_a_streamed_answer() -> None:
    script = scripted([{"text": ['{"city": "Rome", ', '"degrees": 21}']}])
    fields = {"model": "scripted", "input": "hi", "text_format": Weather}
    async with serving(script) as served, responses(served).stream(**fields) as events:
        final = await events.get_final_response()
    assert final.output_parsed == Weather(city="Rome", degrees=21)


async def test_a_follow_up_may_have_another_form() -> None:
    async with serving(scripted([{"text": '{"city": "Rome", "degrees": 21}'}], [{"text": "Warm."}])) as served:
        first = await create(served, text={"format": FORMAT})
        await create(served, input="In words?", previous_response_id=first.id)
        assert asked(served)[-1].response_format is None
        assert messages(served)[1]["content"] == '{"city": "Rome", "degrees": 21}'


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "schema": SCHEMA}, "text.format.name"),
        ({"type": "json_schema", "name": "weather"}, "text.format.schema"),
        ({**FORMAT, "name": "the weather"}, "text.format.name"),
        ({**FORMAT, "schema": "object"}, "text.format.schema"),
        ({"type": "yaml"}, "text.format.type"),
        ({}, "text.format.type"),
    ],
)
async def test_a_form_that_cannot_be_is_refused(form: dict[str, Any], param: str) -> None:
    async with serving() as served:
        assert (await refusal(served, text={"format": form}))["param"] == param


# --- engines that ignore the schema -----------------------------------------------------------------------------------


async def test_a_wrong_answer_is_written_once_more_where_the_engine_promises_nothing() -> None:
    """G12: the client sees the right answer alone; its usage counts both."""
    async with serving(scripted(WRONG, ROME)) as served:
        parsed = await responses(served).parse(model="scripted", input="hi", text_format=Weather)
        told = messages(served)
    assert parsed.output_parsed == Weather(city="Rome", degrees=21)
    assert [item.type for item in parsed.output] == ["message"]
    assert parsed.usage.output_tokens == 3
    assert told[1]["content"] == '{"city": "Rome"}'
    assert '"degrees" is a required property' in told[2]["content"]


@pytest.mark.parametrize("wrong", ['{"city": "Rome"}', "It is warm.", '{"city": 5, "degrees": 21}', ""])
async def test_an_answer_that_stays_wrong_fails_and_says_why(wrong: str) -> None:
    """G12: never a completed response without the form that was demanded."""
    async with serving(scripted([{"text": wrong}])) as served:
        with pytest.raises(InternalServerError) as caught:
            await create(served, text={"format": FORMAT})
        assert len(asked(served)) == 2
    assert caught.value.status_code == 502
    assert "not valid against the schema in text.format" in caught.value.message
    assert caught.value.param == "text.format"


async def test_a_streamed_answer_leaves_at_once_and_fails_at_its_end() -> None:
    """G12: text that was sent is not taken back."""
    async with serving(scripted(WRONG)) as served:
        events = await stream(served, text={"format": FORMAT})
        assert len(asked(served)) == 1
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ['{"city": "Rome"}']
    assert events[-1].type == "response.failed"
    assert "required property" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("turn", "fields"),
    [
        ([{"text": "It is warm."}], {"text": {"format": {**FORMAT, "strict": False}}}),
        ([{"refusal": "No."}], {"text": {"format": FORMAT}}),
        ([{"call": "get", "arguments": "{}"}], {"text": {"format": FORMAT}, "tools": [function()]}),
        ([{"text": ["{"] * 40}], {"text": {"format": FORMAT}, "max_output_tokens": 16}),
    ],
    ids=["not strict", "refusal", "call", "cut off"],
)
async def test_what_is_no_whole_strict_answer_is_not_checked(turn: Any, fields: Any) -> None:
    """G12: only a whole answer can be right or wrong."""
    async with serving(scripted(turn)) as served:
        response = await create(served, **fields)
        assert len(asked(served)) == 1
    assert response.status == ("incomplete" if "max_output_tokens" in fields else "completed")


@pytest.mark.parametrize("promises", [False, True])
async def test_an_upstream_is_believed_where_it_promises_to_hold_schemas(promises: bool) -> None:
    """G12: vLLM holds schemas; another server does where the config says so."""
    async with UpstreamServer(streamed(text_chunks("Warm.")), streamed(text_chunks(*ROME[0]["text"]))) as upstream:
        section = {"provider": "vllm", "base_url": upstream.base_url, "engine": "openai"}
        async with serving({**section, **({"enforces": ["json_schema"]} if promises else {})}) as served:
            response = await create(served, model="fake-model", text={"format": FORMAT})
    assert response.output_text == ("Warm." if promises else "".join(ROME[0]["text"]))
