"""How a stream looks as bytes: headers, frames, dialects, and what is sent while there is nothing to say."""

import json
from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseTextDeltaEvent,
)

from apis.responses import CreateResponse
from providers.responses.events.response_object import begin_response
from stack.http.sse import DONE_FRAME, encode_frames
from tests.stack.http.raw import ask, check_error, connection, request
from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.servers.serving import scripted, serving


def text_delta(text: str) -> ResponseTextDeltaEvent:
    return ResponseTextDeltaEvent(
        type="response.output_text.delta",
        item_id="msg_1",
        output_index=0,
        content_index=0,
        delta=text,
        logprobs=[],
        sequence_number=7,
    )


def thought(text: str) -> ResponseReasoningTextDeltaEvent:
    return ResponseReasoningTextDeltaEvent(
        type="response.reasoning_text.delta",
        item_id="rs_1",
        output_index=0,
        content_index=0,
        delta=text,
        sequence_number=8,
    )


def response() -> Response:
    return begin_response(CreateResponse.model_validate({"model": "m", "input": "hi"}), "resp_1", created_at=5)


def test_a_frame_is_an_event_line_a_data_line_and_a_blank_line() -> None:
    assert encode_frames([text_delta("a"), thought("b")], "openai") == (
        b"event: response.output_text.delta\n"
        b'data: {"content_index":0,"delta":"a","item_id":"msg_1","logprobs":[],"output_index":0,"sequence_number":7,'
        b'"type":"response.output_text.delta"}\n\n'
        b"event: response.reasoning_text.delta\n"
        b'data: {"content_index":0,"delta":"b","item_id":"rs_1","output_index":0,"sequence_number":8,'
        b'"type":"response.reasoning_text.delta"}\n\n'
    )


def test_nothing_frames_to_nothing() -> None:
    assert encode_frames([], "openai") == b""


@pytest.mark.parametrize(
    "text", ["", "\n", "\r\n\r\n", "data: [DONE]\n\n", "\u2028\u2029\x85", "\0", "😀é", '"\\', "event: x", "\ufeff"]
)
def test_no_text_can_break_a_frame(text: str) -> None:
    for dialect in ("openai", "open-responses"):
        raw = encode_frames([text_delta(text)], dialect)
        assert raw.count(b"\n") == 3
        assert raw.count(b"\r") == 0
        [event] = check_frames(raw + DONE_FRAME)
        assert event["delta"] == text


def test_the_other_dialect_has_other_names() -> None:
    [event] = check_frames(encode_frames([thought("b")], "open-responses") + DONE_FRAME)
    assert event["type"] == "response.reasoning.delta"
    [event] = check_frames(encode_frames([text_delta("b")], "open-responses") + DONE_FRAME)
    assert event["type"] == "response.output_text.delta"


@pytest.mark.parametrize("text", ["a", "a longer piece of text", "é" * 40])
def test_obfuscation_hides_the_length_of_a_delta(text: str) -> None:
    [event] = check_frames(encode_frames([text_delta(text)], "openai", obfuscate=True) + DONE_FRAME)
    assert event["delta"] == text
    assert (len(text) + len(event["obfuscation"])) % 32 == 0
    [plain] = check_frames(encode_frames([text_delta(text)], "openai") + DONE_FRAME)
    assert "obfuscation" not in plain


def test_times_are_whole_seconds_and_texts_that_look_like_times_stay() -> None:
    whole = response().model_copy(
        update={"created_at": 5.0, "completed_at": 6.0, "metadata": {"a": '"created_at":5.0,'}}
    )
    raw = encode_frames(
        [ResponseCompletedEvent(type="response.completed", response=whole, sequence_number=1)], "openai"
    )
    [event] = check_frames(raw + DONE_FRAME)
    assert '"created_at":5,' in raw.decode()
    assert '"completed_at":6,' in raw.decode()
    assert event["response"]["metadata"] == {"a": '"created_at":5.0,'}


