"""What one answer's deltas become: every cell of the table of turn.py, and what ends early."""

from typing import Any

import pytest

from apis.deltas import (
    Delta,
    FinishReason,
    Reasoning,
    Refusal,
    Text,
    TokenLogprob,
    ToolArguments,
    ToolCallStart,
    TopLogprob,
)
from apis.errors import UpstreamError
from apis.tool_runtime import Source
from providers.responses.events.ids import Ids
from providers.responses.events.output import Output
from providers.responses.run.turn import Turn, joined
from providers.responses.tools.offered import Toolbox
from providers.responses.tools.web_search.tool import NAME
from tests.support.models.recorded_turns import REQUEST, check_laws, finish, line, turn_of


def message(index: int, *texts: str, status: str = "completed", phase: str = "") -> list[str]:
    after = f" {phase}" if phase else ""
    whole = "".join(texts)
    return [
        f"{index} output_item.added message in_progress{after}",
        f"{index}.0 content_part.added output_text ''",
        *(f"{index}.0 output_text.delta {text!r}" for text in texts),
        f"{index}.0 output_text.done {whole!r}",
        f"{index}.0 content_part.done output_text {whole or ''!r}",
        f"{index} output_item.done message {status}{after}",
    ]


def refused(index: int, *texts: str, status: str = "completed") -> list[str]:
    return [each.replace("output_text", "refusal") for each in message(index, *texts, status=status)]


def thought(index: int, *texts: str, status: str = "completed") -> list[str]:
    return [
        each.replace("message", "reasoning")
        .replace("output_text.", "reasoning_text.")
        .replace("output_text", "reasoning_text")
        for each in message(index, *texts, status=status)
    ]


def call(index: int, *texts: str, status: str = "completed", kind: str = "function_call") -> list[str]:
    stem = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}[kind]
    return [
        f"{index} output_item.added {kind} in_progress",
        *(f"{index} {stem}.delta {text!r}" for text in texts),
        f"{index} {stem}.done {''.join(texts)!r}",
        f"{index} output_item.done {kind} {status}",
    ]


START = ToolCallStart("c1", "f")
ARGUMENTS = ToolArguments("c1", "{}")
OPEN_CALL, CLOSED_CALL = call(0, "{}")[:2], call(0, "{}")[2:]
SEARCHING = ["0 output_item.added web_search_call in_progress", "0 web_search_call.in_progress"]

