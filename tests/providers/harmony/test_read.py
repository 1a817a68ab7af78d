"""The deltas that the reader makes of gpt-oss's output, be it well formed or not."""

from typing import Any, Literal

import pytest

from apis.deltas import Finish, ReasoningDelta, TextDelta, TokenLogprob, ToolArgumentsDelta, ToolCallStart, Usage
from providers.inference.harmony.token_cache import TokenCache, call_to_key, text_to_key
from providers.inference.harmony.vocabulary import load_vocabulary
from tests.providers.harmony.turns import READ_TOOLS as TOOLS
from tests.providers.harmony.turns import chat_request, custom, encode, function, joined, read, reader, said


def test_a_whole_turn_becomes_thought_preamble_and_answer() -> None:
    turn = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    deltas = read(turn)
    assert joined(deltas) == [
        ReasoningDelta("Think."),
        TextDelta("I look.", (), "commentary"),
        TextDelta("Done.", (), "final_answer"),
        Finish("stop", Usage(7, len(encode(turn)), 3, len(encode("Think.")))),
    ]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add<|constrain|>json",
        "<|channel|>commentary to=functions.add json",
        "<|channel|>commentary to=functions.add",
        " to=functions.add<|channel|>commentary <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
        " to=functions.add<|channel|>commentary",
        "<|channel|>analysis to=functions.add code",
    ],
)
def test_every_order_of_a_calls_header_is_understood_without_repair(header: str) -> None:
    one = reader(TOOLS)
    deltas = one.feed(encode(header + '<|message|>{"a": 1}<|call|>'))
    assert deltas == [ToolCallStart("call_1", "add"), ToolArgumentsDelta("call_1", '{"a": 1}')]
    (finish,) = one.finish("stop", input_tokens=1, cached_tokens=0)
    assert isinstance(finish, Finish)
    assert finish.reason == "tool_calls"
    assert one.repair_count == 0


@pytest.mark.parametrize(
    ("recipient", "name", "is_custom", "repairs"),
    [
        ("functions.add", "add", False, 0),
        ("files.find", "files.find", False, 0),
        ("functions.shell", "shell", True, 0),
        ("browser.search", "browser.search", False, 0),
        ("python", "python", True, 0),
        ("add", "add", False, 1),
        ("functions.files.find", "files.find", False, 1),
        ("functions.browser.open", "browser.open", False, 1),
        ("functions.python", "python", True, 1),
        ("functions.unknown", "unknown", False, 1),
        ("other.unknown", "other.unknown", False, 1),
    ],
)
def test_a_recipient_is_the_tool_that_is_meant(recipient: str, name: str, is_custom: bool, repairs: int) -> None:
    one = reader(TOOLS)
    channel = "analysis" if name.startswith(("python", "browser.")) else "commentary"
    deltas = one.feed(encode(f"<|channel|>{channel} to={recipient}<|message|>x<|call|>"))
    assert deltas == [ToolCallStart("call_1", name, is_custom), ToolArgumentsDelta("call_1", "x")]
    assert one.repair_count == repairs


def test_arguments_stream_as_they_are_made() -> None:
    one = reader(TOOLS)
    assert one.feed(encode("<|channel|>commentary to=functions.add<|message|>")) == [ToolCallStart("call_1", "add")]
    for token, text in zip(encode('{"a":1'), ['{"', "a", '":', "1"], strict=True):
        assert one.feed([token]) == [ToolArgumentsDelta("call_1", text)]


@pytest.mark.parametrize(
    ("mark", "text", "expected"),
    [
        ("", "ls -l", "ls -l"),
        ("", '{"input":"ls \\"a\\"\\n"}', 'ls "a"\n'),
        (" <|constrain|>json", '{ "input" : "ls" }', "ls"),
        (" json", '{"input": "ls"}', "ls"),
        ("", '{"other": 1}', '{"other": 1}'),
        ("", '{"inp', '{"inp'),
        ("", "{", "{"),
    ],
)
def test_a_custom_tools_input_is_raw_also_when_the_model_wrapped_it(mark: str, text: str, expected: str) -> None:
    turn = encode(f"<|channel|>commentary to=functions.shell{mark}<|message|>{text}<|call|>")
    for cuts in ((), range(len(turn))):
        assert said(turn, TOOLS, cuts=cuts) == [
            ToolCallStart("call_1", "shell", True),
            ToolArgumentsDelta("call_1", expected),
        ]


