"""The table of how engines deviate from chat completions: calls and finish reasons.

Each row is an answer as an engine sends it, with what every client must have of it: by responses and by chat
completions, whole and streamed.
"""

from typing import Any

from tests.support.servers.engine_answers import (
    CITY,
    FAILED,
    HELLO,
    A,
    B,
    Outcome,
    assert_rows,
    calls,
    entry,
    events,
    pieces,
    recording,
    said,
)
from tests.support.servers.upstream_server import CUT, delta_chunk, usage_chunk


async def test_recorded_answers_are_read() -> None:
    """The answers are those of products in use."""
    await assert_rows(
        {
            "idx0_noid": (recording("idx0_noid"), calls(A, B)),
            "noidx_noid_onechunk": (recording("noidx_noid_onechunk"), calls(A, CITY)),
            "fin_empty": (recording("fin_empty"), HELLO),
            "fin_empty_tool": (recording("fin_empty_tool"), calls(("lookup", {"q": "x"}))),
            "fin_stop_every": (recording("fin_stop_every"), Outcome(text="Hello there.", reasoning="Hmm. ")),
            "fin_end_turn": (recording("fin_end_turn"), HELLO),
            "fin_STOP": (recording("fin_STOP"), HELLO),
            "json_body": (recording("json_body"), Outcome(text="Hello there.", reasoning="hmm")),
            "sse_as_plain": (recording("sse_as_plain"), HELLO),
            "err_200": (recording("err_200"), Outcome("failed", error="Unexpected token 200002")),
            "content_parts": (recording("content_parts"), HELLO),
            "message_not_delta": (recording("message_not_delta"), HELLO),
            "idx_grows": (recording("idx_grows"), calls(("lookup", {"q": "abc"}))),
            "call_noname_end": (recording("call_noname_end"), Outcome(text="I am done.")),
            "args_object": (recording("args_object"), calls(A)),
            "idx_str": (recording("idx_str"), calls(A)),
            "args_empty": (recording("args_empty"), calls(("ping", {}))),
            "args_blank": (recording("args_blank"), calls(("ping", {}))),
        }
    )