TABLE: dict[str, tuple[list[Delta], list[str]]] = {
    "nothing": ([], []),
    "nothing, text": ([Text("a"), Text("b")], message(0, "a", "b")),
    "nothing, empty text": ([Text("")], message(0, "")),
    "nothing, reasoning": ([Reasoning("a"), Reasoning("b")], thought(0, "a", "b")),
    "nothing, refusal": ([Refusal("a"), Refusal("b")], refused(0, "a", "b")),
    "nothing, call": ([START, ARGUMENTS], call(0, "{}")),
    "nothing, call without arguments": ([START], call(0)),
    "nothing, custom call": (
        [ToolCallStart("c1", "f", custom=True), ToolArguments("c1", "x")],
        call(0, "x", kind="custom_tool_call"),
    ),
    "nothing, hosted call": ([ToolCallStart("c1", NAME), ARGUMENTS], SEARCHING),
    "message, text of another phase": (
        [Text("a", phase="commentary"), Text("b", phase="commentary"), Text("c", phase="final_answer")],
        [*message(0, "a", "b", phase="commentary"), *message(1, "c", phase="final_answer")],
    ),
    "message, text without phase after one with": (
        [Text("a", phase="commentary"), Text("b")],
        [*message(0, "a", phase="commentary"), *message(1, "b")],
    ),
    "message, refusal": (
        [Text("a"), Refusal("no"), Text("b")],
        [
            *message(0, "a")[:-1],
            "0.1 content_part.added refusal ''",
            "0.1 refusal.delta 'no'",
            "0.1 refusal.done 'no'",
            "0.1 content_part.done refusal 'no'",
            *(each.replace("0.0", "0.2") for each in message(0, "b")[1:]),
        ],
    ),
    "message with a phase, refusal": (
        [Text("a", phase="final_answer"), Refusal("no")],
        [
            *message(0, "a", phase="final_answer")[:-1],
            *(each.replace("0.0", "0.1") for each in refused(0, "no")[1:-1]),
            "0 output_item.done message completed final_answer",
        ],
    ),
    "message, reasoning": ([Text("a"), Reasoning("b")], [*message(0, "a"), *thought(1, "b")]),
    "message, call": ([Text("a"), START, ARGUMENTS], [*message(0, "a"), *call(1, "{}")]),
    "reasoning, text": ([Reasoning("a"), Text("b")], [*thought(0, "a"), *message(1, "b")]),
    "reasoning, refusal": ([Reasoning("a"), Refusal("b")], [*thought(0, "a"), *refused(1, "b")]),
    "reasoning, call": ([Reasoning("a"), START, ARGUMENTS], [*thought(0, "a"), *call(1, "{}")]),
    "reasoning, text, reasoning": (
        [Reasoning("a"), Text("b"), Reasoning("c")],
        [*thought(0, "a"), *message(1, "b"), *thought(2, "c")],
    ),
    "message, arguments of a call that stays open": (
        [START, Text("a"), ARGUMENTS, Text("b")],
        [
            "0 output_item.added function_call in_progress",
            *message(1, "a")[:3],
            "0 function_call_arguments.delta '{}'",
            "1.0 output_text.delta 'b'",
            "1.0 output_text.done 'ab'",
            "1.0 content_part.done output_text 'ab'",
            "1 output_item.done message completed",
            *CLOSED_CALL,
        ],
    ),
    "reasoning, arguments of a call that stays open": (
        [START, Reasoning("a"), ARGUMENTS],
        [
            "0 output_item.added function_call in_progress",
            *thought(1, "a")[:3],
            "0 function_call_arguments.delta '{}'",
            *thought(1, "a")[3:],
            *CLOSED_CALL,
        ],
    ),
    "interleaved calls": (
        [
            START,
            ToolCallStart("c2", "g"),
            ToolArguments("c2", "[1"),
            ToolArguments("c1", "{"),
            ToolArguments("c2", "]"),
            ToolArguments("c1", "}"),
        ],
        [
            "0 output_item.added function_call in_progress",
            "1 output_item.added function_call in_progress",
            "1 function_call_arguments.delta '[1'",
            "0 function_call_arguments.delta '{'",
            "1 function_call_arguments.delta ']'",
            "0 function_call_arguments.delta '}'",
            *CLOSED_CALL,
            "1 function_call_arguments.done '[1]'",
            "1 output_item.done function_call completed",
        ],
    ),
    "calls without ids": (
        [ToolCallStart("", "f"), ToolCallStart("", "g")],
        [
            "0 output_item.added function_call in_progress",
            "1 output_item.added function_call in_progress",
            *call(0)[1:],
            *call(1)[1:],
        ],
    ),
}


@pytest.mark.parametrize("together", [False, True], ids=["step by step", "in one step"])
@pytest.mark.parametrize(("deltas", "lines"), TABLE.values(), ids=TABLE)
def test_deltas_become_events(deltas: list[Delta], lines: list[str], together: bool) -> None:
    turn, output = turn_of()
    whole = [*deltas, finish()]
    events = turn.feed(whole) if together else [event for delta in whole for event in turn.feed([delta])]
    assert [line(event) for event in events] == lines
    assert turn.finish == finish()
    if not turn.hosted:
        check_laws(events, output, "completed")


