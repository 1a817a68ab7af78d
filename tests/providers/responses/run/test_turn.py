"""The events that one answer's deltas become: every cell of the table of turn.py, and answers that end early."""

from typing import Any

import pytest

from apis.deltas import (
    Delta,
    FinishReason,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolArgumentsDelta,
    ToolCallStart,
    TopLogprob,
)
from apis.errors import UpstreamError
from apis.tool_runtime import Source
from providers.responses.events.ids import ResponseIds
from providers.responses.events.output import ResponseOutput
from providers.responses.run.turn import TurnStream, join_deltas
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.web_search.functions import WEB_SEARCH_FUNCTION
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
ARGUMENTS = ToolArgumentsDelta("c1", "{}")
OPEN_CALL, CLOSED_CALL = call(0, "{}")[:2], call(0, "{}")[2:]
SEARCHING = ["0 output_item.added web_search_call in_progress", "0 web_search_call.in_progress"]

TABLE: dict[str, tuple[list[Delta], list[str]]] = {
    "nothing": ([], []),
    "nothing, text": ([TextDelta("a"), TextDelta("b")], message(0, "a", "b")),
    "nothing, empty text": ([TextDelta("")], message(0, "")),
    "nothing, reasoning": ([ReasoningDelta("a"), ReasoningDelta("b")], thought(0, "a", "b")),
    "nothing, refusal": ([RefusalDelta("a"), RefusalDelta("b")], refused(0, "a", "b")),
    "nothing, call": ([START, ARGUMENTS], call(0, "{}")),
    "nothing, call without arguments": ([START], call(0, "{}")),
    "call, blanks before the arguments": (
        [START, ToolArgumentsDelta("c1", " "), ToolArgumentsDelta("c1", "\n{}")],
        call(0, " \n{}"),
    ),
    "call, nothing but blanks": ([START, ToolArgumentsDelta("c1", " "), ToolArgumentsDelta("c1", "\n")], call(0, "{}")),
    "custom call, blanks": (
        [ToolCallStart("c1", "f", custom=True), ToolArgumentsDelta("c1", " ")],
        call(0, " ", kind="custom_tool_call"),
    ),
    "nothing, custom call": (
        [ToolCallStart("c1", "f", custom=True), ToolArgumentsDelta("c1", "x")],
        call(0, "x", kind="custom_tool_call"),
    ),
    "nothing, hosted call": ([ToolCallStart("c1", WEB_SEARCH_FUNCTION), ARGUMENTS], SEARCHING),
    "message, text of another phase": (
        [TextDelta("a", phase="commentary"), TextDelta("b", phase="commentary"), TextDelta("c", phase="final_answer")],
        [*message(0, "a", "b", phase="commentary"), *message(1, "c", phase="final_answer")],
    ),
    "message, text without phase after one with": (
        [TextDelta("a", phase="commentary"), TextDelta("b")],
        [*message(0, "a", phase="commentary"), *message(1, "b")],
    ),
    "message, refusal": (
        [TextDelta("a"), RefusalDelta("no"), TextDelta("b")],
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
        [TextDelta("a", phase="final_answer"), RefusalDelta("no")],
        [
            *message(0, "a", phase="final_answer")[:-1],
            *(each.replace("0.0", "0.1") for each in refused(0, "no")[1:-1]),
            "0 output_item.done message completed final_answer",
        ],
    ),
    "message, reasoning": ([TextDelta("a"), ReasoningDelta("b")], [*message(0, "a"), *thought(1, "b")]),
    "message, call": ([TextDelta("a"), START, ARGUMENTS], [*message(0, "a"), *call(1, "{}")]),
    "reasoning, text": ([ReasoningDelta("a"), TextDelta("b")], [*thought(0, "a"), *message(1, "b")]),
    "reasoning, refusal": ([ReasoningDelta("a"), RefusalDelta("b")], [*thought(0, "a"), *refused(1, "b")]),
    "reasoning, call": ([ReasoningDelta("a"), START, ARGUMENTS], [*thought(0, "a"), *call(1, "{}")]),
    "reasoning, text, reasoning": (
        [ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c")],
        [*thought(0, "a"), *message(1, "b"), *thought(2, "c")],
    ),
    "message, arguments of a call that stays open": (
        [START, TextDelta("a"), ARGUMENTS, TextDelta("b")],
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
        [START, ReasoningDelta("a"), ARGUMENTS],
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
            ToolArgumentsDelta("c2", "[1"),
            ToolArgumentsDelta("c1", "{"),
            ToolArgumentsDelta("c2", "]"),
            ToolArgumentsDelta("c1", "}"),
        ],
        [*call(0, "{", "}")[:3], *call(1, "[1]")[:2], *CLOSED_CALL, *call(1, "[1]")[2:]],
    ),
    "whole call, call": (
        [START, ARGUMENTS, ToolCallStart("c2", "g"), ToolArgumentsDelta("c2", "{"), ToolArgumentsDelta("c2", "}")],
        [*OPEN_CALL, *call(1, "{", "}")[:3], *CLOSED_CALL, *call(1, "{", "}")[3:]],
    ),
    "call without arguments, call": (
        [START, ToolCallStart("c2", "g"), ToolArgumentsDelta("c2", "{"), ToolArgumentsDelta("c2", "}")],
        [*OPEN_CALL, *call(1, "{}")[:2], *CLOSED_CALL, *call(1, "{}")[2:]],
    ),
    "interleaved calls, text": (
        [START, ToolCallStart("c2", "g"), ToolArgumentsDelta("c2", "[]"), ARGUMENTS, TextDelta("a")],
        [*OPEN_CALL, *call(1, "[]")[:2], *message(2, "a")[:3], *message(2, "a")[3:], *CLOSED_CALL, *call(1, "[]")[2:]],
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
    if not turn.hosted_calls:
        check_laws(events, output, "completed")


CUTS: dict[str, tuple[list[Delta], list[str]]] = {
    "nothing": ([], []),
    "message": ([TextDelta("a")], message(0, "a", status="incomplete")),
    "refusal": ([RefusalDelta("a")], refused(0, "a", status="incomplete")),
    "reasoning": ([ReasoningDelta("a")], thought(0, "a", status="incomplete")),
    "call": ([START, ARGUMENTS], call(0, "{}", status="incomplete")),
    "custom call": ([ToolCallStart("c1", "f", custom=True)], call(0, status="incomplete", kind="custom_tool_call")),
    "hosted call": (
        [ToolCallStart("c1", WEB_SEARCH_FUNCTION)],
        [*SEARCHING, "0 output_item.done web_search_call incomplete"],
    ),
    "message after a reasoning": (
        [ReasoningDelta("a"), TextDelta("b")],
        [*thought(0, "a"), *message(1, "b", status="incomplete")],
    ),
    "call after a message": ([TextDelta("a"), START], [*message(0, "a"), *call(1, status="incomplete")]),
    "interleaved calls": (
        [START, ToolCallStart("c2", "g"), ToolArgumentsDelta("c2", "["), ToolArgumentsDelta("c1", "{")],
        [
            *(*call(0, "{")[:2], *call(1, "[")[:2]),
            *(*call(0, "{", status="incomplete")[2:], *call(1, "[", status="incomplete")[2:]),
        ],
    ),
}


@pytest.mark.parametrize("reason", ["length", "content_filter"])
@pytest.mark.parametrize(("deltas", "lines"), CUTS.values(), ids=CUTS)
def test_what_is_cut_off_is_incomplete(deltas: list[Delta], lines: list[str], reason: FinishReason) -> None:
    turn, output = turn_of()
    events = turn.feed([*deltas, finish(reason)])
    assert [line(event) for event in events] == lines
    assert not turn.hosted_calls
    check_laws(events, output, "incomplete")


@pytest.mark.parametrize(("deltas", "lines"), CUTS.values(), ids=CUTS)
def test_what_breaks_off_is_incomplete_and_whole_as_far_as_it_got(deltas: list[Delta], lines: list[str]) -> None:
    turn, output = turn_of()
    events = [*turn.feed(deltas), *turn.close_open_items()]
    assert [line(event) for event in events] == lines
    check_laws(events, output, "failed")
    assert not turn.close_open_items()


def test_of_two_calls_that_are_cut_only_the_last_is_incomplete() -> None:
    turn, output = turn_of()
    turn.feed([START, ARGUMENTS, ToolCallStart("c2", "g"), ToolArgumentsDelta("c2", "{"), finish("length")])
    assert [item.model_dump()["status"] for item in output.finished_items()] == ["completed", "incomplete"]


def test_breaking_off_after_the_end_changes_nothing() -> None:
    turn, output = turn_of()
    turn.feed([TextDelta("a"), finish()])
    before = output.finished_items()
    assert not turn.close_open_items()
    assert output.finished_items() == before


def test_breaking_off_closes_all_that_is_open() -> None:
    turn, output = turn_of()
    turn.feed([START, ToolCallStart("c2", WEB_SEARCH_FUNCTION), TextDelta("a")])
    assert [
        line(event).rpartition(" ")[2] for event in turn.close_open_items() if event.type == "response.output_item.done"
    ] == ["incomplete"] * 3
    assert len(output.finished_items()) == 3


def test_the_items_of_sequential_calls_open_as_the_calls_begin() -> None:
    """A call waits for another one only where that may still grow."""
    turn, output = turn_of()
    turn.feed([START, ToolArgumentsDelta("c1", '{"a": {}'), ToolArgumentsDelta("c1", "}"), ToolCallStart("c2", "g")])
    assert len(output.items) == 2
    turn.feed([ToolArgumentsDelta("c2", "{"), ToolCallStart("c3", "f")])
    assert len(output.items) == 2


@pytest.mark.parametrize("name", ["f", WEB_SEARCH_FUNCTION])
@pytest.mark.parametrize("again", ["f", WEB_SEARCH_FUNCTION])
def test_two_calls_of_one_id_are_the_servers_fault(name: str, again: str) -> None:
    turn, output = turn_of()
    turn.feed([ToolCallStart("c1", name)])
    with pytest.raises(UpstreamError):
        turn.feed([ToolCallStart("c1", again)])
    assert len(output.items) == (name == "f")


def test_arguments_of_a_call_that_has_not_begun_are_the_servers_fault() -> None:
    turn, _ = turn_of()
    with pytest.raises(UpstreamError):
        turn.feed([ToolArgumentsDelta("c1", "{}")])


def test_calls_of_the_client_and_of_the_server_are_separated() -> None:
    turn, _ = turn_of()
    turn.feed(
        [START, ToolCallStart("c2", WEB_SEARCH_FUNCTION), ToolCallStart("c3", "g", custom=True), finish("tool_calls")]
    )
    assert [(each.call_id, each.name) for each in turn.client_calls] == [("c1", "f"), ("c3", "g")]
    assert [each.call_id for each in turn.hosted_calls] == ["c2"]


def test_a_second_turn_goes_on_where_the_first_ended() -> None:
    output = ResponseOutput(ResponseIds())
    events = [
        *TurnStream(output, OfferedTools(REQUEST)).feed([TextDelta("a"), finish()]),
        *TurnStream(output, OfferedTools(REQUEST)).feed([ReasoningDelta("b"), TextDelta("c"), finish()]),
    ]
    assert [line(event) for event in events] == [*message(0, "a"), *thought(1, "b"), *message(2, "c")]
    ids = [item.id for item in output.finished_items()]
    assert len(set(ids)) == 3
    check_laws(events, output, "completed")


def test_logprobs_go_with_their_delta_and_with_the_whole() -> None:
    token = TokenLogprob("a", -0.5, b"a", (TopLogprob("b", -1.5, b"b"),))
    turn, output = turn_of()
    events = turn.feed([TextDelta("a", (token,)), TextDelta("b"), TextDelta("c", (token,)), finish()])
    whole = {**vars_of(token), "top_logprobs": [vars_of(token.top_logprobs[0])]}
    deltas = [event.model_dump()["logprobs"] for event in events if event.type == "response.output_text.delta"]
    assert [[one["token"] for one in each] for each in deltas] == [["a"], [], ["a"]]
    assert deltas[0][0]["logprob"] == -0.5
    [item] = output.finished_items()
    assert item.model_dump()["content"][0]["logprobs"] == [whole, whole]


def vars_of(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": [*token.bytes]}


def test_citations_become_links_and_annotations() -> None:
    sources = {1: Source("https://a.b/1", "One"), 2: Source("https://a.b/2", "")}
    turn, output = turn_of(sources)
    events = turn.feed([TextDelta("See 【1"), TextDelta("】, 【2†L1】."), finish()])
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


def test_a_mark_that_never_ends_is_sent_when_the_text_ends() -> None:
    turn, output = turn_of({1: Source("https://a.b/1", "One")})
    events = [*turn.feed([TextDelta("See 【1")]), *turn.close_open_items()]
    assert [line(event) for event in events][2:4] == ["0.0 output_text.delta 'See '", "0.0 output_text.delta '【1'"]
    check_laws(events, output, "failed")


def test_a_burst_of_tokens_is_one_event_of_each_text_and_the_output_is_the_same() -> None:
    deltas = [
        *(ReasoningDelta(f"r{number} ") for number in range(20)),
        *(TextDelta(f"t{number} ") for number in range(20)),
        ToolCallStart("1", "f"),
        *(ToolArgumentsDelta("1", text) for text in '{"query": "x"}'),
        finish("tool_calls"),
    ]
    (burst, burst_output), (turn, output) = turn_of(), turn_of()
    events = burst.feed(deltas)
    single_events = [event for delta in deltas for event in turn.feed([delta])]
    assert sum(event.type.endswith(".delta") for event in events) == 3
    assert sum(event.type.endswith(".delta") for event in single_events) == 54
    for stream, its_output in ((events, burst_output), (single_events, output)):
        check_laws(stream, its_output, "completed")
    assert [line(event) for event in events if event.type.endswith("done")] == [
        line(event) for event in single_events if event.type.endswith("done")
    ]
    assert burst.delta_count == turn.delta_count == len(deltas)


TOKEN = TokenLogprob("c", -0.1, (99,))


@pytest.mark.parametrize(
    ("step", "whole"),
    [
        ([], []),
        ([TextDelta("a")], [TextDelta("a")]),
        ([TextDelta("a"), TextDelta("b"), finish()], [TextDelta("ab"), finish()]),
        (
            [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d")],
            [ReasoningDelta("ab"), TextDelta("cd")],
        ),
        ([TextDelta("a"), ReasoningDelta("b"), TextDelta("c")], [TextDelta("a"), ReasoningDelta("b"), TextDelta("c")]),
        (
            [
                TextDelta("a", phase="commentary"),
                TextDelta("b", phase="commentary"),
                TextDelta("c", phase="final_answer"),
                TextDelta("d"),
            ],
            [TextDelta("ab", phase="commentary"), TextDelta("c", phase="final_answer"), TextDelta("d")],
        ),
        ([TextDelta("a"), TextDelta("b"), TextDelta("c", (TOKEN,))], [TextDelta("ab"), TextDelta("c", (TOKEN,))]),
        ([TextDelta("c", (TOKEN,)), TextDelta("c", (TOKEN,))], [TextDelta("c", (TOKEN,)), TextDelta("c", (TOKEN,))]),
        ([TextDelta("a"), TextDelta("b", begins_message=True)], [TextDelta("a"), TextDelta("b", begins_message=True)]),
        ([ReasoningDelta("a"), ReasoningDelta("b", True)], [ReasoningDelta("a"), ReasoningDelta("b", True)]),
        ([RefusalDelta("a"), RefusalDelta("b")], [RefusalDelta("ab")]),
        (
            [ToolArgumentsDelta("1", "a"), ToolArgumentsDelta("1", "b"), ToolArgumentsDelta("2", "c")],
            [ToolArgumentsDelta("1", "ab"), ToolArgumentsDelta("2", "c")],
        ),
    ],
)
def test_adjacent_deltas_of_one_text_are_joined_and_nothing_else(step: list[Delta], whole: list[Delta]) -> None:
    assert [*join_deltas(step)] == whole


@pytest.mark.parametrize(
    "deltas",
    [
        [TextDelta("a"), TextDelta("b"), finish()],
        [TextDelta("See 【1】 and [One](https://a.b/1)."), finish()],
        [TextDelta("c", (TOKEN,)), TextDelta("d"), finish("length")],
        [TextDelta("a", phase="commentary"), TextDelta("b", phase="final_answer"), finish()],
        [TextDelta("a"), RefusalDelta("No."), finish()],
        [ReasoningDelta("Hm."), TextDelta("a"), ToolCallStart("1", "look"), ToolArgumentsDelta("1", "{}"), finish()],
        [TextDelta("cut")],
    ],
)
def test_the_output_is_the_same_where_the_events_have_no_readers(deltas: list[Delta]) -> None:
    outputs: list[list[Any]] = []
    for has_readers in (True, False):
        turn, output = turn_of({1: Source("https://a.b/1", "One")})
        output.has_readers = has_readers
        events = [*turn.feed(deltas), *turn.close_open_items()]
        visible = [event for event in events if event.type.startswith(("response.output_text", "response.refusal"))]
        assert bool(visible) == has_readers
        items = [item.model_dump() for item in output.finished_items()]
        outputs.append([{**item, "id": ""} for item in items])
    assert outputs[0] == outputs[1]
    assert outputs[0]
