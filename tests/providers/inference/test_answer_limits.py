"""The bounds of one answer against a real server: bytes, tokens and seconds, also while data never pauses."""

import asyncio
import time
from typing import Any

import pytest

from apis.deltas import Finish, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart, Usage
from apis.errors import UpstreamError, UpstreamTimeout
from providers.inference.chat_completions.answer_limits import LOGPROB_BYTES
from providers.inference.chat_completions.chunks import ChatChunkReader
from providers.inference.chat_completions.usage import MAX_COUNT, parse_count, parse_usage
from tests.conformance.inference import drain
from tests.providers.inference.reading import read
from tests.providers.inference.remote import ROLE, chat_request, failure, sent, started
from tests.support.servers.upstream_server import (
    DONE,
    HANG,
    Chunk,
    Repeat,
    UpstreamServer,
    call_chunk,
    delta_chunk,
    event,
    http_chunk,
    plain_answer,
    stream,
    text_chunks,
)

MIB = 1024 * 1024
BOUND = MIB // 16


def endless(chunk: Chunk, times: int = 200, pause_s: float = 0.0) -> Repeat:
    return Repeat(http_chunk(event(chunk) * times), pause_s)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunk",
    [
        delta_chunk(content="z" * 1000),
        delta_chunk(content="ж" * 500),
        delta_chunk(reasoning="z" * 1000),
        delta_chunk(refusal="z" * 1000),
        delta_chunk(content="z"),
        call_chunk(0, "z" * 1000),
        delta_chunk(content="a" * 100, logprobs={"content": [{"token": "a", "logprob": -1.0}] * 100}),
    ],
    ids=lambda chunk: str(chunk["choices"][0]["delta"])[:30],
)
async def test_an_answer_without_an_end_has_a_bound(chunk: Chunk) -> None:
    """Text, reasoning, arguments and log probabilities all count."""
    answer = [*sent(ROLE, call_chunk(0, "", call_id="c", name="f")), endless(chunk, times=10)]
    async with asyncio.timeout(8):
        error, deltas = await failure(answer, chat_request(logprobs=True), max_answer_bytes=BOUND)
    assert isinstance(error, UpstreamError)
    assert f"max_answer_bytes ({BOUND})" in error.message
    size_bytes = sum(len(getattr(delta, "text", "").encode()) for delta in deltas)
    assert size_bytes < 1.5 * BOUND
    assert len(deltas) < 1.5 * BOUND / 16
    logprobs = sum(len(getattr(delta, "logprobs", ())) for delta in deltas)
    assert logprobs * LOGPROB_BYTES < 1.5 * BOUND


async def test_the_error_of_a_large_answer_names_the_setting_and_opens_no_breaker() -> None:
    """One model that repeats itself does not make its server unavailable to others."""
    answer = [*sent(ROLE), endless(delta_chunk(content="z" * 1000))]
    fields = {"max_answer_bytes": 65536, "breaker_failures": 1, "max_retries": 0}
    async with UpstreamServer(answer, answer) as upstream, started(upstream.base_url, **fields) as vllm:
        for _ in range(2):
            with pytest.raises(UpstreamError, match=r"max_answer_bytes \(65536\)"):
                await drain(vllm, chat_request())


async def test_an_answer_just_below_the_bound_is_whole() -> None:
    texts = ["z" * 1000] * 60
    server = UpstreamServer(stream(text_chunks(*texts)))
    async with server as upstream, started(upstream.base_url, max_answer_bytes=65536) as vllm:
        deltas = await drain(vllm, chat_request())
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "".join(texts)


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["content", "reasoning", "arguments"])
async def test_an_upstream_that_ignores_the_token_limit_is_cut_off(kind: str) -> None:
    """The answer ends with `length`, and the request to the upstream is closed."""
    chunk = call_chunk(0, "word ") if kind == "arguments" else delta_chunk(**{kind: "word "})
    answer = [*sent(ROLE, call_chunk(0, "{", call_id="c", name="f")), endless(chunk)]
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        async with asyncio.timeout(5):
            tools = [{"type": "function", "function": {"name": "f"}}]
            deltas = await drain(vllm, chat_request(max_completion_tokens=100, tools=tools))
            await upstream.left.wait()
    assert isinstance(deltas[-1], Finish)
    assert deltas[-1].reason == "length"
    assert 100 <= len(deltas) <= 150
    assert all(
        isinstance(delta, TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta) for delta in deltas[:-1]
    )


def test_a_token_that_comes_in_several_deltas_counts_once() -> None:
    """A server that splits its text into letters is not cut off before its tokens are used up."""
    text = "four" * 20
    deltas = read(text_chunks(*text), chat_request(max_completion_tokens=20))
    assert deltas[-1] == Finish("stop", Usage(11, 7))
    assert len(deltas) == 81


def test_an_end_after_the_limit_keeps_the_usage() -> None:
    reader = ChatChunkReader(chat_request(max_completion_tokens=16))
    deltas = reader.feed(b"".join(map(event, text_chunks(*["token "] * 60))) + DONE)
    assert deltas[-1] == Finish("length", Usage(11, 7))
    assert reader.was_cut
    assert len(deltas) == 37


# --- seconds ---------------------------------------------------------------------------------------------------------

