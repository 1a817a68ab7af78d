"""Answers in a given form: JSON of a schema, or JSON at all."""

from typing import Any

import pytest
from openai import InternalServerError
from pydantic import BaseModel

from tests.support.sdk.answer_shapes import function
from tests.support.sdk.requests import chat_requests, create, messages, refusal, responses, stream
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
        sent_format = chat_requests(served)[-1].response_format
    assert sent_format is not None
    assert sent_format.model_dump(by_alias=True) == {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": SCHEMA, "description": "The weather.", "strict": True},
    }
    assert response.text.format.model_dump(by_alias=True) == {**FORMAT, "description": "The weather."}


async def test_json_at_all_reaches_the_model_and_is_echoed() -> None:
    async with serving() as served:
        response = await create(served, input="{}", text={"format": {"type": "json_object"}})
        sent_format = chat_requests(served)[-1].response_format
    assert sent_format is not None
    assert sent_format.model_dump() == {"type": "json_object"}
    assert response.text.format.type == "json_object"


async def test_plain_text_asks_for_no_format() -> None:
    async with serving() as served:
        await create(served, text={"format": {"type": "text"}})
        assert chat_requests(served)[-1].response_format is None


async def test_a_schema_and_tools_go_together() -> None:
    async with serving(scripted(ROME)) as served:
        await create(served, text={"format": FORMAT}, tools=[function()])
        assert chat_requests(served)[-1].response_format is not None
        assert chat_requests(served)[-1].tools is not None


