"""The table of how engines deviate from chat completions: bodies, texts and types.

Each row is an answer as an engine sends it, with what every client must have of it: by responses and by chat
completions, whole and streamed.
"""

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.support.servers.engine_answers import (
    CHAT_TOOLS,
    FAILED,
    HELLO,
    A,
    B,
    Outcome,
    assert_rows,
    calls,
    choices,
    completion,
    doors,
    entry,
    events,
    pieces,
    said,
    whole_body,
)
from tests.support.servers.upstream_server import CUT, DONE, Chunk, call_chunk, delta_chunk, event, plain_answer

_COUNTS = {"prompt_tokens": 5, "completion_tokens": 7}
_DETAILS = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}}
USAGES: dict[str, Chunk] = {
    "the usual one": {"usage": {**_COUNTS, **_DETAILS}},
    "a choice's": {
        "choices": [
            {"delta": {"content": "Hi."}, "finish_reason": "stop", "usage": {**_COUNTS, "cached_tokens": 3, **_DETAILS}}
        ]
    },
    "Groq's": {"x_groq": {"id": "r", "usage": {**_COUNTS, **_DETAILS}}},
    "DeepSeek's": {"usage": {**_COUNTS, "prompt_cache_hit_tokens": 3, "reasoning_tokens": 2}},
    "of responses": {
        "usage": {
            "input_tokens": 5,
            "output_tokens": 7,
            "input_tokens_details": {"cached_tokens": 3},
            "output_tokens_details": {"reasoning_tokens": 2},
        }
    },
    "llama.cpp's": {"timings": {"prompt_n": 2, "cache_n": 3, "predicted_n": 7, "reasoning_tokens": 2}},
}