async def test_calls_are_distinguished() -> None:
    """Calls without usable ids and numbers."""
    a, b, city = '{"q":"a"}', '{"q":"b"}', '{"city":"b"}'
    halves = ('{"q"', ':"a"}')
    await assert_rows(
        {
            "one id for two calls": (
                pieces(entry("lookup", a, index=0, id="x"), entry("lookup", b, index=0, id="x")),
                calls(A, B),
            ),
            "one id, two numbers": (
                pieces(entry("lookup", a, index=0, id="x"), entry("weather", city, index=1, id="x")),
                calls(A, CITY),
            ),
            "all 0 with ids": (
                pieces(entry("lookup", a, index=0, id="x"), entry("lookup", b, index=0, id="y")),
                calls(A, B),
            ),
            "all 0 with ids, interleaved": (
                pieces(
                    entry("lookup", '{"q"', index=0, id="x"),
                    entry("lookup", '{"q"', index=0, id="y"),
                    entry(arguments=':"a"}', index=0, id="x"),
                    entry(arguments=':"b"}', index=0, id="y"),
                ),
                calls(A, B),
            ),
            "all 0, each opened before its arguments": (
                pieces(
                    entry("lookup", "", index=0),
                    entry(arguments=a, index=0),
                    entry("lookup", "", index=0),
                    entry(arguments=b, index=0),
                ),
                calls(A, B),
            ),
            "one id, each opened before its arguments": (
                pieces(
                    entry("lookup", "", index=0, id="x"),
                    entry(arguments=a, index=0),
                    entry("lookup", "", index=0, id="x"),
                    entry(arguments=b, index=0),
                ),
                calls(A, B),
            ),
            "number on the first piece only": (
                pieces(entry("lookup", halves[0], index=0, id="x"), entry(arguments=halves[1])),
                calls(A),
            ),
            "numbers on first pieces of two calls": (
                pieces(
                    entry("lookup", halves[0], index=0, id="x"),
                    entry(arguments=halves[1]),
                    entry("weather", "", index=1, id="y"),
                    entry(arguments=city),
                ),
                calls(A, CITY),
            ),
            "no number, an id on each piece": (
                pieces(
                    entry("lookup", halves[0], id="x"), entry(arguments=halves[1], id="x"), entry("lookup", b, id="y")
                ),
                calls(A, B),
            ),
            "an id made for each piece": (
                pieces(entry("lookup", halves[0], index=0, id="x"), entry(arguments=halves[1], index=0, id="y")),
                calls(A),
            ),
            "an id and a number made for each piece": (
                pieces(
                    entry("lookup", "", index=0, id="x"),
                    entry(arguments=halves[0], index=1, id="y"),
                    entry(arguments=halves[1], index=2, id="z"),
                ),
                calls(A),
            ),
            "the name on each piece": (pieces(*(entry("lookup", half, index=0, id="x") for half in halves)), calls(A)),
            "the name on each piece, no id": (pieces(*(entry("lookup", half) for half in ("", *halves))), calls(A)),
            "the name on each piece, and at the end": (
                pieces(*(entry("lookup", half, index=0) for half in (*halves, "")), entry("weather", city, index=0)),
                calls(A, CITY),
            ),
            "the name on each piece, numbers count pieces": (
                pieces(*(entry("lookup", half, index=at, id="x") for at, half in enumerate(halves))),
                calls(A),
            ),
            "two whole calls in one chunk": (
                pieces([entry("lookup", a, index=0, id="x"), entry("lookup", b, index=1, id="y")]),
                calls(A, B),
            ),
            "two calls without parameters in one chunk": (
                pieces([entry("ping", ""), entry("ping", "")]),
                calls(("ping", {}), ("ping", {})),
            ),
            "a call without parameters and another": (
                pieces(entry("ping", "", index=0), entry("lookup", a, index=0)),
                calls(("ping", {}), A),
            ),
            "arguments that grow on each piece": (
                pieces(*(entry("lookup", a[:size], index=0, id="x") for size in (1, 5, len(a), len(a)))),
                calls(A),
            ),
            "the whole call once more": (
                pieces(
                    entry("lookup", "", index=0, id="x"),
                    *(entry(arguments=half, index=0) for half in halves),
                    entry("lookup", a, index=0, id="x"),
                ),
                calls(A),
            ),
            "whole arguments once more": (
                pieces(entry("lookup", a, index=0, id="x"), entry(arguments=a, index=0)),
                calls(A),
            ),
            "empty arguments after whole ones": (
                pieces(entry("lookup", a, index=0, id="x"), *(entry(arguments=end, index=0) for end in ("{}", "null"))),
                calls(A),
            ),
            "empty arguments before the arguments": (
                pieces(entry("lookup", "{}", index=0, id="x"), *(entry(arguments=half, index=0) for half in halves)),
                calls(A),
            ),
            "null before the arguments": (
                pieces(entry("lookup", "null", index=0, id="x"), entry(arguments=a, index=0)),
                calls(A),
            ),
            "an object within the arguments, as a piece of its own": (
                pieces(
                    entry("lookup", '{"q":', index=0, id="x"),
                    *(entry(arguments=piece, index=0) for piece in ("{}", "}")),
                ),
                calls(("lookup", {"q": {}})),
            ),
            "the same call twice with two ids": (
                pieces(entry("lookup", a, index=0, id="x"), entry("lookup", a, index=1, id="y")),
                calls(A, A),
            ),
            "the same call twice, each opened before its arguments": (
                pieces(
                    *(
                        [entry("lookup", "", index=0), entry(arguments=a, index=0)][at]
                        for _ in range(2)
                        for at in range(2)
                    ),
                ),
                calls(A, A),
            ),
            "growing numbers of two calls": (
                pieces(
                    entry("lookup", "", index=0, id="x"),
                    entry(arguments=halves[0], index=1),
                    entry(arguments=halves[1], index=2),
                    entry("weather", "", index=3, id="y"),
                    entry(arguments=city, index=4),
                ),
                calls(A, CITY),
            ),
            "after a text": (
                events(
                    delta_chunk(content="Wait. "),
                    delta_chunk(tool_calls=[entry("lookup", a), entry("lookup", b)]),
                    delta_chunk("stop"),
                ),
                calls(A, B, text="Wait. "),
            ),
        }
    )


