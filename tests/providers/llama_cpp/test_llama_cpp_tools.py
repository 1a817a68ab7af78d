"""Decide, then fill: a request's demands on its tools hold, also where a small model would choose otherwise.

A model that knows nothing shows what holds with any model.
"""

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from apis.errors import InvalidRequest
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.providers.llama_cpp.asking import (
    CITY,
    EMAIL,
    LETTER,
    WEATHER,
    ask,
    call_of,
    chat_request,
    finish_of,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = [WEATHER, EMAIL]
NAMED = {"type": "function", "function": {"name": "send_email"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def custom(name: str, syntax: str | None = None, definition: str = "") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": name, "description": "Writes something.", "format": form}}


@pytest.mark.parametrize(
    "content",
    ["Is it raining in Oslo right now?", pytest.param("What is the weather in Paris?", marks=pytest.mark.long)],
)
async def test_the_model_calls_the_tool_that_the_question_needs(content: str, llama: LlamaCpp) -> None:
    deltas = await ask(llama, content, tools=[WEATHER], max_completion_tokens=60)
    assert (call := call_of(deltas)) is not None
    assert call[0] == "get_weather"
    assert json.loads(call[1])["city"] in content
    assert finish_of(deltas).reason == "tool_calls"


@pytest.mark.long
async def test_the_model_answers_a_question_that_needs_no_tool(llama: LlamaCpp) -> None:
    deltas = await ask(llama, "Hello!", tools=[EMAIL])
    assert call_of(deltas) is None
    assert text_of(deltas)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", set[str]()),
        ("required", {"get_weather", "send_email"}),
        (NAMED, {"send_email"}),
        (allowed("required", "send_email"), {"send_email"}),
        (allowed("required", "get_weather", "send_email"), {"get_weather", "send_email"}),
        (allowed("auto", "send_email"), {"send_email", None}),
    ],
)
async def test_every_tool_choice_holds(choice: object, names: set[str | None], small_llama: LlamaCpp) -> None:
    deltas = await ask(small_llama, "Hello!", tools=TOOLS, tool_choice=choice, max_completion_tokens=60)
    call = call_of(deltas)
    if call is None:
        assert choice == "none" or None in names
        assert text_of(deltas)
        return
    assert call[0] in names
    assert finish_of(deltas).reason == "tool_calls"
    schema = {"get_weather": CITY, "send_email": LETTER}[call[0]]
    jsonschema_rs.validate(schema, json.loads(call[1]))


async def test_a_choice_that_is_not_among_the_tools_is_an_error(small_llama: LlamaCpp) -> None:
    for tools, choice in (([WEATHER], NAMED), (None, "required"), ([WEATHER], allowed("auto", "send_email"))):
        with pytest.raises(InvalidRequest) as caught:
            await ask(small_llama, tools=tools, tool_choice=choice)
        assert caught.value.param == "tool_choice"


async def test_a_tool_without_parameters_gets_an_empty_object(small_llama: LlamaCpp) -> None:
    tool = {"type": "function", "function": {"name": "refresh"}}
    assert call_of(await ask(small_llama, tools=[tool], tool_choice="required")) == ("refresh", "{}")


async def test_a_tool_named_answer_can_be_called(small_llama: LlamaCpp) -> None:
    tool = {"type": "function", "function": {"name": "answer", "parameters": CITY}}
    named = {"type": "function", "function": {"name": "answer"}}
    call = call_of(await ask(small_llama, tools=[tool, WEATHER], tool_choice=named, max_completion_tokens=60))
    assert call is not None
    assert call[0] == "answer"
    assert finish_of(await ask(small_llama, tools=[tool], max_completion_tokens=60)).reason in (
        "stop",
        "tool_calls",
        "length",
    )


def deciding(strict: bool | None, **properties: Any) -> dict[str, Any]:
    """A function with a property that a grammar can hold, and others."""
    fields = {"kind": {"enum": ["red", "blue"]}, **properties}
    parameters = {"type": "object", "properties": fields, "required": ["kind"]}
    return {"type": "function", "function": {"name": "decide", "parameters": parameters, "strict": strict}}


DECIDE = {"type": "function", "function": {"name": "decide"}}
UNENFORCEABLE: dict[str, dict[str, Any]] = {
    "pattern": {"to": {"type": "string", "pattern": "^(?!\\.)[a-z.]+@[a-z]+$"}},
    "minimum": {"to": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}},
    "maximum": {"to": {"type": "array", "items": {"type": "integer", "minimum": 0.5, "maximum": 0.7}}},
    "uniqueItems": {"to": {"type": "object", "properties": {"deep": {"type": "array", "uniqueItems": True}}}},
    "not": {"to": {"type": "string", "not": {"pattern": "(a)\\1"}}},
    "$ref": {"to": {"$ref": "https://example.com/to.json"}},
    "type": {"to": {"type": "objekt"}},
}