async def test_bodies_are_read_by_their_first_bytes() -> None:
    """The content type is not trusted."""
    message: dict[str, Any] = {"role": "assistant", "content": "Hello there.", "tool_calls": [], "refusal": None}
    hello = completion(message)
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [entry("lookup", '{"q":"a"}', id="x"), entry("ping", "", id="y")],
    }
    sse = b"".join(map(event, (delta_chunk(content="Hello "), delta_chunk("stop", content="there."), "[DONE]")))
    lines = [
        json.dumps(chunk).encode() for chunk in (delta_chunk(content="Hello "), delta_chunk("stop", content="there."))
    ]
    own = [
        {"message": {"role": "assistant", "content": "Hello "}, "done": False},
        {"message": {"role": "assistant", "content": "there."}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop", "eval_count": 3},
    ]
    await assert_rows(
        {
            "calls": (whole_body(completion(call, "tool_calls"), "application/json"), calls(A, ("ping", {}))),
            "cut by the limit": (
                whole_body(completion(message, "length"), "application/json"),
                Outcome("incomplete", "Hello there."),
            ),
            "no finish reason": (whole_body(completion(message, None), "application/json"), HELLO),
            "with blanks and a mark": (whole_body(b"\xef\xbb\xbf \r\n" + hello + b"\n", "application/json"), HELLO),
            "over several lines": (
                whole_body(json.dumps(json.loads(hello), indent=1).encode(), "application/json"),
                HELLO,
            ),
            "labelled as an event stream": (whole_body(hello, "text/event-stream"), HELLO),
            "in a list": (whole_body(b"[%b]" % hello), HELLO),
            "cut": (whole_body(hello[:-9], "application/json"), FAILED),
            "an unfinished chunk": (whole_body(json.dumps(delta_chunk(content="He")).encode()), FAILED),
            **{
                kind or "no label": (whole_body(sse, kind), HELLO)
                for kind in ("application/json", "application/octet-stream", None)
            },
            "CRLF and comments": (whole_body(b": hi\r\n\r\n" + sse.replace(b"\n", b"\r\n"), "text/plain"), HELLO),
            "with a mark": (whole_body(b"\xef\xbb\xbf" + sse, "text/plain"), HELLO),
            "one line after another": (whole_body(sse.replace(b"\n\n", b"\n")), HELLO),
            "no blank line at the end": (whole_body(sse.removesuffix(event("[DONE]"))[:-2]), HELLO),
            "cut in its last line": (whole_body(sse.removesuffix(event("[DONE]"))[:-9]), FAILED),
            "data twice": (whole_body(sse.replace(b"data: {", b"data: data: {")), HELLO),
            "two chunks in one data": (whole_body(b"data: " + b"".join(lines) + b"\n\n"), HELLO),
            "two chunks in the data of one event": (
                whole_body(b"".join(b"data: %b\n" % line for line in (*lines, b"[DONE]")) + b"\n"),
                HELLO,
            ),
            "a chunk and half of one in one data": (whole_body(b"data: " + b"".join(lines)[:-5] + b"\n\n"), FAILED),
            "chunks in a list": (whole_body(b"data: [" + b",".join(lines) + b"]\n\n"), HELLO),
            "a chunk in a list": (whole_body(b"".join(b"data: [%b]\n\n" % line for line in lines)), HELLO),
            "a raw control character": (
                whole_body(sse.replace(b"Hello there.", b"Hello there.").replace(b"Hello ", b"Hello\t")),
                Outcome(text="Hello\tthere."),
            ),
            **{
                f"status {status}, {encoding}": (
                    plain_answer(sse, status, {"content-type": "text/event-stream", "content-encoding": encoding}),
                    HELLO,
                )
                for status, encoding in ((200, "none"), (200, "UTF-8"), (200, ""), (201, "identity"))
            },
            "compressed in another way": (
                plain_answer(sse, 200, {"content-encoding": "br"}),
                Outcome("failed", error="compressed"),
            ),
            **{
                f"compressed by a gateway, {encoding}": (
                    plain_answer(pack(body), 200, {"content-encoding": encoding, "content-type": kind}),
                    HELLO,
                )
                for encoding, pack in (("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress))
                for kind, body in (("text/event-stream", sse), ("application/json", hello))
            },
            "event names first": (whole_body(sse.replace(b"data:", b"event: message\ndata:")), HELLO),
            "lines of JSON": (whole_body(b"\n".join(lines) + b"\n", "application/x-ndjson"), HELLO),
            "lines of JSON, cut": (whole_body(lines[0] + b"\n" + lines[1][:-5], "application/x-ndjson"), FAILED),
            "lines of JSON without an end": (whole_body(lines[0] + b"\n" + lines[0] + b"\n"), FAILED),
            "lines of Ollama": (whole_body(b"\n".join(json.dumps(line).encode() for line in own)), HELLO),
            "lines of Ollama, cut": (whole_body(b"\n".join(json.dumps(line).encode() for line in own[:2])), FAILED),
            "an error as text": (
                whole_body(b'{"error": "the model is loading"}'),
                Outcome("failed", error="the model is loading"),
            ),
            "an error as object": (
                whole_body(b'{"error": {"message": "top_k is off", "type": "BadRequestError"}}'),
                Outcome("failed", error="top_k is off"),
            ),
            "an error as detail": (
                whole_body(b'{"detail": [{"loc": ["body"], "msg": "Field required"}]}'),
                Outcome("failed", error="Field required"),
            ),
            "an error as message": (
                whole_body(b'{"message": "no such template", "success": false}'),
                Outcome("failed", error="no such template"),
            ),
            "a failure of the server": (whole_body(b'{"error": {"message": "secret", "code": 500}}'), FAILED),
            "a page": (
                whole_body(b"<!DOCTYPE html><html>gateway</html>", "text/html"),
                Outcome("failed", error="HTML"),
            ),
            "a text": (whole_body(b"Service is starting, please wait."), FAILED),
            "nothing": (whole_body(b""), FAILED),
        }
    )


async def test_texts_are_read_wherever_they_are() -> None:
    """Another shape or place of text, reasoning and calls."""
    thought = Outcome(text="Hello there.", reasoning="Hmm.")
    hello = {"delta": {"content": "Hello there."}}
    call = {"id": "x", "name": "lookup"}
    await assert_rows(
        {
            "a part": (choices({"delta": {"content": {"type": "text", "text": "Hello there."}}}), HELLO),
            "texts": (choices({"delta": {"content": ["Hello ", "there."]}}), HELLO),
            "parts of output text": (
                choices({"delta": {"content": [{"type": "output_text", "text": "Hello there."}]}}),
                HELLO,
            ),
            "a text with a value": (
                choices({"delta": {"content": [{"type": "text", "text": {"value": "Hello there."}}]}}),
                HELLO,
            ),
            "a number": (choices({"delta": {"content": 42}}), Outcome(text="42")),
            "a boolean": (choices({"delta": {"content": True}}), Outcome(text="true")),
            "an object": (choices({"delta": {"content": {"a": 1}}}), Outcome(text='{"a": 1}')),
            "a list of numbers": (choices({"delta": {"content": [1, 2]}}), Outcome(text="[1, 2]")),
            "a thought among parts": (
                choices(
                    {
                        "delta": {
                            "content": [
                                {"type": "thinking", "thinking": [{"type": "text", "text": "Hmm."}]},
                                {"type": "text", "text": "Hello there."},
                            ]
                        }
                    }
                ),
                thought,
            ),
            "a call among parts": (
                choices({"delta": {"content": [{"type": "tool_use", **call, "input": {"q": "a"}}]}}),
                calls(A),
            ),
            "a picture among parts": (
                choices(
                    {
                        "delta": {
                            "content": [
                                {"type": "text", "text": "Look:"},
                                {"type": "image_url", "image_url": {"url": "x"}},
                            ]
                        }
                    }
                ),
                Outcome("failed", error="image_url"),
            ),
            "a picture next to the text": (
                choices({"delta": {"content": "Look:", "images": [{"type": "image_url", "image_url": {"url": "x"}}]}}),
                Outcome("failed", error="picture"),
            ),
            "no picture next to the text": (choices({"delta": {"content": "Hello there.", "images": []}}), HELLO),
            "text of a choice": (choices({"text": "Hello "}, {"text": "there."}), HELLO),
            "content of a choice": (choices({"content": "Hello there."}), HELLO),
            "text of a delta": (choices({"delta": {"text": "Hello there."}}), HELLO),
            "a delta that is a text": (choices({"delta": "Hello there."}), HELLO),
            "messages in pieces": (
                choices({"message": {"content": "Hello "}}, {"message": {"content": "there."}}),
                HELLO,
            ),
            "messages that grow": (
                choices({"message": {"content": "Hello "}}, {"message": {"content": "Hello there."}}),
                HELLO,
            ),
            "a message that sums up": (
                choices({**hello}, {"delta": {}, "message": {"content": "Hello there."}}),
                HELLO,
            ),
            "a message with the call": (
                choices(
                    {**hello},
                    {
                        "delta": {},
                        "message": {
                            "content": "Hello there.",
                            "tool_calls": [{"function": {**call, "arguments": '{"q":"a"}'}}],
                        },
                    },
                ),
                calls(A, text="Hello there."),
            ),
            **{
                f"{field} as {type(value).__name__}": (choices({"delta": {field: value}}, hello), thought)
                for field in ("reasoning", "reasoning_content", "thinking")
                for value in (
                    "Hmm.",
                    {"text": "Hmm."},
                    {"content": "Hmm."},
                    [{"type": "reasoning.text", "text": "Hmm."}],
                    ["Hmm."],
                )
            },
            "details of the reasoning": (
                choices(
                    {
                        "delta": {
                            "content": "",
                            "reasoning_details": [
                                {"type": "reasoning.summary", "summary": "Hmm."},
                                {"type": "reasoning.encrypted", "data": "x"},
                            ],
                        }
                    },
                    hello,
                ),
                thought,
            ),
            "reasoning twice": (
                choices(
                    {"delta": {"reasoning": "Hmm.", "reasoning_details": [{"type": "reasoning.text", "text": "Hmm."}]}},
                    hello,
                ),
                thought,
            ),
            "a function call": (
                choices(
                    {"delta": {"function_call": {"name": "lookup", "arguments": '{"q":'}}},
                    {"delta": {"function_call": {"arguments": '"a"}'}}},
                ),
                calls(A),
            ),
            "one call that is no list": (
                choices({"delta": {"tool_calls": {"function": {"name": "lookup", "arguments": '{"q":"a"}'}}}}),
                calls(A),
            ),
            "an unknown field": (choices({"delta": {"utterance": "Hello there."}}), FAILED),
            "an unknown field of a choice": (choices({"utterance": "Hello there."}), FAILED),
            "nothing": (choices({"delta": {"role": "assistant", "content": ""}}), Outcome()),
            "choices as an object": (
                events({"choices": {"delta": {"content": "Hello there."}, "finish_reason": "stop"}}),
                HELLO,
            ),
        }
    )


async def test_loose_types_are_converted() -> None:
    """Numbers as texts, texts as numbers, what is null, and calls that say nothing."""
    a = '{"q":"a"}'
    usage: Chunk = {"choices": [], "usage": {"prompt_tokens": "5", "completion_tokens": "7.0", "total_tokens": None}}
    await assert_rows(
        {
            **{
                f"index {index!r}": (pieces(entry("lookup", a, index=index)), calls(A))
                for index in (0.0, False, "0", None, -1, "x")
            },
            "growing texts as index": (
                pieces(entry("lookup", '{"q"', index="0"), entry(arguments=':"a"}', index="1")),
                calls(A),
            ),
            "two texts as index": (
                pieces(entry("lookup", a, index="0"), entry("lookup", '{"q":"b"}', index="1")),
                calls(A, B),
            ),
            "an id that is a number": (pieces(entry("lookup", a, index=0, id=7)), calls(A)),
            "an id that is null": (pieces(entry("lookup", a, index=0, id=None)), calls(A)),
            "null name in later pieces": (
                pieces(
                    entry("lookup", '{"q"', index=0),
                    {"index": 0, "id": None, "function": {"name": None, "arguments": ':"a"}'}},
                ),
                calls(A),
            ),
            "function null": (pieces(entry("lookup", a, index=0), {"index": 0, "function": None}), calls(A)),
            "function and text null": (
                events(
                    {
                        "choices": [
                            {"delta": {"role": None, "content": None, "tool_calls": None, "function_call": None}}
                        ]
                    },
                    delta_chunk(content="Hello there."),
                    delta_chunk("stop"),
                ),
                HELLO,
            ),
            "a call without `function`": (pieces({"index": 0, "name": "lookup", "arguments": a}), calls(A)),
            "parameters": (pieces({"index": 0, "function": {"name": "lookup", "parameters": {"q": "a"}}}), calls(A)),
            "arguments in a list": (pieces(entry("lookup", [{"q": "a"}], index=0)), calls(A)),
            "an empty list of arguments": (pieces(entry("ping", [], index=0)), calls(("ping", {}))),
            "arguments null": (
                pieces({"index": 0, "id": "x", "function": {"name": "ping", "arguments": None}}),
                calls(("ping", {})),
            ),
            "arguments `null`": (pieces(entry("ping", "null", index=0)), calls(("ping", {}))),
            "arguments missing": (pieces(entry("ping", index=0)), calls(("ping", {}))),
            "arguments encoded twice": (pieces(entry("lookup", json.dumps(a), index=0)), calls(A)),
            "arguments in a fence": (pieces(entry("lookup", f"```json\n{a}\n```", index=0)), calls(A)),
            "a name with blanks": (pieces(entry(" lookup\n", a, index=0)), calls(A)),
            "an empty call first": (
                pieces({"index": 0, "id": "", "function": {}}, entry("lookup", a, index=0)),
                calls(A),
            ),
            "an empty call alone": (
                events(
                    delta_chunk(content="Hello there."),
                    delta_chunk(tool_calls=[None, {}, {"index": 0}]),
                    delta_chunk("stop"),
                ),
                HELLO,
            ),
            "an index of the choice": (choices({"index": "0", "delta": {"content": "Hello there."}}), HELLO),
            "no index of the choice": (choices({"index": None, "delta": {"content": "Hello there."}}), HELLO),
            "usage as texts": (events(delta_chunk("stop", content="Hello there."), usage), HELLO),
            "arguments without a name": (pieces(entry(arguments=a, index=0)), FAILED),
        }
    )


async def test_a_stream_that_no_label_names_may_still_break() -> None:
    """A body of another label is held to the same end as an event stream."""
    sse = b"".join(map(event, (delta_chunk(content="Hello "), delta_chunk(content="there."))))
    start = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 9999\r\n\r\n"
    await assert_rows({"cut": ([start + sse, CUT], FAILED), "no end": (whole_body(sse + DONE, "text/plain"), FAILED)})


async def test_usage_that_is_text_is_counted() -> None:
    """Counts may be texts."""
    chunk: Chunk = {"choices": [], "usage": {"prompt_tokens": "5", "completion_tokens": 7.0}}
    async with doors() as stack:
        stack.answer = events(delta_chunk("stop", content="Hello there."), call_chunk(0), chunk)
        response = await stack.client.responses.create(model="fake-model", input="hi", store=False)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (5, 7)


@pytest.mark.parametrize("place", USAGES)
async def test_usage_is_read_wherever_it_is(place: str) -> None:
    """Servers have other names for the counts, and other places."""
    async with doors() as stack:
        stack.answer = events({**delta_chunk("stop", content="Hello there."), **USAGES[place]})
        response = await stack.client.responses.create(model="fake-model", input="hi", store=False)
    usage = response.usage
    assert usage is not None
    details = usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens
    assert (usage.input_tokens, usage.output_tokens, *details) == (5, 7, 3, 2)


@pytest.mark.parametrize(
    "arguments", ['{"q":}', '{"q":"a', "[1]", "5", '"a"', "true", '{"q": NaN}', '{"q":"a"}</tool_call>']
)
async def test_broken_arguments_are_no_whole_call(arguments: str) -> None:
    """Clients could not parse them, or expect an object. A call that the limit cut off is incomplete, as it stands."""
    async with doors() as stack:
        outcomes = await stack.ask(pieces(entry("lookup", arguments, index=0)))
        assert {outcome.status for outcome in outcomes.values()} == {"failed"}
        assert "lookup" in outcomes["chat"].error
        outcomes = await stack.ask(pieces(entry("lookup", arguments, index=0), reason="length"))
        cut = Outcome("incomplete", calls=(("lookup", arguments),))
        assert [outcomes[door] for door in ("chat", "chat streamed")] == [cut] * 2


async def test_tools_that_are_not_allowed_now_stay_in_the_prompt_of_a_response() -> None:
    """Its beginning is in the engine's cache. Chat completions, which refuse no call, offer the allowed ones."""
    named = {"type": "function", "name": "lookup"}
    async with doors() as stack:
        await stack.ask(said("stop"), tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [named]})
        sent = stack.upstream.chats[0].json
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["lookup", "weather", "ping"]
        assert sent["tool_choice"] == "auto"
        create: Any = stack.client.chat.completions.create
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "lookup"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        messages = [{"role": "user", "content": "hi"}]
        await create(model="fake-model", messages=messages, tools=CHAT_TOOLS, tool_choice=choice)
        assert [tool["function"]["name"] for tool in stack.upstream.chats[-1].json["tools"]] == ["lookup"]


PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "x"}}
UNREAD: dict[str, tuple[Any, str]] = {
    "a picture next to the text": ({"content": "Look:", "images": [PICTURE]}, "a picture"),
    "a picture among parts": ({"content": [{"type": "text", "text": "Look:"}, PICTURE]}, "of type 'image_url'"),
    "a picture before the text": ({"content": [PICTURE, {"type": "text", "text": "Look:"}]}, "of type 'image_url'"),
    "a part of a new kind": ({"content": [{"type": "text", "text": "Look:"}, {"type": "x", "y": 1}]}, "of type 'x'"),
}


@pytest.mark.parametrize("form", ["stream", "whole"])
@pytest.mark.parametrize("case", UNREAD)
async def test_the_text_around_a_part_that_cannot_be_read_is_not_lost(case: str, form: str) -> None:
    """The answer fails, because it is not complete, and has what was read."""
    message, words = UNREAD[case]
    answer = choices({"delta": message}, {"delta": {"content": " a cat."}})
    text = "Look: a cat."
    if form == "whole":
        answer, text = whole_body(completion({"role": "assistant", **message}), "application/json"), "Look:"
    async with doors() as stack:
        stack.answer = answer
        create: Any = stack.client.responses.create
        events = [event async for event in await create(model="fake-model", input="go", stream=True)]
        final = events[-1].response
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
        assert (final.status, final.output_text, final.output[0].status) == ("failed", text, "incomplete")
        assert words in final.error.message
        stored = await stack.client.responses.retrieve(final.id)
        assert (stored.status, stored.output_text) == ("failed", text)
