"""Harmony as models in the field write it: texts and calls come whole under every form of header."""

import json
from pathlib import Path
from typing import Any

import pytest

from apis.deltas import Finish, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from providers.inference.harmony.token_cache import TokenCache, call_to_key
from tests.providers.harmony.turns import chat_request, custom, decode, encode, function, read, reader, said

FIELD = Path(__file__).parents[2] / "support/data/field"
TOOLS = chat_request(
    tools=[
        function("lookup"),
        function("look"),
        function("w-1"),
        function("find", namespace="files"),
        custom("shell"),
        {"type": "browser"},
        {"type": "python"},
    ]
)
CALL = [ToolCallStart("call_1", "lookup"), ToolArgumentsDelta("call_1", '{"q":"a"}')]
LINES = "Here is the list:\n- one\n- two\n\n```py\nif x:\n    y = 1\n```\n"


def recorded(name: str) -> list[int]:
    """The tokens of a recorded answer."""
    record: dict[str, Any] = json.loads((FIELD / f"{name}.harmony.json").read_text())
    assert decode(record["tokens"]) == record["text"]
    ids: list[int] = record["tokens"]
    return ids


def answer(text: str) -> list[Any]:
    return [TextDelta(text, (), "final_answer")]


def check(turn: str | list[int], expected: list[Any], reason: str = "stop") -> None:
    """The turn is read as expected, however it is cut."""
    ids = encode(turn) if isinstance(turn, str) else turn
    assert said(ids, TOOLS) == expected
    assert said(ids, TOOLS, cuts=range(len(ids))) == expected
    finish = read(ids, TOOLS)[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nomsg_lines", answer(LINES)),
        ("nomsg_glued", answer("Hello there, friend.")),
        ("nomsg_json_pretty", answer('\n{\n  "a": 1,\n  "b": "two  spaces"\n}')),
        ("chan_qq", [ReasoningDelta("Hmm."), *answer("Hello there.")]),
    ],
)
def test_a_recorded_text_is_read_as_it_was_written(name: str, expected: list[Any]) -> None:
    """The bytes after the channel's name are the text."""
    check(recorded(name), expected)


@pytest.mark.parametrize("name", ["call_chan_suffix", "suffix5", "call_glued", "call_return"])
def test_a_recorded_call_is_the_call(name: str) -> None:
    """The first recipient counts, and whole arguments are a whole call."""
    check(recorded(name), CALL, "tool_calls")


TEXTS: dict[str, list[Any]] = {
    "<|channel|>final Hello  two\tblanks \n<|return|>": answer("Hello  two\tblanks \n"),
    "<|channel|>final\r\nOne\r\n\tTwo<|return|>": answer("\r\nOne\r\n\tTwo"),
    "<|channel|>finalÉtude — 日本語 🜁<|return|>": answer("Étude — 日本語 🜁"),
    "<|channel|>final Set x to=5 and json to text.<|return|>": answer("Set x to=5 and json to text."),
    "<|channel|>final The channel commentary to=functions.lookup<|end|>": answer(
        "The channel commentary to=functions.lookup"
    ),
    '<|channel|>final json{"a": 1}<|return|>': answer('{"a": 1}'),
    '<|channel|>final <|constrain|>json{"a": 1}<|return|>': answer('{"a": 1}'),
    '<|channel|>final <|constrain|>json\n{"a": 1}\n<|return|>': answer('\n{"a": 1}\n'),
    "<|channel|>final<|constrain|>Hello.<|return|>": answer("Hello."),
    "<|channel|>finalHi": answer("Hi"),
    "<|channel|>analysis I think.<|channel|>final Hello.<|return|>": [ReasoningDelta("I think."), *answer("Hello.")],
    "<|channel|>analysisHmm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>": [
        ReasoningDelta("Hmm"),
        *answer("Yes"),
    ],
    "<|channel|>analysis Hmm.<|start|>assistant<|channel|>final Yes<|return|>": [
        ReasoningDelta("Hmm."),
        *answer("Yes"),
    ],
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistantfinal Yes, it is.<|return|>": [
        ReasoningDelta("Hm"),
        *answer("Yes, it is."),
    ],
    "<|channel|>analysis<|message|>Hm<|end|><|start|>assistantHello you.<|return|>": [
        ReasoningDelta("Hm"),
        *answer("Hello you."),
    ],
    "analysis of the data is done<|return|>": answer("analysis of the data is done"),
    "<|channel|>commentary I look it up.<|end|>": [TextDelta("I look it up.", (), "commentary")],
    "<|channel|>?<|channel|>final<|message|>Hello.<|return|>": answer("Hello."),
    "<|channel|>!!! <|end|><|start|>assistant<|channel|>final Hello.<|return|>": answer("Hello."),
    "<|channel|>thinking<|return|>": [],
    "<|channel|>final<|channel|>analysis<|message|>Hm<|end|>": [ReasoningDelta("Hm")],
    "<|channel|>Here is an answer that has no channel at all, but is long enough.<|return|>": answer(
        "Here is an answer that has no channel at all, but is long enough."
    ),
    "<|channel|>final " + "word and more of it, \n" * 100 + "<|return|>": answer("word and more of it, \n" * 100),
}


