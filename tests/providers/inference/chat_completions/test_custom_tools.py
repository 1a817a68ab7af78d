"""Custom tools as functions, and the function arguments that a model wrote -> the raw input."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.chat import CalledCustomTool, ChatGrammarFormat, ChatRequest, CustomCall, CustomToolDefinition
from apis.errors import Unsupported
from apis.wire.text_format import Grammar
from providers.inference.chat_completions.custom_tools import (
    CustomInputReader,
    custom_call_to_function_call,
    custom_to_function,
    require_plain_tools,
)

WRITTEN: dict[str, tuple[str, str]] = {
    "the usual form": ('{"input": "ls -l"}', "ls -l"),
    "space everywhere": (' {\n "input" :\t"a" \n} \n', "a"),
    "escapes": (r'{"input":"a\n\t\"\\\/\b\f\r\u00e9"}', 'a\n\t"\\/\b\f\ré'),
    "a pair of surrogates": (r'{"input":"\ud83d\ude00"}', "😀"),
    "lone surrogates": (r'{"input":"\ud83d.\ude00"}', "\ufffd.\ufffd"),
    "a lone surrogate at the end": (r'{"input":"a\ud83d"}', "a\ufffd"),
    "no text": ('{"input":""}', ""),
    "raw line ends": ('{"input":"a\nb\r\n"}', "a\nb\r\n"),
    "escapes that are none": (r'{"input":"\d+\.\u12"}', r"\d+\.\u12"),
    "quotes that were not escaped": ('{"input":"say "hi" there"}', 'say "hi" there'),
    "code that was not escaped": ('{"input":"print("a", "b")"}', 'print("a", "b")'),
    "another key behind": ('{"input":"a", "why": "b"}', "a"),
    "another key before": ('{"why": "b", "input":"a"}', "a"),
    "cut off in the text": ('{"input":"abc', "abc"),
    "cut off in an escape": (r'{"input":"abc\u00', "abc" + r"\u00"),
    "cut off before the end": ('{"input":"abc"', "abc"),
    "plain text": ("ls -l", "ls -l"),
    "text that begins like it": ('{"in', '{"in'),
    "another key": ('{"cmd":"ls"}', '{"cmd":"ls"}'),
    "no string": ('{"input": 5}', '{"input": 5}'),
    "an array": ('["input"]', '["input"]'),
    "nothing": ("", ""),
    "JSON within": ('{"input":"{\\"input\\": \\"a\\"}"}', '{"input": "a"}'),
    "a quote, space, and more": ('{"input":"a" b"}', 'a" b'),
    "no end of depth": ('{"x":' + "[" * 3000, '{"x":' + "[" * 3000),
    "a brace behind a quote": ('{"input":"{"a": 1}"}', '{"a": 1}'),
}


def unwrap(pieces: list[str]) -> str:
    custom = CustomInputReader()
    return "".join([custom.feed(piece) for piece in pieces] + [custom.finish()])


@pytest.mark.parametrize("name", WRITTEN)
def test_the_input_is_recovered_for_every_chunking(name: str) -> None:
    written, meant = WRITTEN[name]
    assert unwrap([written]) == meant
    assert unwrap(list(written)) == meant
    for cut in range(len(written)):
        assert unwrap([written[:cut], written[cut:]]) == meant


def test_text_comes_as_soon_as_it_is_certain() -> None:
    custom = CustomInputReader()
    assert [custom.feed(piece) for piece in ('{"input":"ab', "c\\", "nd", '"', "}", "")] == [
        "ab",
        "c",
        "\nd",
        "",
        "",
        "",
    ]
    assert custom.finish() == ""


@given(st.text(st.characters(codec="utf-8")), st.booleans(), st.lists(st.integers(0, 100), max_size=5))
def test_proper_json_always_comes_back_as_it_was(text: str, ascii_only: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    edges = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    assert unwrap([written[a:b] for a, b in itertools.pairwise(edges)]) == text


def test_a_long_input_takes_time_in_proportion() -> None:
    custom = CustomInputReader()
    custom.feed('{"input":"')
    assert sum(len(custom.feed('", "abc' + "x" * 50)) for _ in range(20_000)) > 1_000_000


def test_a_tool_is_declared_as_a_function_of_one_string() -> None:
    grammar = ChatGrammarFormat(type="grammar", grammar=Grammar(syntax="lark", definition="start: WORD"))
    function = custom_to_function(CustomToolDefinition(name="sh", description="Runs it.", format=grammar))["function"]
    assert function["name"] == "sh"
    assert function["description"] == "Runs it.\n\nThe input must match this Lark grammar:\nstart: WORD"
    assert function["parameters"]["required"] == ["input"]
    assert "description" not in custom_to_function(CustomToolDefinition(name="sh"))["function"]


def test_a_call_of_the_history_becomes_what_the_model_wrote() -> None:
    call = custom_call_to_function_call(
        CustomCall(type="custom", id="c", custom=CalledCustomTool(name="sh", input='a"b'))
    )
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("c", "sh", {"input": 'a"b'})


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "browser"}, "tools[1].type"),
        ({"type": "python"}, "tools[1].type"),
        ({"type": "function", "function": {"name": "f", "namespace": "crm"}}, "tools[1].function.namespace"),
    ],
)
def test_a_tool_that_the_model_cannot_know_is_an_unsupported_that_names_it(tool: object, param: str) -> None:
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [FUNCTION, tool]}
    )
    with pytest.raises(Unsupported) as raised:
        require_plain_tools(request.tools)
    assert raised.value.param == param