FIRST = {"first_token_timeout_s": 0.3, "token_gap_timeout_s": 60}
GAP = {"first_token_timeout_s": 60, "token_gap_timeout_s": 0.3}
CALL = [ROLE, call_chunk(0, "{", call_id="c", name="f")]


@pytest.mark.parametrize(
    ("answer", "limits", "name"),
    [
        ([*sent(ROLE), endless(delta_chunk(content=""))], FIRST, "first_token"),
        ([*sent(ROLE), endless(delta_chunk(content=""), 1, 0.001)], FIRST, "first_token"),
        ([*sent(ROLE), endless(delta_chunk(role="assistant"))], FIRST, "first_token"),
        ([*sent(ROLE), Repeat(http_chunk(b"\n" * 60_000))], FIRST, "first_token"),
        ([*sent(ROLE), Repeat(http_chunk(b"\r\n" * 30_000))], FIRST, "first_token"),
        ([*sent(ROLE), Repeat(http_chunk(b": ping\n\n" * 5000))], FIRST, "first_token"),
        ([*sent(*CALL), endless(call_chunk(0, ""))], GAP, "token_gap"),
        ([*sent(*CALL), endless(call_chunk(0, ""), 1, 0.001)], GAP, "token_gap"),
        ([*sent(*CALL), endless(call_chunk(0, "", call_id="c", name="f"))], GAP, "token_gap"),
        ([*sent(ROLE, delta_chunk(content="a")), endless(delta_chunk(content=""))], GAP, "token_gap"),
    ],
)
async def test_limits_in_time_hold_while_data_never_pauses(answer: Any, limits: dict[str, Any], name: str) -> None:
    """Empty deltas for ever end at the limit."""
    began = time.monotonic()
    async with asyncio.timeout(5):
        error, _ = await failure(answer, **limits)
    assert type(error) is UpstreamTimeout
    assert f"{name}_timeout_s (0.3 s)" in error.message
    assert time.monotonic() - began < 2


async def test_the_first_token_has_its_limit_while_headers_are_waited_for() -> None:
    """The limit of the first token holds before the headers, too."""

    async with asyncio.timeout(3):
        error, _ = await failure([HANG], first_token_timeout_s=0.2, headers_timeout_s=60)
    assert "first_token_timeout_s (0.2 s)" in error.message


async def test_many_blank_lines_cost_little() -> None:
    """30 MB of blank lines are read in less than the second that 3 MB took."""
    blank = http_chunk(b"\n" * 1_000_000)
    answer = [*sent(ROLE), *[blank] * 30, *stream(text_chunks("a"))[1:]]
    async with UpstreamServer(answer) as upstream, started(upstream.base_url) as vllm:
        began = time.process_time()
        assert await drain(vllm, chat_request()) == [TextDelta("a"), Finish("stop", Usage(11, 7))]
        assert time.process_time() - began < 1.5


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (5, 5),
        (5.0, 5),
        ("5", 5),
        (10**30, MAX_COUNT),
        (1e300, MAX_COUNT),
        (float("inf"), MAX_COUNT),
        (-(10**30), 0),
        (float("nan"), 0),
        (None, 0),
        (True, 0),
        ([5], 0),
        ("five", 0),
        ("9" * 5000, 0),
    ],
)
def test_a_count_is_a_number_that_clients_can_read(value: object, count: int) -> None:
    """Counts are clamped where they enter."""
    assert parse_count(value) == count


@pytest.mark.parametrize("usage", [5, "x", [], {"prompt_tokens": {}}, {"prompt_tokens_details": 5}])
def test_no_usage_fails_a_good_answer(usage: Any) -> None:
    """A usage of the wrong form is none."""
    chunks: list[Chunk | str] = [delta_chunk(content="a"), delta_chunk("stop"), {"choices": [], "usage": usage}]
    assert read(chunks) == [TextDelta("a"), Finish("stop", Usage())]
    assert parse_usage(usage) == Usage()


def test_parts_of_a_total_are_at_most_the_total() -> None:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 10**30},
        "completion_tokens_details": {"reasoning_tokens": "9"},
    }
    assert parse_usage(usage) == Usage(5, 2, 5, 2)


def test_bytes_of_a_token_are_bytes() -> None:
    """Numbers that are no bytes are replaced by those of the token's text."""
    logprobs = {"content": [{"token": "a", "logprob": -1.0, "bytes": [10**30]}]}
    chunks = [delta_chunk(content="a", logprobs=logprobs), delta_chunk("stop")]
    (delta, _) = read(chunks, chat_request(logprobs=True))
    assert isinstance(delta, TextDelta)
    assert list(delta.logprobs[0].bytes) == [97]


async def test_a_models_list_with_odd_numbers_is_read() -> None:
    """One odd number hides no model."""
    odd = b'{"data":[{"id":"m","created":1e300,"max_model_len":"8192","owned_by":5}]}'

    async with UpstreamServer() as upstream, started(upstream.base_url) as vllm:
        upstream.routes["/v1/models"] = plain_answer(odd)
        (model,) = await vllm.models()
    assert (model.id, model.owned_by, model.created, model.context_tokens) == ("m", "upstream", MAX_COUNT, 8192)
