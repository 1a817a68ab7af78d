"""The parts of a request that become a grammar, and those that are refused before anything is compiled."""

from typing import Any

import pytest

from apis.errors import InvalidRequest
from providers.inference.harmony.grammar import request_to_grammar
from tests.providers.harmony.turns import chat_request, custom, function

TOOLS: list[dict[str, Any]] = [function("add"), custom("shell"), {"type": "python"}]
STRICT = function("add", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": TOOLS, "response_format": {"type": "text"}},
    ],
)
def test_a_request_that_any_turn_satisfies_has_no_grammar(fields: dict[str, Any]) -> None:
    assert request_to_grammar(chat_request(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"tools": TOOLS, "tool_choice": "none"}, []),
        ({"tools": TOOLS, "tool_choice": "required"}, []),
        ({"response_format": {"type": "json_object"}}, []),
        ({"tools": [*TOOLS, STRICT]}, ["tools[3].parameters"]),
        ({"tools": [*TOOLS, custom("cut", "regex", "a+")]}, ["tools[3].format.definition"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
            ["text.format.schema"],
        ),
        ({"tools": [*TOOLS, STRICT], "tool_choice": "none"}, []),
    ],
)
def test_a_requests_constraints_become_a_grammar_with_parts_named_by_field(
    fields: dict[str, Any], params: list[str]
) -> None:
    grammar = request_to_grammar(chat_request(**fields))
    assert grammar is not None
    assert grammar.text.startswith("%llguidance {")
    assert [part.param for part in grammar.parts] == params


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "missing"}}},
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "missing"}}]},
            },
        },
    ],
)
def test_a_choice_of_no_tool_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_to_grammar(chat_request(**fields))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("schema", "forces"),
    [
        ({"type": "object", "properties": {"a": {"const": "x"}}}, True),
        ({"const": "a" * 20_000}, False),
        ({"type": "array", "minItems": 3, "items": {"const": "a"}}, False),
        ({"type": "string", "pattern": "a{9}"}, False),
        ({"$defs": {"a": {}}, "$ref": "#/$defs/a"}, False),
    ],
)
def test_only_what_forces_little_text_at_once_may_force_it(schema: dict[str, Any], forces: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    grammar = request_to_grammar(chat_request(response_format=form))
    assert grammar is not None
    assert ("no_forcing" in grammar.text) != forces


def test_properties_that_are_named_like_keywords_are_no_bounds() -> None:
    schema = {"type": "object", "properties": {"multipleOf": True, "minLength": {"const": 10**10}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert request_to_grammar(chat_request(response_format=form)) is not None


@pytest.mark.parametrize(("value", "fine"), [(7, True), (0.01, True), (3600, True), (10_000, True), (10_001, False)])
def test_multiple_of_is_bounded(value: float, fine: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "number", "multipleOf": value}}}
    if fine:
        assert request_to_grammar(chat_request(response_format=form)) is not None
    else:
        with pytest.raises(InvalidRequest):
            request_to_grammar(chat_request(response_format=form))