@pytest.mark.parametrize("turn", TEXTS)
def test_a_header_without_its_end_goes_on_with_the_text(turn: str) -> None:
    """Wherever the header ends, and however its words are glued."""
    check(turn, TEXTS[turn])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.lookup<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.lookup<|channel|>analysis<|message|>",
        "<|channel|>commentary to=functions.lookup json<|channel|>commentary to=functions.look<|message|>",
        " to=functions.lookup<|channel|>commentary to=functions.look<|message|>",
        "<|channel|>final to=functions.lookup<|message|>",
        "<|channel|>commentary to = functions.lookup<|message|>",
        "<|channel|>commentaryto=functions.lookup<|message|>",
        "<|channel|>commentary\tto=functions.lookup\r\n<|constrain|>json<|message|>",
        "<|channel|>to=functions.lookup<|message|>",
        "<|channel|>functions.lookup<|message|>",
        "<|constrain|>json to=functions.lookup<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.lookupcode<|message|>",
        "<|channel|>commentary to=functions.lookupcommentary json<|message|>",
        "<|channel|>commentary to=functions.lookup:json<|message|>",
        "<|channel|>commentary to=lookupjson<|message|>",
        "<|channel|>commentary to=functions.lookup?<|message|>",
        "<|channel|>commentary to=functions.lookup() json<|message|>",
        "<|channel|>commentary to=functions.lookup",
        "<|channel|>commentary to=functions.lookup ",
        "<|channel|>commentary to=functions.lookup json",
        "<|channel|>commentary to=functions.lookupjson ",
        "<|channel|>commentary to=functions.lookup <|constrain|>json",
        "<|channel|>commentary to=functions.lookup<|channel|>commentary <|constrain|>json",
        " to=functions.lookup",
    ],
)
def test_the_first_recipient_counts(header: str) -> None:
    """A header that names a tool is a call, with any text after the name, and without `<|message|>` too."""
    check(header + '{"q":"a"}<|call|>', CALL, "tool_calls")


@pytest.mark.parametrize(
    ("recipient", "name"),
    [
        ("functions.lookup_all", "lookup_all"),
        ("functions.lookups", "lookups"),
        ("functions.look", "look"),
        ("functions.lookjson", "look"),
        ("functions.w-1", "w-1"),
        ("functions.w-1json", "w-1"),
        ("files.findjson", "files.find"),
        ("functions.shelltext", "shell"),
        ("browser.opencode", "browser.open"),
        ("pythoncode", "python"),
    ],
)
def test_words_that_are_glued_to_a_name_are_no_part_of_it(recipient: str, name: str) -> None:
    """Other letters are: there the model means another tool."""
    (start, _) = said(f"<|channel|>commentary to={recipient}<|message|>x<|call|>", TOOLS)
    assert isinstance(start, ToolCallStart)
    assert start.name == name


BEGUN = "<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>"
ENDS = ["<|return|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", ""]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("arguments", ['{"q":"a"}', '{"q":"a"}\n', " []"])
def test_whole_arguments_are_a_whole_call(end: str, arguments: str) -> None:
    """Every token that can end it is accepted."""
    deltas = [CALL[0], ToolArgumentsDelta("call_1", arguments.lstrip())]
    check(BEGUN + arguments + end, deltas, "tool_calls")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("arguments", ['{"q":"a', '{"q":', "{", '{"a":1}}', "x"])
def test_arguments_that_are_not_whole_are_no_call(end: str, arguments: str) -> None:
    """Nothing that follows is read."""
    check(
        BEGUN + arguments + end + ("Late." if end.endswith("<|message|>") else ""),
        said(BEGUN + arguments, TOOLS),
        "length",
    )


def test_a_limit_of_tokens_ends_no_call() -> None:
    """The engine has cut the output, even if it was at a good place."""
    finish = read(BEGUN + '{"q":"a"}', TOOLS, reason="length")[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == "length"


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("<|channel|>commentary to=functions.shell<|message|>ls -l<|end|>", "tool_calls"),
        ("<|channel|>commentary to=functions.shell<|message|>ls -l<|return|>", "tool_calls"),
        ('<|channel|>commentary to=functions.shell json<|message|>{"input":"ls -l"}<|end|>', "tool_calls"),
        ('<|channel|>commentary to=functions.shell<|message|>{"input":"ls -l"}<|end|>', "tool_calls"),
        ('<|channel|>commentary to=functions.shell<|message|>{"input":"ls -l<|end|>', "length"),
        ("<|channel|>commentary to=functions.shell<|message|>ls -l", "length"),
        ("<|channel|>commentary to=functions.shell<|message|>ls -l<|start|>assistant", "length"),
    ],
)
def test_a_token_that_ends_a_message_ends_the_input_of_a_custom_tool(turn: str, reason: str) -> None:
    """Text does not say by itself that it is whole."""
    check(turn, [ToolCallStart("call_1", "shell", True), ToolArgumentsDelta("call_1", "ls -l")], reason)