CUTS: dict[str, tuple[list[Delta], list[str]]] = {
    "nothing": ([], []),
    "message": ([Text("a")], message(0, "a", status="incomplete")),
    "refusal": ([Refusal("a")], refused(0, "a", status="incomplete")),
    "reasoning": ([Reasoning("a")], thought(0, "a", status="incomplete")),
    "call": ([START, ARGUMENTS], call(0, "{}", status="incomplete")),
    "custom call": ([ToolCallStart("c1", "f", custom=True)], call(0, status="incomplete", kind="custom_tool_call")),
    "hosted call": ([ToolCallStart("c1", NAME)], [*SEARCHING, "0 output_item.done web_search_call incomplete"]),
    "message after a reasoning": (
        [Reasoning("a"), Text("b")],
        [*thought(0, "a"), *message(1, "b", status="incomplete")],
    ),
    "call after a message": ([Text("a"), START], [*message(0, "a"), *call(1, status="incomplete")]),
}


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@pytest.mark.parametrize(("deltas", "lines"), CUTS.values(), ids=CUTS)
def test_what_is_cut_off_is_incomplete(deltas: list[Delta], lines: list[str], reason: FinishReason) -> None:
    turn, output = turn_of()
    events = turn.feed([*deltas, finish(reason)])
    assert [line(event) for event in events] == lines
    assert not turn.hosted
    check_laws(events, output, "incomplete")


@pytest.mark.parametrize(("deltas", "lines"), CUTS.values(), ids=CUTS)
def test_what_breaks_off_is_incomplete_and_whole_as_far_as_it_got(deltas: list[Delta], lines: list[str]) -> None:
    turn, output = turn_of()
    events = [*turn.feed(deltas), *turn.break_off()]
    assert [line(event) for event in events] == lines
    check_laws(events, output, "failed")
    assert not turn.break_off()


def test_of_two_calls_that_are_cut_only_the_last_is_incomplete() -> None:
    turn, output = turn_of()
    turn.feed([START, ARGUMENTS, ToolCallStart("c2", "g"), ToolArguments("c2", "{"), finish("length")])
    assert [item.model_dump()["status"] for item in output.finished()] == ["completed", "incomplete"]


def test_breaking_off_after_the_end_changes_nothing() -> None:
    turn, output = turn_of()
    turn.feed([Text("a"), finish()])
    before = output.finished()
    assert not turn.break_off()
    assert output.finished() == before


def test_breaking_off_closes_all_that_is_open() -> None:
    turn, output = turn_of()
    turn.feed([START, ToolCallStart("c2", NAME), Text("a")])
    assert [
        line(event).rpartition(" ")[2] for event in turn.break_off() if event.type == "response.output_item.done"
    ] == ["incomplete"] * 3
    assert len(output.finished()) == 3


@pytest.mark.parametrize("name", ["f", NAME])
@pytest.mark.parametrize("again", ["f", NAME])
def test_two_calls_of_one_id_are_the_servers_fault(name: str, again: str) -> None:
    turn, output = turn_of()
    turn.feed([ToolCallStart("c1", name)])
    with pytest.raises(UpstreamError):
        turn.feed([ToolCallStart("c1", again)])
    assert len(output.items) == 1


def test_arguments_of_a_call_that_has_not_begun_are_the_servers_fault() -> None:
    turn, _ = turn_of()
    with pytest.raises(UpstreamError):
        turn.feed([ToolArguments("c1", "{}")])


def test_what_is_to_be_done_is_told_apart() -> None:
    turn, _ = turn_of()
    turn.feed([START, ToolCallStart("c2", NAME), ToolCallStart("c3", "g", custom=True), finish("tool_calls")])
    assert {key: each.name for key, each in turn.calls.items()} == {"c1": "f", "c3": "g"}
    assert [*turn.hosted] == ["c2"]


def test_a_second_turn_goes_on_where_the_first_ended() -> None:
    output = Output(Ids())
    events = [
        *Turn(output, Toolbox(REQUEST)).feed([Text("a"), finish()]),
        *Turn(output, Toolbox(REQUEST)).feed([Reasoning("b"), Text("c"), finish()]),
    ]
    assert [line(event) for event in events] == [*message(0, "a"), *thought(1, "b"), *message(2, "c")]
    ids = [item.id for item in output.finished()]
    assert len(set(ids)) == 3
    check_laws(events, output, "completed")