@pytest.mark.parametrize("phase", [None, "final_answer"])
async def test_the_sdk_parses_the_answer(phase: str | None) -> None:
    script = [{"text": ['{"city": "Rome", ', '"degrees": 21}'], "phase": phase}]
    async with serving(scripted(script)) as served:
        parsed = await responses(served).parse(model="scripted", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Rome", degrees=21)


async def test_the_sdk_parses_the_answer_after_reasoning_and_a_preamble() -> None:
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
        assert chat_requests(served)[-1].response_format is None
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
    """The client sees the right answer alone; its usage counts both."""
    async with serving(scripted(WRONG, ROME)) as served:
        parsed = await responses(served).parse(model="scripted", input="hi", text_format=Weather)
        sent_messages = messages(served)
    assert parsed.output_parsed == Weather(city="Rome", degrees=21)
    assert [item.type for item in parsed.output] == ["message"]
    assert parsed.usage.output_tokens == 3
    assert sent_messages[1]["content"] == '{"city": "Rome"}'
    assert '"degrees" is a required property' in sent_messages[2]["content"]


@pytest.mark.parametrize("wrong", ['{"city": "Rome"}', "It is warm.", '{"city": 5, "degrees": 21}', ""])
async def test_an_answer_that_stays_wrong_fails_and_says_why(wrong: str) -> None:
    """Never a completed response without the form that was demanded."""
    async with serving(scripted([{"text": wrong}])) as served:
        with pytest.raises(InternalServerError) as caught:
            await create(served, text={"format": FORMAT})
        assert len(chat_requests(served)) == 2
    assert caught.value.status_code == 502
    assert "not valid against the schema in text.format" in caught.value.message
    assert caught.value.param == "text.format"


async def test_a_streamed_answer_leaves_at_once_and_fails_at_its_end() -> None:
    """Text that was sent is not taken back."""
    async with serving(scripted(WRONG)) as served:
        events = await stream(served, text={"format": FORMAT})
        assert len(chat_requests(served)) == 1
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
    """Only a whole answer can be right or wrong."""
    async with serving(scripted(turn)) as served:
        response = await create(served, **fields)
        assert len(chat_requests(served)) == 1
    assert response.status == ("incomplete" if "max_output_tokens" in fields else "completed")


@pytest.mark.parametrize("promises", [False, True])
async def test_an_upstream_is_believed_where_its_config_promises_to_hold_schemas(promises: bool) -> None:
    """Validators differ in details, so an engine's word counts; that something is no JSON at all is seen."""
    wrong, right = WRONG[0]["text"], "".join(ROME[0]["text"])
    answers = [streamed(text_chunks(text)) for text in (wrong, right, "Warm.", right)]
    async with UpstreamServer(*(answers if not promises else [answers[0], *answers[2:]])) as upstream:
        section = {"provider": "vllm", "base_url": upstream.base_url}
        async with serving({**section, **({"enforces": ["json_schema"]} if promises else {})}) as served:
            response = await create(served, model="fake-model", text={"format": FORMAT})
            assert response.output_text == (wrong if promises else right)
            response = await create(served, model="fake-model", text={"format": FORMAT})
            assert response.output_text == right


JSON_OBJECT: dict[str, Any] = {"type": "json_object"}
FENCED = ["```json\n", *ROME[0]["text"], "\n```\n"]


@pytest.mark.parametrize("form", [FORMAT, JSON_OBJECT], ids=["schema", "object"])
async def test_a_code_fence_around_the_json_is_taken_off(form: dict[str, Any]) -> None:
    """Streamed or not; a fence shows with the first character, so nothing has left."""
    right = "".join(ROME[0]["text"])
    async with UpstreamServer(streamed(text_chunks(*FENCED))) as upstream:
        async with serving({"provider": "vllm", "base_url": upstream.base_url}) as served:
            response = await create(served, model="fake-model", text={"format": form})
            events = await stream(served, model="fake-model", text={"format": form})
        assert len(upstream.chats) == 2
    assert response.output_text == right
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == right
    assert (events[-1].type, events[-1].response.output_text) == ("response.completed", right)


@pytest.mark.parametrize("wrong", ['{"a": 1}\n\nLet me know!', "[1]", "Here it is:", "```json\n{no}\n```"])
async def test_json_at_all_is_checked_too(wrong: str) -> None:
    """An answer that is no JSON object is written once more, and never completed."""
    fields: dict[str, Any] = {"text": {"format": JSON_OBJECT}}
    async with serving(scripted([{"text": wrong}], [{"text": '{"a": 1}'}])) as served:
        assert (await create(served, **fields)).output_text == '{"a": 1}'
        assert "nothing but a JSON object" in messages(served)[-1]["content"]
    async with serving(scripted([{"text": wrong}])) as served:
        with pytest.raises(InternalServerError, match="not the JSON object that text") as caught:
            await create(served, **fields)
        assert caught.value.param == "text.format"
        if wrong.startswith(("{", "[")):
            assert (await stream(served, **fields))[-1].type == "response.failed"
        else:  # nothing has left: the stream does not begin
            with pytest.raises(InternalServerError, match="not the JSON object that text"):
                await stream(served, **fields)


async def test_a_streamed_text_that_cannot_become_json_is_written_once_more() -> None:
    """It waits, so that the client sees the right answer alone."""
    async with serving(scripted([{"text": [" ", "It", " is warm."]}], ROME)) as served:
        events = await stream(served, text={"format": FORMAT})
        assert len(chat_requests(served)) == 2
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ROME[0]["text"]
    assert events[-1].response.usage.output_tokens == 5


# --- arguments of functions -------------------------------------------------------------------------------------------

STRICT = function("get", parameters=SCHEMA, strict=True)
RIGHT_CALL = {"call": "get", "arguments": "".join(ROME[0]["text"])}
WRONG_CALLS = {
    "of no JSON": '{"city": }',
    "that are no object": '["Rome", 1]',
    "that break the schema": '{"city": 5, "degrees": 1}',
}


@pytest.mark.parametrize("arguments", WRONG_CALLS.values(), ids=WRONG_CALLS)
async def test_a_call_with_wrong_arguments_is_written_once_more(arguments: str) -> None:
    """The client is given the right call alone; the model reads what was wrong."""
    wrong = [{"text": "I look."}, {"call": "get", "arguments": arguments, "id": "c1"}]
    async with serving(scripted(wrong, [RIGHT_CALL])) as served:
        response = await create(served, tools=[STRICT])
        sent_messages = messages(served)
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.output[1].arguments == RIGHT_CALL["arguments"]
    assert [each["role"] for each in sent_messages] == ["user", "assistant", "tool"]
    assert sent_messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert "Not run" in sent_messages[2]["content"]


async def test_the_text_before_a_call_that_is_written_once_more_is_a_message_of_its_own() -> None:
    """The model may repeat it, as it reads what it has said; the two are not run together."""
    wrong = [{"text": "I look."}, {"call": "get", "arguments": '{"city": }', "id": "c1"}]
    async with serving(scripted(wrong, [{"text": ["I look", " again."]}, RIGHT_CALL])) as served:
        response = await create(served, tools=[STRICT])
        second = messages(served)
    assert [item.type for item in response.output] == ["message", "message", "function_call"]
    assert [item.content[0].text for item in response.output[:2]] == ["I look.", "I look again."]
    assert second[1]["content"] == "I look."


@pytest.mark.parametrize("stream", [False, True])
async def test_an_escaped_lone_surrogate_in_arguments_is_json(stream: bool) -> None:
    """One parser refuses it, and every client's reads it."""
    arguments = '{"city": "\\ud83d", "degrees": 1}'
    async with serving(scripted([{"call": "get", "arguments": arguments}])) as served:
        answer = await create(served, tools=[STRICT], stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
        assert len(chat_requests(served)) == 1
    assert (answer.status, answer.output[0].arguments) == ("completed", arguments)


@pytest.mark.parametrize("arguments", WRONG_CALLS.values(), ids=WRONG_CALLS)
async def test_a_call_whose_arguments_stay_wrong_is_never_completed(arguments: str) -> None:
    """Whole, streamed and in the background."""
    async with serving(scripted([{"call": "get", "arguments": arguments}])) as served:
        with pytest.raises(InternalServerError, match="call of the function 'get' has wrong arguments") as caught:
            await create(served, tools=[STRICT])
        assert (caught.value.status_code, caught.value.param) == (502, "tools")
        events = await stream(served, tools=[STRICT])
        background = await create(served, tools=[STRICT], background=True)
        ended = [event async for event in await responses(served).retrieve(background.id, stream=True)]
    for last in (events[-1], ended[-1]):
        assert last.type == "response.failed"
        assert [item.status for item in last.response.output] == ["incomplete"]


async def test_only_what_is_known_of_a_function_is_checked() -> None:
    """Without `strict` arguments are any JSON object, blank ones an empty one, and a cut call is not whole."""
    loose = function("get", parameters=SCHEMA)
    turns = [[{"call": "get", "arguments": arguments}] for arguments in ('{"city": 5}', " ", ["{"] * 40)]
    async with serving(scripted(*turns)) as served:
        assert (await create(served, tools=[loose])).output[0].arguments == '{"city": 5}'
        assert (await create(served, tools=[loose])).output[0].arguments == "{}"
        cut = await create(served, tools=[STRICT], max_output_tokens=16)
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