def test_the_input_of_a_tool_with_a_grammar_is_never_unwrapped() -> None:
    request = chat_request(tools=[custom("shell", "regex", ".*")])
    turn = '<|channel|>commentary to=functions.shell<|message|>{"input":"x"}<|call|>'
    assert said(turn, request)[1] == ToolArgumentsDelta("call_1", '{"input":"x"}')


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("Hello there.<|return|>", [TextDelta("Hello there.", (), "final_answer")]),
        ("<|message|>Hello.<|return|>", [TextDelta("Hello.", (), "final_answer")]),
        ("<|channel|>final Hello you<|return|>", [TextDelta("Hello you", (), "final_answer")]),
        ("<|channel|>final<|return|>", []),
        ("<|return|>", []),
        ("", []),
        ("<|channel|>strange<|message|>Hello.<|return|>", [TextDelta("Hello.", (), "final_answer")]),
        (
            "<|channel|>final<|message|>One<|message|> two<|constrain|>.<|return|>",
            [TextDelta("One two.", (), "final_answer")],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes<|return|>",
            [ReasoningDelta("Hm"), TextDelta("Yes", (), "final_answer")],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes<|return|>",
            [ReasoningDelta("Hm"), TextDelta("Yes", (), "final_answer")],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|end|>Yes, that is right and so it will be.<|return|>",
            [ReasoningDelta("Hm"), TextDelta("Yes, that is right and so it will be.", (), "final_answer")],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistantfinal<|message|>Yes<|return|>",
            [ReasoningDelta("Hm"), TextDelta("Yes", (), "final_answer")],
        ),
        (
            "<|channel|>analysis<|message|>One<|end|><|start|>assistant<|channel|>analysis<|message|>Two<|end|>",
            [ReasoningDelta("One"), ReasoningDelta("Two", begins_message=True)],
        ),
        (
            "<|channel|>final<|message|>A<|end|><|start|>functions.add to=assistant<|channel|>commentary<|message|>3"
            "<|end|><|start|>user<|message|>More<|end|><|start|>assistant<|channel|>commentary<|message|>B<|end|>",
            [TextDelta("A", (), "final_answer"), TextDelta("B", (), "commentary")],
        ),
        (
            "<|channel|>commentary to=functions.add<|call|>",
            [ToolCallStart("call_1", "add"), ToolArgumentsDelta("call_1", "{}")],
        ),
        ("<|channel|>comm", []),
        ("<|channel|>final<|message|>A<|end|><|start|>assis", [TextDelta("A", (), "final_answer")]),
        ("<|channel|>commentary to=functions.add <|constrain|>", []),
    ],
)
def test_malformed_harmony_is_corrected(turn: str, expected: list[Any]) -> None:
    ids = encode(turn)
    assert said(ids, TOOLS) == expected
    assert said(ids, TOOLS, cuts=range(len(ids))) == expected


def test_a_long_answer_without_a_header_is_not_held_back() -> None:
    one = reader()
    deltas = one.feed(encode("It is well known that an answer may come without any header at all"))
    assert isinstance(deltas[0], TextDelta)
    assert deltas[0].phase == "final_answer"


def test_only_its_own_token_releases_a_call() -> None:
    begun = '<|channel|>commentary to=functions.add<|message|>{"a"'
    cases: tuple[tuple[str, Literal["stop", "length"], str], ...] = (
        (begun, "length", "length"),
        (begun, "stop", "length"),
        (begun + "<|call|>", "stop", "tool_calls"),
        (begun + "<|end|>", "stop", "length"),
        (begun + "<|return|>", "stop", "length"),
        (begun + "<|start|>assistant<|channel|>final<|message|>Done<|return|>", "stop", "length"),
        (begun + "<|end|>" + begun + "<|call|>", "stop", "length"),
        (begun + "<|call|>", "length", "length"),
    )
    for turn, reason, expected in cases:
        finish = read(turn, TOOLS, reason=reason)[-1]
        assert isinstance(finish, Finish)
        assert finish.reason == expected


def test_finish_comes_once() -> None:
    one = reader()
    assert len(one.finish("stop", input_tokens=0, cached_tokens=0)) == 1
    assert one.finish("stop", input_tokens=0, cached_tokens=0) == []
    assert one.feed(encode("<|channel|>final<|message|>late")) == []


def test_a_character_split_over_tokens_comes_whole_and_a_broken_one_is_replaced() -> None:
    start, smile = encode("<|channel|>final<|message|>"), encode("🜁")
    assert len(smile) > 1
    one = reader()
    assert one.feed([*start, *smile[:-1]]) == []
    assert one.feed(smile[-1:]) == [TextDelta("🜁", (), "final_answer")]
    assert said([*start, *smile[:-1]]) == [TextDelta("\ufffd", (), "final_answer")]
    assert said([*start, *smile[:-1], *encode("a<|return|>")]) == [TextDelta("\ufffda", (), "final_answer")]