async def test_finish_reasons_are_read() -> None:
    """In any case, of other APIs, empty, in several chunks, at the wrong place."""
    text, cut = "Hello there.", Outcome("incomplete", "Hello there.")
    call = entry("lookup", '{"q":"a"}', index=0, id="x")
    await assert_rows(
        {
            **{
                reason: (said(reason), HELLO)
                for reason in ("Stop", "eos", "EOS_TOKEN", "stop_sequence", "COMPLETE", "end-turn", "anything")
            },
            **{
                reason: (said(reason), cut)
                for reason in (
                    "MAX_TOKENS",
                    "max_tokens",
                    "maxTokens",
                    "Length",
                    "model_length",
                    "SAFETY",
                    "content-filter",
                    "refusal",
                )
            },
            **{
                reason: (said(reason), FAILED)
                for reason in (
                    "error",
                    "ABORTED",
                    "cancelled",
                    "network_error",
                    "insufficient_system_resource",
                    "MALFORMED_FUNCTION_CALL",
                    "timeout",
                )
            },
            "null text": (said("null", "stop"), HELLO),
            "an object": (said({"type": "stop"}), HELLO),
            "a boolean": (
                events(
                    delta_chunk(content=text), {"choices": [{"delta": {}, "finish_reason": False}]}, delta_chunk("stop")
                ),
                HELLO,
            ),
            "tool_calls without calls": (said("tool_calls"), HELLO),
            "tool_calls and nothing": (said("tool_calls", text=""), FAILED),
            "function_call with a call": (pieces(call, reason="function_call"), calls(A)),
            "tool_use with a call": (pieces(call, reason="tool_use"), calls(A)),
            "stop with a call": (pieces(call, reason="stop"), calls(A)),
            "length before more": (
                events(delta_chunk("length", content="Hello "), delta_chunk(content="there."), delta_chunk("stop")),
                HELLO,
            ),
            "stop before a call": (
                events(delta_chunk("stop", content="Hm."), delta_chunk(tool_calls=[call])),
                calls(A, text="Hm."),
            ),
            "stop before more, then cut": (
                events(delta_chunk("stop", content="Hello "), delta_chunk(content="th"), done=False),
                FAILED,
            ),
            "several": (said("stop", "stop", "stop"), HELLO),
            "length and stop": (said("length", "stop"), cut),
            "none before [DONE]": (said(None), FAILED),
            "none, empty, before [DONE]": (said("", ""), FAILED),
            "an end without [DONE]": (events(delta_chunk("stop", content=text), done=False), HELLO),
            "no end at all": (events(delta_chunk(content=text), done=False), FAILED),
            "a connection that breaks after it": (
                [*events(delta_chunk("stop", content=text), done=False)[:-1], CUT],
                FAILED,
            ),
            "an error after it": (
                events(delta_chunk("stop", content=text), {"error": {"message": "x", "code": 500}}),
                FAILED,
            ),
            "an error as text": (events(delta_chunk(content="He"), {"error": "out of memory"}), FAILED),
            "an error by its type": (events(delta_chunk(content="He"), {"type": "error", "message": "x"}), FAILED),
            "an error as detail": (events(delta_chunk(content="He"), {"detail": "x"}, delta_chunk("stop")), FAILED),
            "an error in a choice": (
                events(
                    {"choices": [{"index": 0, "delta": {"content": text}, "error": {"code": 502}}]}, delta_chunk("stop")
                ),
                FAILED,
            ),
            "an empty error in a choice": (
                events(delta_chunk(content=text), {"choices": [{"error": {}}]}, delta_chunk("stop")),
                HELLO,
            ),
            "an error with choices": (
                events(delta_chunk(content="He"), {**delta_chunk("stop"), "error": {"message": "x"}}),
                FAILED,
            ),
            "[done]": (
                events(delta_chunk("stop", content=text), "[done]", delta_chunk(content="late"), done=False),
                HELLO,
            ),
        }
    )