def test_calls_that_another_token_ends_are_all_read() -> None:
    """One turn has several calls."""
    second = BEGUN.replace("lookup", "look").replace("<|channel|>", "<|start|>assistant<|channel|>")
    turn = f'{BEGUN}{{"q":"a"}}<|end|>{second}{{}}<|end|>'
    check(turn, [*CALL, ToolCallStart("call_2", "look"), ToolArgumentsDelta("call_2", "{}")], "tool_calls")


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>", "<|end|>"])
@pytest.mark.parametrize("blank", ["", " ", "\n\t "])
def test_blank_arguments_are_an_empty_object(blank: str, end: str) -> None:
    """Clients parse the arguments."""
    check(BEGUN + blank + end, [CALL[0], ToolArgumentsDelta("call_1", "{}")], "tool_calls")


def test_a_call_without_arguments_comes_back_as_the_model_wrote_it() -> None:
    """The cache knows its tokens by what clients send back."""
    cache = TokenCache()
    one = reader(TOOLS, cache)
    one.feed(encode(BEGUN + "<|call|>"))
    assert list(cache.get(call_to_key("functions.lookup", "{}", custom=False)) or ()) == encode(
        f"<|start|>assistant{BEGUN}<|call|>"
    )


@pytest.mark.parametrize("channel", ["thinking", "thought", "strange", "summary"])
def test_a_message_on_an_unknown_channel_is_the_answer_only_where_it_ends_as_one(channel: str) -> None:
    """Before another message it is reasoning, and so is what is cut off."""
    message = f"<|channel|>{channel}<|message|>Hm, so."
    final = "<|channel|>final<|message|>Yes<|return|>"
    for end in ("<|end|><|start|>assistant", "<|start|>assistant", ""):
        check(message + end + final, [ReasoningDelta("Hm, so."), *answer("Yes")])
    check(message, [ReasoningDelta("Hm, so.")])
    check(message + "<|return|>", answer("Hm, so."))


PARALLEL = "<|channel|>commentary to=multi_tool_use.parallel <|constrain|>json<|message|>"


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|return|>", ""])
def test_calls_in_one_message_are_each_a_call(end: str) -> None:
    uses: list[dict[str, Any]] = [
        {"recipient_name": "functions.lookup", "parameters": {"q": "a"}},
        {"recipient_name": "functions.look", "parameters": {}},
    ]
    expected = [
        CALL[0],
        ToolArgumentsDelta("call_1", '{"q": "a"}'),
        ToolCallStart("call_2", "look"),
        ToolArgumentsDelta("call_2", "{}"),
    ]
    check(PARALLEL + json.dumps({"tool_uses": uses}) + end, expected, "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"tool_uses": []}',
        '{"tool_uses": [{"recipient_name": "functions.lookup", "parameters": 5}]}',
        '{"tool_uses": [{"recipient_name": 5, "parameters": {}}]}',
        "[]",
        "x",
    ],
)
def test_a_message_of_calls_that_is_none_calls_no_tool(text: str) -> None:
    """The model reads that there is no such tool."""
    expected = [ToolCallStart("call_1", "multi_tool_use.parallel"), ToolArgumentsDelta("call_1", text)]
    check(f"{PARALLEL}{text}<|call|>", expected, "tool_calls")
    check(
        PARALLEL + '{"tool_uses": [{"recipient_name": "functions.l',
        [expected[0], ToolArgumentsDelta("call_1", '{"tool_uses": [{"recipient_name": "functions.l')],
        "length",
    )


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>", "<|end|>"])
@pytest.mark.parametrize("fenced", ["```json\n{}\n```", "``` {} ```", "\n```JSON{}```\n"])
def test_a_fence_around_whole_arguments_is_no_part_of_them(fenced: str, end: str) -> None:
    check(BEGUN + fenced.replace("{}", '{"q":"a"}') + end, CALL, "tool_calls")


@pytest.mark.parametrize("fenced", ['```json\n{"q":"a"}', '```json\n{"q":\n```', '```json\n{"q":"a"}\n``` It is.'])
def test_a_fence_around_something_else_stays(fenced: str) -> None:
    """Such arguments are not JSON, so that no tool gets them."""
    check(f"{BEGUN}{fenced}<|call|>", [CALL[0], ToolArgumentsDelta("call_1", fenced)], "tool_calls")
    check(f"{BEGUN}{fenced}<|end|>", [CALL[0], ToolArgumentsDelta("call_1", fenced)], "length")