def test_logprobs_go_with_their_delta_and_with_the_whole() -> None:
    token = TokenLogprob("a", -0.5, b"a", (TopLogprob("b", -1.5, b"b"),))
    turn, output = turn_of()
    events = turn.feed([Text("a", (token,)), Text("b"), Text("c", (token,)), finish()])
    whole = {**vars_of(token), "top_logprobs": [vars_of(token.top[0])]}
    deltas = [event.model_dump()["logprobs"] for event in events if event.type == "response.output_text.delta"]
    assert [[one["token"] for one in each] for each in deltas] == [["a"], [], ["a"]]
    assert deltas[0][0]["logprob"] == -0.5
    [item] = output.finished()
    assert item.model_dump()["content"][0]["logprobs"] == [whole, whole]


def vars_of(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": [*token.bytes]}


def test_citations_become_links_and_annotations() -> None:
    sources = {1: Source("https://a.b/1", "One"), 2: Source("https://a.b/2", "")}
    turn, output = turn_of(sources)
    events = turn.feed([Text("See 【1"), Text("】, 【2†L1】."), finish()])
    assert [line(event) for event in events] == [
        "0 output_item.added message in_progress",
        "0.0 content_part.added output_text ''",
        "0.0 output_text.delta 'See '",
        "0.0 output_text.delta '([One](https://a.b/1))'",
        "0.0 output_text.annotation.added 0: https://a.b/1 4-26",
        "0.0 output_text.delta ', '",
        "0.0 output_text.delta '([https://a.b/2](https://a.b/2))'",
        "0.0 output_text.annotation.added 1: https://a.b/2 28-60",
        "0.0 output_text.delta '.'",
        "0.0 output_text.done 'See ([One](https://a.b/1)), ([https://a.b/2](https://a.b/2)).'",
        "0.0 content_part.done output_text 'See ([One](https://a.b/1)), ([https://a.b/2](https://a.b/2)).'",
        "0 output_item.done message completed",
    ]
    check_laws(events, output, "completed")


def test_a_mark_that_never_ends_is_told_when_the_text_ends() -> None:
    turn, output = turn_of({1: Source("https://a.b/1", "One")})
    events = [*turn.feed([Text("See 【1")]), *turn.break_off()]
    assert [line(event) for event in events][2:4] == ["0.0 output_text.delta 'See '", "0.0 output_text.delta '【1'"]
    check_laws(events, output, "failed")


TOKEN = TokenLogprob("c", -0.1, (99,))


@pytest.mark.parametrize(
    ("step", "whole"),
    [
        ([], []),
        ([Text("a")], [Text("a")]),
        ([Text("a"), Text("b"), finish()], [Text("ab"), finish()]),
        ([Reasoning("a"), Reasoning("b"), Text("c"), Text("d")], [Reasoning("ab"), Text("cd")]),
        ([Text("a"), Reasoning("b"), Text("c")], [Text("a"), Reasoning("b"), Text("c")]),
        (
            [Text("a", phase="commentary"), Text("b", phase="commentary"), Text("c", phase="final_answer"), Text("d")],
            [Text("ab", phase="commentary"), Text("c", phase="final_answer"), Text("d")],
        ),
        ([Text("a"), Text("b"), Text("c", (TOKEN,))], [Text("ab"), Text("c", (TOKEN,))]),
        ([Text("c", (TOKEN,)), Text("c", (TOKEN,))], [Text("c", (TOKEN,)), Text("c", (TOKEN,))]),
        ([Refusal("a"), Refusal("b")], [Refusal("a"), Refusal("b")]),
        ([ToolArguments("1", "a"), ToolArguments("2", "b")], [ToolArguments("1", "a"), ToolArguments("2", "b")]),
    ],
)
def test_what_is_shown_whole_is_joined_and_nothing_else(step: list[Delta], whole: list[Delta]) -> None:
    assert [*joined(step)] == whole
