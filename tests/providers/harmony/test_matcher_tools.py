"""Calls under a grammar: the choice of tools, and the inputs of custom tools."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from apis.chat import ChatRequest
from apis.deltas import ToolArgumentsDelta, ToolCallStart
from apis.errors import InvalidRequest
from providers.inference.harmony.vocabulary import load_vocabulary
from tests.providers.harmony.turns import (
    CITY,
    FINAL,
    THINK,
    allows,
    chat_request,
    custom,
    encode,
    function,
    matcher,
    said,
    walk,
)

TOOLS = [function("add", CITY, strict=True), function("sub"), custom("shell"), function("find", namespace="files")]
CALLS = {
    "add": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"city":"x","days":1}<|call|>',
    "sub": " to=functions.sub<|channel|>commentary json<|message|>{ }<|call|>",
    "shell": "<|channel|>commentary to=functions.shell<|message|>ls {<|call|>",
    "files.find": "<|channel|>commentary to=files.find<|message|>{}<|call|>",
    "": FINAL + "Hello<|return|>",
}


@pytest.mark.parametrize(
    ("choice", "may"),
    [
        ("auto", {"add", "sub", "shell", "files.find", ""}),
        ("none", {""}),
        ("required", {"add", "sub", "shell", "files.find"}),
        ({"type": "function", "function": {"name": "sub"}}, {"sub"}),
        ({"type": "function", "function": {"name": "files.find"}}, {"files.find"}),
        ({"type": "custom", "custom": {"name": "shell"}}, {"shell"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
            {"add", ""},
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
            {"add"},
        ),
    ],
)
def test_the_model_can_do_only_what_tool_choice_allows(choice: Any, may: set[str]) -> None:
    request = chat_request(tools=TOOLS, tool_choice=choice)
    for name, turn in CALLS.items():
        assert allows(matcher(request), THINK + turn) == (name in may), name


def test_a_forced_call_comes_from_any_walk() -> None:
    rng = random.Random(7)
    request = chat_request(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    for _ in range(40):
        deltas = said(walk(matcher(request), rng), request)
        calls = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
        assert [call.name for call in calls] == ["add"]
        arguments = "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta))
        assert jsonschema_rs.validator_for(CITY).is_valid(json.loads(arguments))


def test_the_models_own_tools_are_called_on_the_analysis_channel() -> None:
    request = chat_request(tools=[{"type": "browser"}, {"type": "python"}], tool_choice="required")
    for turn in (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        " to=python<|channel|>analysis code<|message|>print(1)<|call|>",
        "<|channel|>commentary to=python<|message|>print(1)<|call|>",
    ):
        assert allows(matcher(request), turn)
    assert not allows(matcher(request), "<|channel|>analysis to=browser.delete")


def test_a_model_that_will_not_call_is_made_to_after_a_while() -> None:
    one = matcher(chat_request(tools=TOOLS, tool_choice="required"))
    assert allows(one, THINK * 8)
    assert not allows(one, "<|channel|>analysis")


# --- custom tools -----------------------------------------------------------------------------------------------------

APPLY_PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def shell_call(request: ChatRequest, text: str) -> bool:
    turn = [*encode(THINK + CALLS["shell"].partition("ls")[0]), *load_vocabulary().encode(text), *encode("<|call|>")]
    return allows(matcher(request), turn)


def test_a_multi_line_lark_grammar_holds_the_input() -> None:
    request = chat_request(tools=[custom("shell", "lark", APPLY_PATCH)], tool_choice="required")
    patch = "*** Begin Patch\n*** Update File: a/b.py\n@@ def f():\n-    x\n+    y <|end|>\n*** End Patch"
    assert shell_call(request, patch)
    assert shell_call(request, patch + "\n")
    assert not shell_call(request, patch.replace("@@", "!!"))
    assert not shell_call(request, patch.replace("*** End Patch", ""))
    rng = random.Random(8)
    for _ in range(10):
        text = "".join(
            one.text for one in said(walk(matcher(request), rng), request) if isinstance(one, ToolArgumentsDelta)
        )
        assert text.startswith("*** Begin Patch\n")
        assert text.rstrip("\n").endswith("\n*** End Patch")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[a-z]+/\d{2}", "ab/12", "ab-12"),
        (r"^\d{4}-(0[1-9]|1[0-2])$", "2025-12", "2025-13"),
        ("a\nb", "a\nb", "ab"),
        (r"a\\/b", "a\\/b", "a/b"),
        (r'"(?P<x>[^"\n])+"', '"x#y"', '""'),
        ("a|b // c", "b // c", "b"),
        ("(?i)select .*", "SELECT 1", "drop"),
        ("x{2,3}", "xxx", "x"),
    ],
)
def test_a_regex_holds_the_whole_input(pattern: str, good: str, bad: str) -> None:
    request = chat_request(tools=[custom("shell", "regex", pattern)])
    assert shell_call(request, good)
    assert not shell_call(request, bad)
    assert not shell_call(request, good + "\n!")


def test_two_grammars_with_the_same_rule_names_keep_apart() -> None:
    names = 'start: last TEXT\nlast: "a"\nTEXT: "{"\nbefore: "no"\ncall_0_body: before\n%ignore " "\n'
    tools = [custom("shell", "lark", names), custom("other", "lark", names.replace('"a"', '"b"'))]
    request = chat_request(tools=tools)
    assert shell_call(request, "a{")
    assert shell_call(request, "a {")
    assert not shell_call(request, "b{")
    assert allows(matcher(request), "<|channel|>commentary to=functions.other<|message|>b{<|call|>")
    assert allows(matcher(request), FINAL + "any { TEXT<|return|>")


@pytest.mark.parametrize(
    "definition",
    [
        'start: "a" <|end|>',
        'start: "a" <[200007]>',
        'start: "a" <[*]>',
        'start: "a" @start',
        'start: "a"\n}\nanswer_body: %lark {\nstart: "b"',
        'start: "a"\n} | TEXT\nx: %lark { start: "b"',
        'begin: "no start"',
        "start: missing",
        'start: "unended',
        "start: /a(/",
        "start: /a/ & /b/",
        'start: "a" %lark {',
        "Speak politely.",
    ],
)
def test_a_grammar_that_is_wrong_or_reaches_out_of_itself_is_refused_by_its_field(definition: str) -> None:
    request = chat_request(tools=[function("first"), custom("shell", "lark", definition)])
    with pytest.raises(InvalidRequest) as caught:
        matcher(request)
    assert caught.value.param == "tools[1].format.definition"


@pytest.mark.parametrize("pattern", ["(", "a\\", "(?=a)b", r"(a)\1", "[z-a]", "*"])
def test_a_regex_that_cannot_be_compiled_is_refused_by_its_field(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        matcher(chat_request(tools=[custom("shell", "regex", pattern)]))
    assert caught.value.param == "tools[0].format.definition"


def test_a_string_pattern_or_comment_holds_no_reference() -> None:
    definition = 'start: "<|end|>@x" /<a>@[/]+/ "}" // see <this>, @that }\n# <|call|>\n'
    assert shell_call(
        chat_request(tools=[custom("shell", "lark", definition.replace("[/]", "[b]"))]), "<|end|>@x<a>@b}"
    )
