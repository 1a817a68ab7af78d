"""A request in the terms of a chat: what is refused, what is passed on, and which schemas are let through."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from apis.chat import ChatFunctionTool, ChatRequest, FunctionDefinition, Message
from apis.deltas import ToolCallStart
from apis.errors import InvalidRequest, Unsupported
from apis.responses import CreateResponse
from apis.wire.tools import WebSearchTool
from providers.responses.context.chat_request import accept_request, build_chat
from providers.responses.tools.call import HostedCall, TypedTool
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.registry import ToolBinding
from stack.http.parsing import validate_request

Fields = dict[str, Any]
F: Fields = {"type": "function", "name": "f"}
C: Fields = {"type": "custom", "name": "c"}


class Clock(TypedTool):
    """A tool that returns the time; a turn never runs it here."""

    @property
    def offered_tools(self) -> Sequence[ChatFunctionTool]:
        return [ChatFunctionTool(function=FunctionDefinition(name="clock"))]

    def create_call(self, start: ToolCallStart) -> HostedCall:
        raise NotImplementedError


CLOCK = ToolBinding(WebSearchTool(type="web_search"), Clock())


def chat(*, hosted: bool = False, **fields: Any) -> ChatRequest:
    request = CreateResponse.model_validate({"model": "m", "input": "hi", **fields})
    toolbox = OfferedTools(request, [CLOCK] if hosted else [])
    return build_chat(request, [Message(role="user", content="hi")], toolbox)


def chat_fields(**fields: Any) -> Fields:
    """Return the fields of the chat, except model and messages."""
    hosted = fields.pop("hosted", False)
    return chat(hosted=hosted, **fields).model_dump(exclude_none=True, exclude={"model", "messages"}, by_alias=True)


@pytest.mark.parametrize("name", ["audio"])
@pytest.mark.parametrize("value", ["x", {}, [], 0, False])
def test_what_is_not_offered_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        validate_request({"model": "m", "input": "hi", name: value}, CreateResponse)
    assert caught.value.param == name


def test_something_must_be_asked() -> None:
    with pytest.raises(InvalidRequest) as caught:
        accept_request(CreateResponse.model_validate({"model": "m"}))
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")
    accept_request(CreateResponse.model_validate({"model": "m", "previous_response_id": "resp_1"}))


FUNCTION: Fields = {"type": "function", "function": {"name": "f"}}
CUSTOM: Fields = {"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}
GRAMMAR: Fields = {"syntax": "regex", "definition": "a+"}
ONE_FUNCTION: Fields = {"type": "function", "function": {"name": "f"}}
TABLE: dict[str, tuple[Fields, Fields]] = {
    "nothing": ({}, {}),
    "sampling": (
        {"temperature": 0.0, "top_p": 0.5, "seed": 7, "stop": ["x"], "top_k": 3},
        {"temperature": 0.0, "top_p": 0.5, "seed": 7, "stop": ["x"], "top_k": 3},
    ),
    "limits": ({"max_output_tokens": 99}, {"max_completion_tokens": 99}),
    "reasoning": ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    "verbosity": ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
    "cache keys": ({"prompt_cache_key": "k", "cache_salt": "s"}, {"prompt_cache_key": "k", "cache_salt": "s"}),
    "a priority": ({"priority": -1}, {"priority": -1}),
    "a service tier": ({"service_tier": "priority"}, {}),
    "logprobs by include": ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
    "logprobs by number": ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    "logprobs of none": ({"top_logprobs": 0}, {}),
    "a function": ({"tools": [F]}, {"tools": [FUNCTION], "tool_choice": "auto"}),
    "a custom tool": ({"tools": [C]}, {"tools": [CUSTOM], "tool_choice": "auto"}),
    "a grammar": (
        {
            "tools": [{**C, "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}],
            "tool_choice": "required",
        },
        {
            "tools": [
                {
                    "type": "custom",
                    "custom": {
                        "name": "c",
                        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
                    },
                }
            ],
            "tool_choice": "required",
        },
    ),
    "no parallel calls": (
        {"tools": [F], "parallel_tool_calls": False},
        {"tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    "no parallel calls of no tools": ({"parallel_tool_calls": False}, {}),
    "no tools and no choice": ({"tool_choice": "none"}, {}),
    "tools and no choice": ({"tools": [F], "tool_choice": "none"}, {"tools": [FUNCTION], "tool_choice": "none"}),
    "one function": (
        {"tools": [F, C], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [FUNCTION, CUSTOM], "tool_choice": ONE_FUNCTION},
    ),
    "one custom tool": (
        {"tools": [F, C], "tool_choice": {"type": "custom", "name": "c"}},
        {"tools": [FUNCTION, CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "c"}}},
    ),
    "some allowed": (
        {
            "tools": [F, C],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        },
        {
            "tools": [FUNCTION, CUSTOM],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ONE_FUNCTION]}},
        },
    ),
    "a hosted tool": (
        {"hosted": True, "tools": [F]},
        {"tools": [FUNCTION, {"type": "function", "function": {"name": "clock"}}], "tool_choice": "auto"},
    ),
    "a hosted tool chosen": (
        {"hosted": True, "tool_choice": {"type": "web_search"}},
        {
            "tools": [{"type": "function", "function": {"name": "clock"}}],
            "tool_choice": {"type": "function", "function": {"name": "clock"}},
        },
    ),
    "text": ({"text": {"format": {"type": "text"}}}, {}),
    "any JSON": ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    "JSON of a schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
            }
        },
    ),
}


@pytest.mark.parametrize(("value", "passed_on"), TABLE.values(), ids=TABLE)
def test_a_request_becomes_a_chat(value: Fields, passed_on: Fields) -> None:
    assert chat_fields(**value) == passed_on


def test_a_name_of_a_hosted_tool_is_taken() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(hosted=True, tools=[{**F, "name": "clock"}])
    assert caught.value.param == "tools[0].name"


# --- schemas ---------------------------------------------------------------------------------------------------------


def properties(**fields: Any) -> Fields:
    return {"type": "object", "properties": fields}


def nested(levels: int, inner: Fields) -> Fields:
    for _ in range(levels):
        inner = properties(a=inner)
    return inner


def doubled(levels: int) -> Fields:
    both = {
        f"d{n}": properties(a={"$ref": f"#/$defs/d{n + 1}"}, b={"$ref": f"#/$defs/d{n + 1}"}) for n in range(levels)
    }
    return {**properties(a={"$ref": "#/$defs/d0"}), "$defs": {**both, f"d{levels}": {"type": "string"}}}


TREE: Fields = {
    **properties(root={"$ref": "#/$defs/node"}),
    "$defs": {
        "node": properties(
            value={"type": ["string", "null"]},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}},
            next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        )
    },
}
GOOD: dict[str, Fields] = {
    "an object": properties(a={"type": "string"}),
    "without properties": {"type": "object"},
    "a tree": TREE,
    "recursion to the root": properties(children={"type": "array", "items": {"$ref": "#"}}),
    "references with escapes": {
        **properties(a={"$ref": "#/$defs/a~1b~0c%20d"}),
        "$defs": {"a/b~c d": {"type": "string"}},
    },
    "a reference into a list": {**properties(a={"$ref": "#/anyOf/1"}), "anyOf": [{}, {"type": "object"}]},
    "closed": {**properties(a={"type": "integer"}), "additionalProperties": False, "required": ["a"]},
    "generated by zod": {"$schema": "http://json-schema.org/draft-07/schema#", **properties(a={"type": "string"})},
    "a draft": {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "Answer", **properties()},
    "common patterns": properties(
        date={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        uuid={"type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        mail={
            "type": "string",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]*\.)+[A-Za-z]{2,}$",
        },
    ),
    "keywords as names": properties(type={"type": "string"}, **{"$ref": {"type": "string"}, "enum": {"type": "array"}}),
    "data that looks like a schema": properties(a={"default": {"$ref": "http://a"}, "const": {"enum": []}}),
    "ten levels": nested(10, {"type": "string"}),
    "1,000 values": properties(a={"enum": [*range(1000)]}),
    "many properties": properties(**{f"p{n}": {"type": "string"} for n in range(4_000)}),
}
BAD_PATTERNS = ["(", ")", "a)", "[a", "*a", "a|*", "a**", "a{3}{2}", "a{3,2}", "\\", "(?", "(a)\\1", "(?<n>a)\\k<n>"]
BAD: dict[str, Fields] = {
    "itself": {"$ref": "#"},
    "itself by $defs": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "two that are each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "itself among others": {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
    "itself by way of not": {**properties(), "not": {"allOf": [{"$ref": "#"}]}},
    "a loop seen first through a property": {
        **properties(a={"$ref": "#/$defs/y"}),
        "allOf": [{"$ref": "#/$defs/y"}],
        "$defs": {"y": {"$ref": "#"}},
    },
    "http": properties(a={"$ref": "http://127.0.0.1:9/x"}),
    "https with a fragment": properties(a={"$ref": "https://example.com/x#/a"}),
    "a local file": properties(a={"$ref": "file:///etc/passwd"}),
    "a file beside it": properties(a={"$ref": "other.json"}),
    "a dynamic reference": properties(a={"$dynamicRef": "http://127.0.0.1:9/x"}),
    "an anchor": {**properties(a={"$ref": "#here"}), "$defs": {"x": {"$anchor": "here"}}},
    "nowhere": properties(a={"$ref": "#/$defs/none"}),
    "what is no schema": properties(a={"$ref": "#/type"}),
    "a reference that is no text": properties(a={"$ref": 5}),
    "a foreign dialect": {"$schema": "http://127.0.0.1:9/dialect", **properties()},
    "an id elsewhere": {"$id": "http://127.0.0.1:9/", **properties()},
    "an unknown type": properties(a={"type": "objekt"}),
    "no type of several": properties(a={"type": []}),
    "a type that is a number": properties(a={"type": 5}),
    "properties in a list": {"type": "object", "properties": [{"type": "string"}]},
    "a property that is text": properties(a="string"),
    "anyOf as an object of text": properties(a={"anyOf": "string"}),
    "required as text": {**properties(), "required": "a"},
    "an empty enum": properties(a={"enum": []}),
    "an enum as text": properties(a={"enum": "a"}),
    "not anything": properties(a={"not": {}}),
    "a text of a gigabyte": properties(a={"type": "string", "minLength": 10**9}),
    "a list of a billion": properties(a={"type": "array", "minItems": 10**9}),
    "eleven levels": nested(11, {"type": "string"}),
    "1,001 values": properties(a={"enum": [*range(1001)]}),
    "65,536 alternatives": {"anyOf": [{}] * 65_536},
    "2**16 combinations": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}] * 16},
    "30 doublings": doubled(30),
    "a chain of 10,000": {
        "$ref": "#/$defs/d0",
        "$defs": {**{f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(4_000)}, "d4000": {}},
    },
    "300 KB": properties(a={"description": "x" * 300_000}),
    "a pattern of 100 KiB": properties(a={"pattern": "a" * 102_400}),
    "a pattern that is no text": properties(a={"pattern": 5}),
    "a pattern that repeats repetitions": properties(a={"pattern": "((a{100}){100}){100}"}),
    "a pattern of a billion": properties(a={"pattern": "a{1000000000}"}),
    "fewer items than none": properties(a={"type": "array", "maxItems": -1}),
    "half an item": properties(a={"type": "array", "minItems": 0.5}),
    "a length that is true": properties(a={"type": "string", "maxLength": True}),
    "multiples of nothing": properties(a={"type": "integer", "multipleOf": 0}),
    "a minimum that is text": properties(a={"type": "integer", "minimum": "1"}),
    "more at least than at most": properties(a={"type": "string", "minLength": 5, "maxLength": 4}),
    "a name that is no property": {**properties(a={}), "required": ["a", "nope"]},
    "a name of an empty object": {"type": "object", "required": ["nope"]},
    "5,001 properties": properties(**{f"p{n}": {} for n in range(5_001)}),
    "120,001 characters of names": properties(**{f"{n:0>100}": {} for n in range(1_201)}),
    "120,001 characters of values": properties(a={"enum": [f"{n:0>250}" for n in range(500)]}),
    **{f"the pattern {pattern}": properties(a={"type": "string", "pattern": pattern}) for pattern in BAD_PATTERNS},
    "a pattern of names that is none": {"type": "object", "patternProperties": {"[": {}}},
    "a pattern of names": {"type": "object", "patternProperties": {"(a{1000}){1000}": {}}},
}
PATTERNS = [
    *("^[a-z]+$", "a*?b+?c??", "a{2}?", "x{2,}", "x{,3}", "{a}", "]", "[]a]", "[^]]", "[(]", "\\(\\)\\[", "(?:a|b)*"),
    *(
        "(?=a)b",
        "(?<!a)b",
        "(?<year>\\d{4})",
        "(?P<year>\\d{4})",
        "(?i)a",
        "(?i:a)",
        "\\p{L}+",
        "\\u{1F600}",
        "a|",
        "()",
    ),
    *("()", "[[:alpha:]]", "[\\]\\\\]", "a++", "^(?:[01]\\d|2[0-3]):[0-5]\\d$", "#x y", ""),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_every_dialect_are_let_through(pattern: str) -> None:
    """The check of patterns refuses no pattern that some engine takes."""
    assert chat(tools=[{**F, "parameters": properties(a={"type": "string", "pattern": pattern}), "strict": True}])


ONLY_STRICT = {
    *("eleven levels", "1,001 values", "a name that is no property", "a name of an empty object", "5,001 properties"),
    *("120,001 characters of names", "120,001 characters of values", "the pattern (a)\\1", "the pattern (?<n>a)\\k<n>"),
    *("an anchor", "a foreign dialect", "an id elsewhere"),
}
"""Legal in JSON Schema, but not to be enforced. A tool that is not strict may have them: MCP servers' tools do."""


