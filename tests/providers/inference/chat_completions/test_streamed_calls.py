"""Tool calls as upstreams stream them, each with the deltas that it must become."""

import pytest

from apis.deltas import Finish, ToolArgumentsDelta, ToolCallStart
from apis.errors import UpstreamError
from providers.inference.chat_completions.chunks import ChatChunkReader
from tests.providers.inference.reading import USED, chat_request, failure, read, tools
from tests.support.servers.upstream_server import call_chunk, call_chunks, delta_chunk, event, usage_chunk

CALLS = Finish("tool_calls", USED)


def test_a_call_streams_its_arguments() -> None:
    assert read(call_chunks("f", '{"a"', ":1}"), chat_request(tools=tools("f"))) == [
        ToolCallStart("call_1", "f"),
        ToolArgumentsDelta("call_1", '{"a"'),
        ToolArgumentsDelta("call_1", ":1}"),
        CALLS,
    ]


def test_a_declared_name_begins_the_call_before_its_arguments_come() -> None:
    parser = ChatChunkReader(chat_request(tools=tools("f")))
    assert parser.feed(event(call_chunk(0, call_id="c", name="f"))) == [ToolCallStart("c", "f")]


@pytest.mark.parametrize("declared", [("get_weather",), ("get_", "get_weather"), ()])
def test_a_name_in_pieces_is_put_together(declared: tuple[str, ...]) -> None:
    chunks = [call_chunk(0, call_id="c", name="get_"), call_chunk(0, name="weather"), call_chunk(0, "{}")]
    assert read([*chunks, delta_chunk("tool_calls")], chat_request(tools=tools(*declared) or None))[:2] == [
        ToolCallStart("c", "get_weather"),
        ToolArgumentsDelta("c", "{}"),
    ]


def test_a_call_without_arguments_begins_at_the_end() -> None:
    assert read([call_chunk(0, call_id="c", name="f"), delta_chunk("stop"), usage_chunk()]) == [
        ToolCallStart("c", "f"),
        ToolArgumentsDelta("c", "{}"),
        CALLS,
    ]


def test_calls_may_interleave() -> None:
    chunks = [
        call_chunk(0, "{", call_id="a", name="f"),
        call_chunk(1, "{ ", call_id="b", name="g"),
        call_chunk(0, "}"),
        call_chunk(1, " }"),
    ]
    assert read([*chunks, delta_chunk("tool_calls"), usage_chunk()]) == [
        ToolCallStart("a", "f"),
        ToolArgumentsDelta("a", "{"),
        ToolCallStart("b", "g"),
        ToolArgumentsDelta("b", "{ "),
        ToolArgumentsDelta("a", "}"),
        ToolArgumentsDelta("b", " }"),
        CALLS,
    ]


def test_calls_that_are_all_numbered_0_are_distinguished_by_their_ids() -> None:
    chunks = [call_chunk(0, "{}", call_id="a", name="f"), call_chunk(0, "[]", call_id="b", name="f")]
    starts = [delta for delta in read([*chunks, delta_chunk("stop")]) if isinstance(delta, ToolCallStart)]
    assert starts == [ToolCallStart("a", "f"), ToolCallStart("b", "f")]


@pytest.mark.parametrize(
    "ids", [(None, None), ("", ""), ("x", "x"), ("old", "old"), ("a\nb", "é"), ("y" * 300, "\ud800")]
)
def test_ids_that_are_missing_taken_or_odd_are_made(ids: tuple[str | None, ...]) -> None:
    history = [
        {
            "role": "assistant",
            "tool_calls": [{"id": "old", "type": "function", "function": {"name": "f", "arguments": ""}}],
        }
    ]
    chunks = [call_chunk(at, "{}", call_id=call_id, name="f") for at, call_id in enumerate(ids)]
    deltas = read([*chunks, delta_chunk("tool_calls")], chat_request(messages=history))
    call_ids = [delta.id for delta in deltas if isinstance(delta, ToolCallStart)]
    assert len(set(call_ids)) == 2
    assert "old" not in call_ids
    assert all(call_id == "x" or (call_id.startswith("call_") and len(call_id) >= 29) for call_id in call_ids)


def test_a_nameless_call_is_a_failure() -> None:
    assert type(failure([call_chunk(0, "{}", call_id="a"), delta_chunk("tool_calls")])) is UpstreamError


def test_stop_with_calls_means_tool_calls_and_length_means_length() -> None:
    chunks = [call_chunk(0, '{"a', call_id="a", name="f")]
    assert read([*chunks, delta_chunk("stop"), usage_chunk()])[-1] == CALLS
    assert read([*chunks, delta_chunk("length"), usage_chunk()])[-1] == Finish("length", USED)


def test_without_parallel_calls_the_first_one_is_all() -> None:
    chunks = [
        call_chunk(0, "{", call_id="a", name="f"),
        call_chunk(1, "[", call_id="b", name="g"),
        call_chunk(0, "}"),
        call_chunk(1, "]"),
        call_chunk(0, "!", call_id="c", name="h"),
        call_chunk(0, "!"),
    ]
    assert read([*chunks, delta_chunk("tool_calls"), usage_chunk()], chat_request(parallel_tool_calls=False)) == [
        ToolCallStart("a", "f"),
        ToolArgumentsDelta("a", "{"),
        ToolArgumentsDelta("a", "}"),
        CALLS,
    ]


def test_calls_without_end_are_refused() -> None:
    chunks = [call_chunk(at, "{}", name="f") for at in range(1100)]
    parser = ChatChunkReader(chat_request())
    parser.feed(b"".join(map(event, chunks)))
    assert isinstance(parser.failure, UpstreamError)


def test_a_custom_call_streams_its_raw_input() -> None:
    deltas = read(
        call_chunks("sh", '{"inp', 'ut": "ls', ' \\"x\\"\\n', "\\ud83d", '\\ude00"}'),
        chat_request(tools=tools(custom=["sh"])),
    )
    assert deltas[0] == ToolCallStart("call_1", "sh", custom=True)
    assert "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta)) == 'ls "x"\n😀'
    assert deltas[-1] == CALLS