# --- served ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "*/*"])
async def test_a_stream_is_sent_as_one_for_any_accept_header(accept: str) -> None:
    async with serving() as served:
        headers = [("accept", accept), ("accept-encoding", "gzip, br")]
        answer = await ask(served.url, {"model": "scripted", "input": "hi there", "stream": True}, headers=headers)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert "content-length" not in answer.headers
        events = check_frames(answer.body)
        check_stream(events)
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hi there"


async def test_the_dialect_is_chosen_by_header_and_by_config() -> None:
    body: dict[str, Any] = {"model": "scripted", "input": "hi", "stream": True}
    thinks = scripted([{"reasoning": "hm"}, {"text": "hi"}])

    async def reasoning_events(url: str, *headers: tuple[str, str]) -> set[str]:
        answer = await ask(url, body, headers=headers)
        return {event["type"] for event in check_frames(answer.body) if "reasoning" in event["type"]}

    theirs = {"response.reasoning.delta", "response.reasoning.done"}
    ours = {"response.reasoning_text.delta", "response.reasoning_text.done"}
    async with serving(thinks) as served:
        assert await reasoning_events(served.url) == ours
        assert await reasoning_events(served.url, ("x-responses-dialect", "open-responses")) == theirs
        error = check_error(await ask(served.url, body, headers=[("x-responses-dialect", "klingon")]), 400)
        assert error["code"] == "invalid_value"
    async with serving(thinks, server={"dialect": "open-responses"}) as served:
        served.streams.check = False  # the laws are written in the other dialect
        assert await reasoning_events(served.url) == theirs
        assert await reasoning_events(served.url, ("x-responses-dialect", "openai")) == ours


async def test_a_long_silence_is_filled_with_comments() -> None:
    script = scripted([{"wait_s": 0.6}, {"text": "a"}, {"wait_s": 0.6}, {"text": "b"}])
    async with serving(script, server={"keep_alive_s": 0.2}) as served:
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, {"model": "scripted", "input": "hi", "stream": True}))
            raw = b""
            while DONE_FRAME not in raw:
                raw += await reader.readuntil(b"\n\n")
        before, _, after = raw.partition(b"response.output_item.added")
        assert before.startswith(b"HTTP/1.1 200 OK")
        assert b"response.created" in before
        assert b": keep-alive\n\n" in before
        assert b": keep-alive\n\n" in after
        assert before.index(b"response.created") < before.index(b": keep-alive")


async def test_the_first_event_does_not_wait_for_the_model() -> None:
    script = scripted([{"wait_s": 30}, {"text": "late"}])
    async with serving(script) as served, connection(served.url) as (reader, writer):
        writer.write(request(served.url, {"model": "scripted", "input": "hi", "stream": True}))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"response.in_progress")


async def test_what_the_model_refuses_at_once_is_a_status_and_no_stream() -> None:
    async with serving(scripted([{"fail": "It is gone."}])) as served:
        for stream in (False, True):
            error = check_error(await ask(served.url, {"model": "scripted", "input": "hi", "stream": stream}), 502)
            assert (error["message"], error["type"]) == ("It is gone.", "server_error")


async def test_a_later_failure_is_an_event_of_the_stream() -> None:
    async with serving(scripted([{"text": "Hel"}, {"fail": "It is gone."}])) as served:
        answer = await ask(served.url, {"model": "scripted", "input": "hi", "stream": True})
        assert answer.status == 200
        events = check_frames(answer.body)
        check_stream(events)
        assert all("error" not in event for event in events)
        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "It is gone."}
        assert last["response"]["output"][0]["status"] == "incomplete"
        stored = await ask(served.url, method="GET", path=f"/v1/responses/{last['response']['id']}")
        assert json.loads(stored.body) == last["response"]


async def test_a_whole_answer_that_fails_is_the_status_of_its_cause() -> None:
    async with serving(scripted([{"text": "Hel"}, {"fail": "It is gone."}])) as served:
        error = check_error(await ask(served.url, {"model": "scripted", "input": "hi"}), 502)
        assert error["message"] == "It is gone."
