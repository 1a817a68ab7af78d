"""Function and custom tools: how they are offered to the model, and how its calls come back."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.sdk.answer_shapes import call, function
from tests.support.sdk.requests import chat_requests, create, messages, refusal, stream
from tests.support.servers.serving import Served, scripted, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = function("weather", description="The weather.", parameters=SCHEMA, strict=True)
ROME = '{"city": "Rome"}'
PATCH: Json = {"type": "custom", "name": "patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving() as served:
        yield served


def offered(served: Served) -> list[Json]:
    """The tools the model was offered last."""
    return [tool.model_dump(exclude_none=True) for tool in chat_requests(served)[-1].tools or ()]


def chosen(served: Served) -> Any:
    """The tool choice the model was given last."""
    choice = chat_requests(served)[-1].tool_choice
    return choice.model_dump() if choice is not None and not isinstance(choice, str) else choice


async def test_a_function_is_offered_with_its_schema(served: Served) -> None:
    await create(served, tools=[WEATHER])
    declared = {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}
    assert offered(served) == [{"type": "function", "function": declared}]


async def test_a_function_needs_no_more_than_a_name(served: Served) -> None:
    await create(served, tools=[{"type": "function", "name": "now"}])
    assert offered(served) == [{"type": "function", "function": {"name": "now"}}]


async def test_a_custom_tool_takes_free_text_unless_it_has_a_grammar(served: Served) -> None:
    await create(served, tools=[PATCH, {**PATCH, "name": "short", "format": LARK}])
    free, bound = (tool["custom"]["format"] for tool in offered(served))
    assert free == {"type": "text"}
    assert bound == {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}


async def test_tools_keep_their_order(served: Served) -> None:
    names = [f"tool_{number}" for number in range(40)]
    await create(served, tools=[function(name) for name in names])
    assert [tool["function"]["name"] for tool in offered(served)] == names


async def test_the_response_shows_tools_as_they_are_in_force(served: Served) -> None:
    response = await create(served, tools=[function("now"), PATCH])
    now, patch = response.model_dump(mode="json", exclude_unset=True)["tools"]
    assert now["strict"] is False
    assert now["description"] is None
    assert patch["format"] == {"type": "text"}


async def test_a_turn_may_hold_any_number_of_calls() -> None:
    script = [call("weather", f'{{"city": "{number}"}}') for number in range(40)]
    async with serving(scripted(script)) as served:
        output = (await create(served, tools=[WEATHER])).output
    assert [item.arguments for item in output] == [f'{{"city": "{number}"}}' for number in range(40)]
    assert len({item.call_id for item in output}) == len({item.id for item in output}) == 40


async def test_interleaved_calls_come_out_apart() -> None:
    calls = [call("weather", *f'{{"city": "{city}"}}') for city in ("Rome", "Oslo", "Lima")]
    async with serving(scripted([{"calls": calls}])) as served:
        output = (await create(served, tools=[WEATHER])).output
    assert [item.arguments for item in output] == ['{"city": "Rome"}', '{"city": "Oslo"}', '{"city": "Lima"}']


async def test_the_call_id_of_the_model_is_the_clients() -> None:
    async with serving(scripted([call("weather", ROME, id="chatcmpl-tool-9")])) as served:
        (item,) = (await create(served, tools=[WEATHER])).output
    assert (item.type, item.call_id, item.name, item.status) == (
        "function_call",
        "chatcmpl-tool-9",
        "weather",
        "completed",
    )
    assert item.id != item.call_id


async def test_a_custom_call_holds_its_input_as_written() -> None:
    async with serving(scripted([call("patch", "*** Begin\n", "*** End", custom=True)])) as served:
        (item,) = (await create(served, tools=[PATCH])).output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin\n*** End")


async def test_a_response_with_calls_is_completed() -> None:
    async with serving(scripted([call("weather", ROME)])) as served:
        response = await create(served, tools=[WEATHER])
    assert response.status == "completed"
    assert response.incomplete_details is None


@pytest.mark.parametrize("tools", [[WEATHER], []], ids=["others", "none"])
async def test_an_undeclared_call_is_an_error_for_the_model_and_hidden_from_the_client(tools: list[Json]) -> None:
    async with serving(scripted([call("imagined", id="c0")], [{"text": "Sunny."}])) as served:
        response = await create(served, tools=tools)
        _, asked_for, sent_result = messages(served)
    assert [item.type for item in response.output] == ["message"]
    assert asked_for["tool_calls"][0]["function"]["name"] == "imagined"
    assert sent_result["content"] == "There is no tool named 'imagined'. Call only tools that you were given."


async def test_a_call_begins_before_its_arguments_are_whole() -> None:
    async with serving(scripted([call("weather", "{", "}")])) as served:
        events = await stream(served, tools=[WEATHER])
    added = next(event for event in events if event.type == "response.output_item.added")
    assert (added.item.name, added.item.arguments, added.item.status) == ("weather", "", "in_progress")


CHOICES: dict[str, tuple[Any, Any]] = {
    "auto": ("auto", "auto"),
    "none": ("none", "none"),
    "required": ("required", "required"),
    "unset": (None, "auto"),
    "a function": ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    "a custom tool": ({"type": "custom", "name": "patch"}, {"type": "custom", "custom": {"name": "patch"}}),
    "some of them": (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
        },
    ),
    "one of some": (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}, {"type": "function", "name": "weather"}],
        },
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [
                    {"type": "custom", "custom": {"name": "patch"}},
                    {"type": "function", "function": {"name": "weather"}},
                ],
            },
        },
    ),
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
async def test_a_tool_choice_reaches_the_model_and_all_tools_stay_offered(choice: tuple[Any, Any]) -> None:
    choice_sent, choice_of_model = choice
    script = (
        [{"text": "No."}]
        if choice_sent in ("none", "auto", None)
        else [call("weather", ROME), call("patch", custom=True)]
    )
    async with serving(scripted(script)) as served:
        response = await create(served, tools=[WEATHER, PATCH], tool_choice=choice_sent)
        assert chosen(served) == choice_of_model
        assert len(offered(served)) == 2
        assert len(chat_requests(served)) == 1
    choice_echoed = response.tool_choice
    assert (choice_echoed if isinstance(choice_echoed, str) else choice_echoed.model_dump(exclude_unset=True)) == (
        choice_sent or "auto"
    )


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_without_tools_there_is_nothing_to_choose(served: Served, choice: str) -> None:
    response = await create(served, tool_choice=choice)
    assert chat_requests(served)[-1].tools is None
    assert chosen(served) is None
    assert response.tool_choice == choice


REFUSED_CHOICES: dict[str, tuple[Json, str, str]] = {
    "required without tools": ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    "a function not declared": ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x' not found"),
    "a custom tool not declared": ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "'x' not found"),
    "a search not declared": ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' not found"),
    "an allowed tool not declared": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice",
        "'x' not found",
    ),
    "no allowed tools": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
        "at least 1",
    ),
    "an unknown mode": ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto' or 'required'"),
    "an unknown mode of some": (
        {"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [{"type": "function", "name": "weather"}]}},
        "tool_choice.mode",
        "'auto' or 'required'",
    ),
    "an unknown type": ({"tool_choice": {"type": "program"}}, "tool_choice.type", "program"),
    "a number": ({"tool_choice": 1}, "tool_choice", "integer"),
    "a function as a custom tool": (
        {"tool_choice": {"type": "custom", "name": "weather"}},
        "tool_choice",
        "'weather' not found",
    ),
    "a custom tool as a function": (
        {"tool_choice": {"type": "function", "name": "patch"}},
        "tool_choice",
        "'patch' not found",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CHOICES.values(), ids=REFUSED_CHOICES)
async def test_a_choice_that_cannot_hold_is_refused(served: Served, case: tuple[Json, str, str]) -> None:
    fields, param, words = case
    asking: Json = {"tools": [WEATHER, PATCH], **fields}
    error = await refusal(served, **asking)
    assert error["param"] == param
    assert words in error["message"]


REFUSED_TOOLS: dict[str, tuple[Any, str, str]] = {
    "two functions of one name": ([WEATHER, function("now"), WEATHER], "tools[2].name", "'weather'"),
    "a function and a custom tool of one name": ([WEATHER, {**PATCH, "name": "weather"}], "tools[1].name", "'weather'"),
    "an unknown type": ([WEATHER, {"type": "hologram"}], "tools[1].type", "hologram"),
    "a screen without a size": ([{"type": "computer_use_preview"}], "tools[0].display_width", "Missing"),
    "no type": ([{"name": "x"}], "tools[0].type", "Missing"),
    "no name": ([{"type": "function"}], "tools[0].name", "Missing"),
    "a name with a blank": ([function("a b")], "tools[0].name", "^[A-Za-z0-9_-]{1,64}$"),
    "a name too long": ([function("a" * 65)], "tools[0].name", "^[A-Za-z0-9_-]{1,64}$"),
    "a schema that is no object": ([function("a", parameters=[])], "tools[0].parameters", "expected an object"),
    "strictness in words": ([function("a", strict="yes")], "tools[0].strict", "expected a boolean"),
    "an unknown grammar": (
        [{**PATCH, "format": {**LARK, "syntax": "bnf"}}],
        "tools[0].format.syntax",
        "'lark' or 'regex'",
    ),
    "too many": ([function(f"t{number}") for number in range(129)], "tools", "at most 128"),
    "the old nested form": (
        [{"type": "function", "function": {"name": "weather"}}],
        "tools[0].name",
        "tools[0].name",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TOOLS.values(), ids=REFUSED_TOOLS)
async def test_a_tool_that_cannot_be_is_refused(served: Served, case: tuple[Any, str, str]) -> None:
    tools, param, words = case
    error = await refusal(served, tools=tools)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("parallel", [True, False, None])
async def test_whether_calls_may_be_parallel_reaches_the_model(served: Served, parallel: bool | None) -> None:
    response = await create(served, tools=[WEATHER], parallel_tool_calls=parallel)
    assert chat_requests(served)[-1].parallel_tool_calls is parallel
    assert response.parallel_tool_calls is (parallel is not False)


async def test_a_client_can_run_tools_until_the_model_answers() -> None:
    turns = [[{"calls": [call("weather", '{"city": "Rome"}'), call("now", "{}")]}], [{"text": "Sunny, at noon."}]]
    tools = [WEATHER, function("now")]
    async with serving(scripted(*turns)) as served:
        first = await create(served, tools=tools, input="How is Rome?")
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": item.name} for item in first.output
        ]
        second = await create(served, tools=tools, input=outputs, previous_response_id=first.id)
        sent_pairs = [(message.role, message.content) for message in chat_requests(served)[-1].messages]
    assert second.output_text == "Sunny, at noon."
    assert sent_pairs == [("user", "How is Rome?"), ("assistant", None), ("tool", "weather"), ("tool", "now")]