BUNDLED: Fields = {
    **properties(home={"$ref": "address.json"}, work={"$ref": "https://example.com/schemas/address.json#/$defs/line"}),
    "$id": "https://example.com/schemas/person.json",
    "$defs": {
        "https://example.com/schemas/address.json": {
            "$id": "https://example.com/schemas/address.json",
            **properties(line={"$ref": "#/$defs/line"}, near={"$ref": "#place"}, up={"$ref": "person.json"}),
            "$defs": {"line": {"type": "string"}, "place": {"$anchor": "place", "type": "number"}},
        }
    },
}
NAMED: dict[str, Fields] = {
    "a bundle": BUNDLED,
    "an id that is an address": {"$id": "https://example.com/a.json", **properties(a={"$ref": "#/properties/b"}, b={})},
    "an id within": properties(a={"$id": "urn:example:a", "type": "string"}),
    "an old id": {"id": "http://example.com/a", **properties(a={"id": "#a", "$id": "#b", "type": "string"})},
    "a dialect of its own": {"$schema": "https://example.com/dialect", "$vocabulary": {"a": True}, **properties()},
    "a dialect without an address": {"$schema": "draft-07", **properties()},
    "an anchor": {**properties(a={"$ref": "#here"}), "$defs": {"x": {"$anchor": "here"}}},
    "a dynamic anchor": {**properties(a={"$dynamicRef": "#here"}), "$defs": {"x": {"$dynamicAnchor": "here"}}},
    "a comment": {"$comment": "https://example.com", **properties(a={"$comment": 5})},
    "definitions with odd names": {
        **properties(a={"$ref": "#/$defs/https:~1~1example.com~1a"}),
        "$defs": {"https://example.com/a": {"type": "string"}, "a b": {}, "": {}},
    },
}