# --- stop strings ----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_wherever_tokens_cut_it() -> None:
    text = "The answer is forty-two. STOP HERE please"
    for stop in (". STOP", "P H", "forty-two", "The", " STOP HERE please", "e"):
        ids = [
            *encode(
                "<|channel|>analysis<|message|>STOP HERE, The e<|end|><|start|>assistant<|channel|>final<|message|>"
            )
        ]
        ids += load_vocabulary().encode(text)
        for cuts in ((), range(len(ids))):
            deltas = said(ids, chat_request(stop=[stop, "never"]), cuts=cuts)
            rest = text.partition(stop)[0]
            assert deltas == [
                ReasoningDelta("STOP HERE, The e"),
                *([TextDelta(rest, (), "final_answer")] if rest else []),
            ]


def test_nothing_is_wanted_after_a_stop_string() -> None:
    one = reader(chat_request(stop="##", tools=[function("add")]))
    assert one.feed(encode("<|channel|>final<|message|>a ##")) == [TextDelta("a ", (), "final_answer")]
    assert one.is_stopped
    assert (
        one.feed(encode("<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>")) == []
    )
    assert joined(one.finish("stop", input_tokens=0, cached_tokens=0))[-1] == Finish(
        "stop", Usage(0, one.output_tokens), "##"
    )


def test_the_beginning_of_a_stop_string_is_held_back_and_comes_when_it_was_none() -> None:
    one = reader(chat_request(stop="###"))
    assert one.feed(encode("<|channel|>final<|message|>a #")) == [TextDelta("a ", (), "final_answer")]
    assert one.feed(encode("b")) == [TextDelta("#b", (), "final_answer")]
    assert one.feed(encode(" ##")) == [TextDelta(" ", (), "final_answer")]
    assert one.finish("stop", input_tokens=0, cached_tokens=0)[0] == TextDelta("##", (), "final_answer")


# --- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_answers_tokens_and_none_is_lost() -> None:
    ids = encode(
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi 🜁, no<|return|>"
    )
    logprobs = [TokenLogprob(str(token), -float(at), b"") for at, token in enumerate(ids)]
    first = len(encode("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>"))
    for step in (1, 2, len(ids)):
        one = reader()
        deltas = [
            delta
            for at in range(0, len(ids), step)
            for delta in one.feed(ids[at : at + step], logprobs[at : at + step])
        ]
        delta_logprobs = [logprob for delta in deltas if isinstance(delta, TextDelta) for logprob in delta.logprobs]
        assert delta_logprobs == logprobs[first:-1]


def test_logprobs_of_text_that_a_stop_string_cut_off_are_not_sent() -> None:
    ids = encode("<|channel|>final<|message|>one two STOP")
    logprobs = [TokenLogprob(str(token), 0.0, b"") for token in ids]
    (delta,) = reader(chat_request(stop=" STOP")).feed(ids, logprobs)
    assert isinstance(delta, TextDelta)
    assert list(delta.logprobs) == logprobs[3:5]


# --- the memo --------------------------------------------------------------------------------------------------------


def test_the_memo_gets_the_very_ids_of_well_formed_messages() -> None:
    memo = TokenCache()
    turns = (
        "<|channel|>analysis<|message|>Hm<|end|>",
        "<|start|>assistant<|channel|>commentary<|message|>I look<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
    )
    one = reader(TOOLS, memo)
    one.feed([*encode(turns[0]), *encode(turns[1]), *encode(turns[2])])
    assert list(memo.get(text_to_key("analysis", "Hm")) or ()) == encode("<|start|>assistant" + turns[0])
    assert list(memo.get(text_to_key("commentary", "I look")) or ()) == encode(turns[1])
    assert list(memo.get(call_to_key("functions.add", "{}", custom=False)) or ()) == encode(turns[2])
    reader(TOOLS, memo).feed(encode("<|channel|>final<|message|>Yes<|return|>"))
    assert list(memo.get(text_to_key("final", "Yes")) or ()) == encode(
        "<|start|>assistant<|channel|>final<|message|>Yes<|end|>"
    )


def test_the_memo_gets_nothing_that_was_cut_off_or_put_right() -> None:
    memo = TokenCache()
    for turn in (
        "<|channel|>final<|message|>Cut",
        "<|channel|>analysis<|message|>Cut<|start|>",
        "<|channel|>strange<|message|>Cut<|return|>",
        "<|channel|>final<|message|>C<|constrain|>ut<|return|>",
        "<|end|><|channel|>final<|message|>Cut<|return|>",
    ):
        one = reader(TOOLS, memo)
        one.feed(encode(turn))
        one.finish("stop", input_tokens=0, cached_tokens=0)
    assert memo.get(text_to_key("final", "Cut")) is None
    assert memo.get(text_to_key("analysis", "Cut")) is None
