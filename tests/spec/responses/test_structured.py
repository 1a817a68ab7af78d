"""Answers in a given form: JSON of a schema, or JSON at all."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import asked, create, messages, refusal, responses
from tests.support.servers.serving import scripted, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}


class Weather(BaseModel):
    city: str
    degrees: int


async def test_a_schema_reaches_the_model_and_is_echoed() -> None:
    async with serving() as served:
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
    async with serving() as served:
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