@pytest.mark.parametrize("schema", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("strict", [False, None])
def test_names_of_schemas_and_places_do_not_matter_without_strict(schema: Fields, strict: bool | None) -> None:
    """Nothing is looked up by them."""
    assert chat(tools=[{**F, "parameters": schema, "strict": strict}])


@pytest.mark.parametrize(
    "reference",
    ["#none", "other.json", "https://example.com/other.json", "address.json#/$defs/none", "address.json#none"],
)
def test_a_name_that_the_schema_does_not_give_leads_nowhere(reference: str) -> None:
    """No schema is fetched for it."""
    parameters = {**BUNDLED, "properties": {"a": {"$ref": reference}}}
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[{**F, "parameters": parameters}])
    assert (caught.value.param, caught.value.code) == ("tools[0].parameters", "invalid_function_parameters")


def test_a_chain_of_names_is_as_long_as_one_of_pointers() -> None:
    """Anchors that follow each other count."""
    anchors = {f"d{n}": {"$anchor": f"a{n}", "$ref": f"#a{n + 1}"} for n in range(300)}
    parameters = {**properties(a={"$ref": "#a0"}), "$defs": {**anchors, "last": {"$anchor": "a300"}}}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        chat(tools=[{**F, "parameters": parameters}])


@pytest.mark.parametrize("schema", GOOD.values(), ids=GOOD)
def test_schemas_that_clients_make_are_let_through(schema: Fields) -> None:
    for strict in (True, False, None):
        assert chat_fields(text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": strict}})
        assert chat_fields(tools=[{**F, "parameters": schema, "strict": strict}])


@pytest.mark.parametrize(("name", "schema"), BAD.items(), ids=BAD)
def test_schemas_that_do_harm_are_refused(name: str, schema: Fields) -> None:
    """Values that a keyword cannot have are refused before any engine sees them."""
    started = time.perf_counter()
    with pytest.raises(InvalidRequest) as caught:
        chat(text={"format": {"type": "json_schema", "name": "a", "schema": schema}})
    took_s = time.perf_counter() - started
    assert (caught.value.param, caught.value.code) == ("text.format.schema", "invalid_json_schema")
    assert len(caught.value.message) < 300
    print(f"{name}: {took_s * 1000:.1f} ms: {caught.value.message}")
    parameters = {"type": "object", **schema}
    tools = [F, {**F, "name": "g", "parameters": parameters, "strict": True}]
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=tools)
    assert (caught.value.param, caught.value.code) == ("tools[1].parameters", "invalid_function_parameters")
    if name in ONLY_STRICT:
        assert chat(tools=[{**F, "parameters": parameters}])


@pytest.mark.parametrize(
    "parameters", [{"properties": {}}, {"type": "array"}, {"type": ["object", "null"]}, {"anyOf": []}]
)
def test_parameters_are_those_of_an_object(parameters: Fields) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[{**F, "parameters": parameters}])
    assert (caught.value.param, caught.value.code) == ("tools[0].parameters", "invalid_function_parameters")


def test_all_tools_together_have_a_limit_too() -> None:
    large = {"type": "object", "description": "x" * 250_000}
    tools = [{**F, "name": f"f{number}", "parameters": large} for number in range(5)]
    assert chat(tools=tools[:4])
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=tools)
    assert caught.value.param == "tools[4].parameters"