async def test_a_text_that_is_said_to_call_a_tool_is_one_unless_a_call_was_not_read() -> None:
    """An answer of which a call could not be read is not complete; a wrong label alone means nothing."""
    text = "Hello there."
    begin, end = delta_chunk(content=text), delta_chunk("tool_calls")
    unread = {"choices": [{"index": 0, "delta": {"tool_invocations": [{"name": "lookup", "args": {"q": "a"}}]}}]}
    call = '{"name": "lookup", "arguments": {"q": "a"}}'
    await assert_rows(
        {
            **{reason: (said(reason), HELLO) for reason in ("tool_calls", "function_call", "tool_use", "TOOL_CALL")},
            "after an empty delta": (
                events(delta_chunk(content=text), delta_chunk(), delta_chunk("tool_calls")),
                HELLO,
            ),
            "an empty call": (
                events(begin, delta_chunk(tool_calls=[entry("", "")]), end),
                HELLO,
            ),
            "a text about names": (
                said("tool_calls", text='The "name" and "arguments" of <b>tools</b>.'),
                Outcome(text='The "name" and "arguments" of <b>tools</b>.'),
            ),
            "an answer in JSON": (said("tool_calls", text='{"city": "Rome"}'), Outcome(text='{"city": "Rome"}')),
            **{
                mark: (said("tool_calls", text=f"Hello. {mark}{call}"), FAILED)
                for mark in ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<function=lookup>", "<|python_tag|>")
            },
            "a call in JSON": (said("tool_calls", text=call), FAILED),
            "a call in a fence": (said("tool_calls", text=f"```json\n{call}\n```"), FAILED),
            "a mark in pieces": (
                events(
                    *(delta_chunk(content=piece) for piece in ("Hello. ", "<", "tool", "_call", ">", call)),
                    delta_chunk("tool_calls"),
                ),
                FAILED,
            ),
            "unread fields": (events(begin, unread, end), FAILED),
            "marks, and no such finish reason": (
                said("stop", text="Write <tool_call>."),
                Outcome(text="Write <tool_call>."),
            ),
        }
    )


async def test_errors_that_say_nothing_are_none() -> None:
    """An empty `error`, or the code of success, next to an answer or between its chunks."""
    text = "Hello there."
    nothing: list[Any] = [
        *("", False, {}, None, [], 0, "none", "OK"),
        {"code": None, "message": "", "type": None, "param": None},
        {"code": 0, "message": ""},
        {"code": 200},
        {"code": "200", "message": "ok"},
        {"code": "ok", "message": "Success"},
    ]
    failures: list[Any] = [
        *("x", True, {"message": "x"}, {"type": "server_error"}, {"code": 500}, ["x"]),
        {"code": 200, "message": "The model crashed."},
        {"code": 0, "message": "The model crashed."},
    ]
    begin, end = delta_chunk(content=text), delta_chunk("stop")
    await assert_rows(
        {
            **{
                f"{error} by itself": (events(begin, {"error": error}, {"choices": [], "error": error}, end), HELLO)
                for error in nothing
            },
            **{
                f"{error} next to an answer": (
                    events({**delta_chunk("stop", content=text), "error": error}, {**usage_chunk(), "error": error}),
                    HELLO,
                )
                for error in (*nothing, {"code": 200, "message": "Generated."})
            },
            **{f"{error} is one": (events(begin, {"error": error}, end), FAILED) for error in failures},
            "other fields": (
                events({"code": 0, "message": "success"}, {"detail": None}, begin, end, {"status": "ok"}),
                HELLO,
            ),
        }
    )


async def test_a_message_after_deltas_ends_what_they_began() -> None:
    """A message that sums up the deltas may be longer than they are."""
    whole = {"role": "assistant", "content": "Hello there."}

    def message(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "message": {"role": "assistant", **fields}, "finish_reason": "stop"}]}

    a, b = entry("lookup", '{"q":"a"}', id="x", index=0), entry("lookup", '{"q":"b"}', id="y", index=1)
    half, text = entry("lookup", '{"q"', id="x", index=0), delta_chunk(content="Hello there.")
    await assert_rows(
        {
            "longer": (events(delta_chunk(content="Hel"), delta_chunk(content="lo "), message(**whole)), HELLO),
            "longer, not ASCII": (
                events(delta_chunk(content="Grüße, "), message(content="Grüße, Zoë.")),
                Outcome(text="Grüße, Zoë."),
            ),
            "the same": (events(text, message(**whole)), HELLO),
            "shorter": (events(text, message(content="Hello")), HELLO),
            "another": (events(text, message(content="I wrote this: hello.")), HELLO),
            "reasoning": (
                events(delta_chunk(reasoning="Hm"), text, message(reasoning="Hm.", **whole)),
                Outcome(text="Hello there.", reasoning="Hm."),
            ),
            "a call more": (events(delta_chunk(tool_calls=[a]), message(tool_calls=[a, b])), calls(A, B)),
            "the same calls": (events(delta_chunk(tool_calls=[a, b]), message(tool_calls=[a, b])), calls(A, B)),
            "the end of a call": (events(delta_chunk(tool_calls=[half]), message(tool_calls=[a])), calls(A)),
        }
    )
