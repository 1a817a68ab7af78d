"""ChatChunks: streams, each with the deltas that it must become."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.deltas import (
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TokenLogprob,
    ToolArgumentsDelta,
    ToolCallStart,
    TopLogprob,
    Usage,
)
from apis.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    StackError,
    UpstreamError,
)
from providers.inference.chat_completions.chunks import ChatChunkReader
from tests.providers.inference.reading import USED, chat_request, failure, joined, read, read_cut, tools
from tests.support.servers.upstream_server import (
    DONE,
    Chunk,
    call_chunk,
    call_chunks,
    delta_chunk,
    event,
    text_chunks,
    usage_chunk,
)

STOP = Finish("stop", USED)


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
def test_a_stop_string_is_known_where_the_server_names_it(field: str) -> None:
    for value, sequence in (("END", "END"), ("end_turn", None), (5, None)):
        chunks = text_chunks("Hi")
        chunks[-2]["choices"][0][field] = value
        assert read(chunks, chat_request(stop=["END"]))[-1] == Finish("stop", USED, sequence)


def test_text_and_reasoning_become_their_deltas() -> None:
    chunks = text_chunks("Hel", "lo", reasoning=["hm", "m"])
    assert read(chunks) == [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta("Hel"), TextDelta("lo"), STOP]


def test_both_names_of_reasoning_are_read_and_the_same_thought_twice_is_one() -> None:
    chunks = [delta_chunk(reasoning_content="a"), delta_chunk(reasoning="b", reasoning_content="b"), *text_chunks("c")]
    assert read(chunks) == [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), STOP]


def test_a_refusal_is_a_refusal() -> None:
    assert read([delta_chunk(refusal="No."), *text_chunks()]) == [RefusalDelta("No."), STOP]


def test_one_chunk_may_hold_everything() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    chunk = delta_chunk("tool_calls", reasoning="r", content="t", tool_calls=[call])
    assert read([chunk]) == [
        ReasoningDelta("r"),
        TextDelta("t"),
        ToolCallStart("c1", "f"),
        ToolArgumentsDelta("c1", "{}"),
        Finish("tool_calls", Usage()),
    ]


@pytest.mark.parametrize(
    ("chunks", "texts"),
    [
        ((r"\ud83d", r"\ude00"), ["😀"]),
        ((r"a\ud83d", r"\ude00b"), ["a", "😀b"]),
        ((r"a\ud83d\ude00",), ["a😀"]),
        ((r"a\ud83d", "b"), ["a", "\ufffdb"]),
        ((r"a\ude00b",), ["a\ufffdb"]),
        ((r"a\ud83d",), ["a", "\ufffd"]),
        ((r"\ud83d", r"\ud83d\ude00"), ["\ufffd😀"]),
        ((r"\ud83d", "", r"\ude00"), ["😀"]),
    ],
)
def test_surrogates_are_joined_or_replaced(chunks: tuple[str, ...], texts: list[str]) -> None:
    raw = ['{"choices":[{"index":0,"delta":{"content":"' + text + '"}}]}' for text in chunks]
    assert read([*raw, *text_chunks()]) == [*map(TextDelta, texts), STOP]


def test_half_a_pair_is_let_go_before_another_kind_of_delta() -> None:
    half = r'{"choices":[{"delta":{"reasoning":"\ud83d"}}]}'
    assert read([half, *text_chunks("a")]) == [ReasoningDelta("\ufffd"), TextDelta("a"), STOP]
    half = r'{"choices":[{"delta":{"content":"\ud83d"}}]}'
    assert read([half, *call_chunks("f", "{}")])[:2] == [TextDelta("\ufffd"), ToolCallStart("call_1", "f")]


def test_wrong_utf8_is_replaced() -> None:
    raw = event('{"choices":[{"delta":{"content":"a#b"}}]}').replace(b"#", b"\xff")
    assert read_cut(raw + b"".join(map(event, text_chunks())) + DONE, []) == [TextDelta("a\ufffdb"), STOP]


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk",
    [
        "{}",
        '{"choices":[]}',
        '{"choices":null}',
        '{"choices":[{"index":1,"delta":{"content":"second"},"finish_reason":"length"}]}',
        '{"choices":[{"index":0,"delta":{"content":null,"new":{"x":[1]}},"stop_reason":7}],"new":5}',
        '{"choices":[{"index":0,"delta":null}]}',
        '{"choices":[{"index":0}]}',
        '{"choices":[{"index":0,"delta":{}}],"usage":null,"error":null}',
    ],
)
def test_empty_chunks_are_skipped(chunk: str) -> None:
    assert read([chunk, *text_chunks("a")]) == [TextDelta("a"), STOP]


@pytest.mark.parametrize(
    "chunk",
    [
        "{",
        "nonsense",
        "[]",
        "null",
        "5",
        '{"choices":[{"delta":{"content":NaN}}]}',
        '{"usage":{"prompt_tokens":Infinity}}',
        '{"choices":{}}',
        '{"a":1},{"b":2}',
        "[" * 100_000,
        '{"x":' + "[" * 100_000,
        '{"error":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_an_invalid_chunk_fails_the_stream_after_the_deltas_before_it(chunk: str) -> None:
    parser = ChatChunkReader(chat_request())
    assert parser.feed(event(delta_chunk(content="a")) + event(chunk) + event(delta_chunk(content="b"))) == [
        TextDelta("a")
    ]
    assert isinstance(parser.failure, UpstreamError)
    assert "nonsense" not in parser.failure.message
    assert parser.feed(event(delta_chunk(content="c")) + DONE) == []
    assert parser.end() == []


def test_what_follows_a_finish_reason_is_part_of_the_answer() -> None:
    """The answer is read to the end of the stream, and its last finish reason counts."""
    late = [delta_chunk(content="b"), call_chunk(0, "{}", call_id="x", name="f"), delta_chunk("length")]
    assert read([delta_chunk("stop", content="a"), *late, usage_chunk(1, 2)]) == [
        TextDelta("a"),
        TextDelta("b"),
        ToolCallStart("x", "f"),
        ToolArgumentsDelta("x", "{}"),
        Finish("length", Usage(1, 2)),
    ]


def test_a_finish_reason_within_the_answer_is_no_end() -> None:
    """Where more follows the last finish reason, only `[DONE]` says that it is all."""
    chunks = [delta_chunk("stop", content="a"), delta_chunk(content="b")]
    assert read(chunks)[:2] == [TextDelta("a"), TextDelta("b")]
    assert type(failure(chunks, done=False)) is UpstreamError
    assert read([*chunks, delta_chunk("stop")], done=False)[-1] == Finish("stop", Usage())


@pytest.mark.parametrize(
    ("reasons", "means"), [(("length", "stop"), "length"), (("stop", "content_filter"), "content_filter")]
)
def test_of_two_finish_reasons_at_one_end_the_one_that_takes_more_counts(reasons: Any, means: Any) -> None:
    """An answer that was cut is not whole because another chunk says so."""
    assert read([delta_chunk(content="a"), *map(delta_chunk, reasons)])[-1] == Finish(means, Usage())


def test_usage_has_its_details_and_never_less_than_nothing() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}}
    assert read([delta_chunk("stop"), usage_chunk(9, 5, **details)]) == [Finish("stop", Usage(9, 5, 3, 2))]
    nothing = {"prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": None}}
    assert read([delta_chunk("stop"), usage_chunk(-9, 5, **nothing)]) == [Finish("stop", Usage(0, 5))]
    assert read([delta_chunk("stop")]) == [Finish("stop", Usage())]


def test_usage_in_every_chunk_is_the_last_one() -> None:
    chunks = [{**delta_chunk(content="a"), "usage": {"prompt_tokens": 4, "completion_tokens": n}} for n in (1, 2)]
    assert read([*chunks, delta_chunk("stop")])[-1] == Finish("stop", Usage(4, 2))


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "means"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "content_filter"), ("tool_calls", "stop")],
)
def test_a_finish_reason_that_is_one(said: str, means: str) -> None:
    assert read([delta_chunk(content="a"), delta_chunk(said), usage_chunk()]) == [TextDelta("a"), Finish(means, USED)]  # pyright: ignore[reportArgumentType] - the table's column


@pytest.mark.parametrize("said", ["abort", "error", "repetition", "", " ", "null", None])
@pytest.mark.parametrize("done", [True, False])
def test_a_finish_reason_that_is_none(said: str | None, done: bool) -> None:
    assert type(failure([delta_chunk(content="a"), delta_chunk(said)], done=done)) is UpstreamError


def test_done_comes_once_twice_or_not_at_all() -> None:
    whole = text_chunks("a")
    assert read(whole) == read([*whole, "[DONE]", "[DONE]"]) == read(whole, done=False) == [TextDelta("a"), STOP]
    assert read([*whole, "[DONE]", delta_chunk(content="late")]) == [TextDelta("a"), STOP]


def test_done_without_a_finish_is_a_failure() -> None:
    assert type(failure([delta_chunk(content="a")])) is UpstreamError
    assert type(failure([])) is UpstreamError
    assert type(failure([], done=False)) is UpstreamError


def test_done_within_text_is_text() -> None:
    assert read(text_chunks("[DONE]", "data: [DONE]\n\n")) == [TextDelta("[DONE]"), TextDelta("data: [DONE]\n\n"), STOP]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "secret detail", "code": 500, "type": "InternalServerError"}, UpstreamError),
        ({"message": "bad temperature", "code": 400}, InvalidRequest),
        ({"message": "This model's maximum context length is 4096 tokens.", "code": 400}, ContextLengthExceeded),
        ({"message": "the request exceeds", "type": "exceed_context_size_error", "code": 400}, ContextLengthExceeded),
        ({"message": "model m does not exist", "code": 404}, ModelNotFound),
        ({"message": "slow down", "code": 429}, RateLimited),
        ("secret detail", UpstreamError),
        ({}, UpstreamError),
        ([1], UpstreamError),
    ],
)
def test_an_error_in_the_stream_is_mapped(error: Any, kind: type[StackError]) -> None:
    exc = failure([delta_chunk(content="a"), {"error": error}])
    assert type(exc) is kind
    assert "secret" not in exc.message


def test_the_older_form_of_an_error_is_one_too() -> None:
    chunk = {"object": "error", "message": "bad temperature", "code": 400}
    assert type(failure([chunk])) is InvalidRequest


# --- log probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_come_with_their_text_bytes_and_floor() -> None:
    top = [{"token": "b", "logprob": -1e308, "bytes": [98]}]
    logprobs = {"content": [{"token": "é", "logprob": -0.5, "bytes": None, "top_logprobs": top}]}
    assert read([delta_chunk(content="é", logprobs=logprobs), *text_chunks()], chat_request(logprobs=True)) == [
        TextDelta("é", (TokenLogprob("é", -0.5, [195, 169], (TopLogprob("b", -9999.0, [98]),)),)),
        STOP,
    ]


def test_logprobs_of_a_token_that_is_no_text_yet_wait_for_it() -> None:
    def chunk(text: str | None, token: str) -> Chunk:
        logprobs = {"content": [{"token": token, "logprob": -1.0, "bytes": [1], "top_logprobs": []}]}
        return delta_chunk(logprobs=logprobs, **({} if text is None else {"content": text}))

    one, two = (TokenLogprob(token, -1.0, [1]) for token in ("x", "y"))
    chunks = [chunk("", "x"), chunk("😀", "y"), chunk(None, "control"), *text_chunks()]
    assert read(chunks, chat_request(logprobs=True)) == [
        TextDelta("😀", (one, two)),
        STOP,
    ]


def test_logprobs_that_were_not_requested_are_skipped() -> None:
    """Log probabilities are decoded for a request that wants them, and not for others."""
    odd = {"content": [{"token": 5, "logprob": "no number"}] * 3}
    assert read([delta_chunk(content="a", logprobs=odd), *text_chunks()]) == [TextDelta("a"), STOP]


# --- cuts ------------------------------------------------------------------------------------------------------------

EVERYTHING = [
    *text_chunks("é😀", "b", reasoning=["r", "s"])[:-2],
    r'{"choices":[{"delta":{"content":"\ud83d"}}]}',
    r'{"choices":[{"delta":{"content":"\ude00"}}]}',
    *call_chunks("sh", '{"input": "a\\n', '\\u00e9"', "}")[:-2],
    call_chunk(1, '{"x":', call_id="b", name="f"),
    call_chunk(1, "1}"),
    delta_chunk("tool_calls"),
    usage_chunk(),
]


@settings(max_examples=200)
@given(st.data())
def test_no_cut_changes_what_a_stream_means(data: st.DataObject) -> None:
    line_end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    raw = (b"".join(event(chunk) for chunk in EVERYTHING) + b": ping\n\n" + DONE).replace(b"\n", line_end)
    request = chat_request(tools=tools("f", custom=["sh"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    expected = joined(read_cut(raw, [], request))
    assert ("call 0", "sh", True) in expected
    assert joined(read_cut(raw, cuts, request)) == expected


@given(st.text(max_size=40), st.lists(st.integers(1, 400), max_size=6))
def test_any_text_passes_and_can_be_encoded(text: str, cuts: list[int]) -> None:
    raw = event(json.dumps(delta_chunk(content=text))) + event(delta_chunk("stop")) + DONE
    deltas = read_cut(raw, sorted(min(cut, len(raw)) for cut in cuts))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == text