@pytest.mark.parametrize("keyword", UNENFORCEABLE)
async def test_a_function_is_offered_without_what_no_grammar_can_hold(keyword: str, small_llama: LlamaCpp) -> None:
    """A schema that is not strict is held as far as a grammar can."""
    tool = deciding(None, **UNENFORCEABLE[keyword])
    call = call_of(await ask(small_llama, tools=[tool, WEATHER], tool_choice=DECIDE, max_completion_tokens=12))
    assert call is not None
    assert call[0] == "decide"
    assert call[1].startswith(('{"kind":"red"', '{"kind":"blue"'))


@pytest.mark.parametrize("keyword", UNENFORCEABLE)
async def test_a_strict_function_that_no_grammar_can_hold_is_refused_by_its_keyword(
    keyword: str, small_llama: LlamaCpp
) -> None:
    """The error names the tool, the property and the keyword."""
    with pytest.raises(InvalidRequest) as caught:
        await ask(small_llama, tools=[WEATHER, deciding(True, **UNENFORCEABLE[keyword])])
    assert caught.value.param == "tools[1].parameters"
    assert caught.value.code == "invalid_function_parameters"
    assert "'decide'" in caught.value.message
    assert f"'{keyword}' at properties/to" in caught.value.message


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("lark", 'start: word "-" word\nword: /[a-z]{3}/', r"[a-z]{3}-[a-z]{3}"),
        ("lark", 'start: "a" body\nbody: NL "b"\n%import common.LF -> NL', r"a\nb"),
        ("regex", r"\d{2}/[A-F]{2}", r"\d{2}/[A-F]{2}"),
    ],
)
async def test_a_grammar_is_held(syntax: str, definition: str, pattern: str, small_llama: LlamaCpp) -> None:
    tools = [custom("writer", syntax, definition)]
    call = call_of(await ask(small_llama, "Write it.", tools=tools, tool_choice="required"))
    assert call is not None
    assert re.fullmatch(pattern, call[1])


async def test_a_bad_grammar_names_its_tool(small_llama: LlamaCpp) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ask(small_llama, tools=[WEATHER, custom("writer", "lark", "start: nowhere")])
    assert caught.value.param == "tools[1].format.definition"


async def test_free_text_is_written_unchanged(small_llama: LlamaCpp) -> None:
    call = call_of(await ask(small_llama, "Write: hello.", tools=[custom("writer")], tool_choice="required"))
    assert call is not None
    assert call[1]


@pytest.mark.long
async def test_a_call_is_not_repeated_right_after_its_result(llama: LlamaCpp) -> None:
    question: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}
    calls: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = [question]
    for turn in range(4):
        deltas = await ask(llama, messages=messages, tools=[WEATHER], max_completion_tokens=60)
        call = call_of(deltas)
        if call is None:
            break
        assert call not in [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
        calls.append({"id": f"c{turn}", "type": "function", "function": {"name": call[0], "arguments": call[1]}})
        messages += [{"role": "assistant", "tool_calls": calls[-1:]}]
        messages += [{"role": "tool", "tool_call_id": f"c{turn}", "content": "17 degrees, foggy"}]
    assert calls
    assert text_of(await ask(llama, messages=messages, tools=[WEATHER], tool_choice="none"))


async def test_the_usage_counts_the_deciding_and_the_bound_holds(small_llama: LlamaCpp) -> None:
    content = "What is the weather in Paris?"
    usage = finish_of(await ask(small_llama, content, tools=[WEATHER], max_completion_tokens=60)).usage
    decision = await small_llama.count_tokens(chat_request(content, tools=[WEATHER]))
    assert usage.input_tokens > decision
    for bound in (1, usage.output_tokens - 1):
        finish = finish_of(await ask(small_llama, content, tools=[WEATHER], max_completion_tokens=bound))
        assert finish.reason == "length"
        assert finish.usage.output_tokens <= bound
