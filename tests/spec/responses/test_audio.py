"""/v1/audio/transcriptions and audio in messages, through the official SDK, by servers of OpenAI's kind."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from email.parser import BytesParser
from typing import Any

import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError, PermissionDeniedError

from tests.spec.accounts.test_stored_keys import new_key
from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests, create, plain, refusal
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    Answer,
    Received,
    UpstreamServer,
    error_answer,
    event,
    head,
    http_chunk,
    json_answer,
    plain_answer,
    stream,
    text_chunks,
)

Json = dict[str, Any]
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(range(256))
PATH = "/v1/audio/transcriptions"
TOKENS: Json = {"type": "tokens", "input_tokens": 12, "output_tokens": 3, "total_tokens": 15}
WHOLE = json_answer({"text": "Hello there.", "usage": TOKENS})


@asynccontextmanager
async def served_by(
    answer: Answer | Callable[[Received], Answer] = WHOLE, **fields: Any
) -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    """A router over a server of transcripts and a scripted model."""
    async with UpstreamServer(stream(text_chunks("I hear you.")), models=("whisper",)) as upstream:
        upstream.routes[PATH] = answer
        own = {"provider": "vllm", "base_url": upstream.base_url, "health_interval_s": 0, "max_retries": 0, **fields}
        providers = {"own": own, "scripted": {"provider": "scripted"}}
        async with serving({"provider": "router", "providers": providers, "aliases": {"speech": "whisper"}}) as served:
            yield served, upstream


async def transcribe(served: Served, **fields: Any) -> Any:
    transcriptions: Any = served.client.audio.transcriptions
    return await transcriptions.create(**{"model": "whisper", "file": ("talk.wav", WAV, "audio/wav"), **fields})


def form_of(upstream: UpstreamServer) -> tuple[Json, tuple[str | None, str, bytes]]:
    """The fields of the last form, with the entries of a list in a list, and its file."""
    received = upstream.received[-1]
    head_line = f"Content-Type: {received.headers['content-type']}\r\n\r\n".encode()
    fields: Json = {}
    file: tuple[str | None, str, bytes] = (None, "", b"")
    for part in BytesParser().parsebytes(head_line + received.body).get_payload():
        each: Any = part
        name = each.get_param("name", header="content-disposition")
        data = each.get_payload(decode=True)
        if each.get_filename() is not None:
            file = each.get_filename(), each.get_content_type(), data
        elif name.endswith("[]"):
            fields.setdefault(name, []).append(data.decode())
        else:
            fields[name] = data.decode()
    return fields, file


async def test_a_file_is_transcribed_by_the_models_server() -> None:
    async with served_by() as (served, upstream):
        answer = await transcribe(served, model="speech", language="en", prompt="Müller", temperature=0.2)
        fields, file = form_of(upstream)
    assert answer.text == "Hello there."
    assert answer.usage.to_dict() == TOKENS
    assert fields == {
        "model": "whisper",
        "response_format": "json",
        "language": "en",
        "prompt": "Müller",
        "temperature": "0.2",
    }
    assert file == ("talk.wav", "audio/wav", WAV)


async def test_a_text_is_a_text() -> None:
    async with served_by() as (served, upstream):
        assert await transcribe(served, response_format="text") == "Hello there."
        assert form_of(upstream)[0]["response_format"] == "json", "in which an error is no text"


@pytest.mark.parametrize("kind", ["srt", "vtt"])
async def test_subtitles_come_as_they_are(kind: str) -> None:
    subtitles = "1\n00:00:00,000 --> 00:00:01,000\nHello.\n"
    async with served_by(plain_answer(subtitles.encode(), headers={"content-type": "text/plain"})) as (served, _):
        assert await transcribe(served, response_format=kind) == subtitles


async def test_segments_and_words_come_whole() -> None:
    answer: Json = {"task": "transcribe", "language": "en", "duration": "1.5", "text": "Hello."}
    answer |= {"segments": [{"id": 0, "start": 0.0, "end": 1.5, "text": "Hello."}], "words": []}
    async with served_by(json_answer(answer)) as (served, upstream):
        verbose = await transcribe(served, response_format="verbose_json", timestamp_granularities=["word", "segment"])
        assert form_of(upstream)[0]["timestamp_granularities[]"] == ["word", "segment"]
    assert (verbose.text, verbose.segments[0].end) == ("Hello.", 1.5)
    assert verbose.usage.to_dict() == {"type": "duration", "seconds": 1.5}


def openai_events() -> list[Json]:
    deltas = [{"type": "transcript.text.delta", "delta": text} for text in ("Hello", " there.")]
    return [*deltas, {"type": "transcript.text.done", "text": "Hello there.", "usage": TOKENS}]


def vllm_chunks() -> list[Json]:
    chunks: list[Json] = [
        {"object": "transcription.chunk", "choices": [{"delta": {"content": text}, "finish_reason": None}]}
        for text in ("Hello", " there.")
    ]
    end: Json = {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}
    usage: Json = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}}
    return [*chunks, end, usage]


STREAMS: dict[str, Answer] = {
    "OpenAI's events": stream(openai_events()),
    "OpenAI's events without DONE": stream(openai_events(), done=False),
    "vLLM's chunks": stream(vllm_chunks()),
    "vLLM's chunks without DONE": stream(vllm_chunks(), done=False),
    "one object": WHOLE,
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_stream_is_in_openais_events_for_every_form_of_the_server(kind: str) -> None:
    async with served_by(STREAMS[kind]) as (served, upstream):
        events = [event async for event in await transcribe(served, stream=True)]
        assert form_of(upstream)[0]["stream"] == "true"
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "Hello there."
    assert events[-1].usage.to_dict() == TOKENS


LIES: dict[str, Answer] = {
    "no JSON": plain_answer(b"<html>", headers={"content-type": "text/html"}),
    "no text": json_answer({"words": []}),
    "a number": json_answer({"text": 7}),
    "a list": json_answer([1]),
    "a failure": error_answer(500),
    "nothing": plain_answer(b""),
}


async def read_stream(served: Served) -> list[Any]:
    return [event async for event in await transcribe(served, stream=True)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_server_is_an_error(lie: str, streamed: bool) -> None:
    async with served_by(LIES[lie]) as (served, _):
        with pytest.raises(APIError) as caught:
            await (read_stream(served) if streamed else transcribe(served))
    if isinstance(caught.value, APIStatusError):
        assert caught.value.status_code in (502, 503)


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    half = [head(), http_chunk(event(openai_events()[0])), CUT]
    async with served_by(half) as (served, _):
        events = await transcribe(served, stream=True)
        assert (await anext(events)).delta == "Hello"
        with pytest.raises(APIError):
            await anext(events)


async def test_what_the_server_calls_wrong_is_an_error_of_the_request() -> None:
    async with served_by(error_answer(400, "Invalid or unsupported audio file.")) as (served, _):
        with pytest.raises(BadRequestError, match="unsupported audio file"):
            await transcribe(served)


async def test_a_model_without_transcripts_is_refused_by_the_field() -> None:
    async with served_by(json_answer({"detail": "Not Found"}, 404)) as (served, _):
        for model in ("whisper", "scripted"):
            with pytest.raises(BadRequestError, match="transcribes no audio") as caught:
                await transcribe(served, model=model)
            assert caught.value.param == "model"
        with pytest.raises(NotFoundError) as unknown:
            await transcribe(served, model="nobody")
        assert unknown.value.param == "model"


REFUSED: dict[str, tuple[Json, str]] = {
    "speakers": ({"response_format": "diarized_json"}, "response_format"),
    "a stream of subtitles": ({"stream": True, "response_format": "srt"}, "response_format"),
    "log probabilities": ({"include": ["logprobs"]}, "include"),
    "keywords": ({"keywords": ["cat"]}, "keywords"),
    "languages": ({"languages": ["en"]}, "languages"),
    "names of speakers": ({"known_speaker_names": ["Ann"]}, "known_speaker_names"),
    "pieces": ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy"),
    "a high temperature": ({"temperature": 2}, "temperature"),
    "an unknown granularity": ({"timestamp_granularities": ["letter"]}, "timestamp_granularities[0]"),
    "no file": ({"file": b"", "extra_body": {"model": ""}}, "model"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_what_is_not_offered_is_refused_by_its_field(case: tuple[Json, str]) -> None:
    fields, param = case
    async with served_by() as (served, upstream):
        with pytest.raises(BadRequestError) as caught:
            await transcribe(served, **fields)
        assert caught.value.param == param
        assert not [request for request in upstream.received if request.path == PATH]


async def test_a_file_above_the_limit_is_refused() -> None:
    async with served_by() as (served, upstream):
        with pytest.raises(APIStatusError) as caught:
            await transcribe(served, file=("long.wav", bytes(26 * 2**20)))
        assert caught.value.status_code == 413
        assert not [request for request in upstream.received if request.path == PATH]


async def test_a_client_that_leaves_ends_the_work_of_the_server() -> None:
    for fields in ({}, {"stream": True}):
        async with served_by([head(), HANG]) as (served, upstream):
            asking = asyncio.create_task(transcribe(served, **fields))
            async with asyncio.timeout(5):
                while not any(request.path == PATH for request in upstream.received):
                    await upstream.until_received(len(upstream.received) + 1)
            asking.cancel()
            await asyncio.wait_for(upstream.left.wait(), 5)


async def test_a_key_for_other_models_transcribes_nothing() -> None:
    async with UpstreamServer(models=("whisper",)) as upstream:
        vllm = {"provider": "vllm", "base_url": upstream.base_url, "health_interval_s": 0}
        async with serving(vllm, more={"accounts": {"provider": "stored"}}) as served:
            key = await new_key(served, "alpha", "model:scripted")
            async with sdk_client(served.url, key.value) as client:
                with pytest.raises(PermissionDeniedError) as caught:
                    await client.audio.transcriptions.create(model="whisper", file=("talk.wav", WAV))
    assert caught.value.code == "model_not_allowed"


# --- audio in messages -----------------------------------------------------------------------------------------------

AUDIO: Json = {"data": base64.b64encode(WAV).decode(), "format": "wav"}
PART: Json = {"type": "input_audio", "input_audio": AUDIO}


def chat_of(*parts: Json) -> Json:
    return {"model": "whisper", "messages": [{"role": "user", "content": [*parts]}]}


async def test_audio_of_a_chat_reaches_a_model_that_may_hear_it() -> None:
    async with served_by() as (served, upstream):
        completions: Any = served.client.chat.completions
        answer = await completions.create(**chat_of({"type": "text", "text": "What is said?"}, PART))
        assert answer.choices[0].message.content == "I hear you."
        assert upstream.chats[-1].json["messages"][0]["content"][1] == PART


async def test_audio_of_a_response_reaches_the_model_in_each_turn() -> None:
    async with served_by() as (served, upstream):
        asking: Json = {"model": "whisper", "input": [{"role": "user", "content": [PART]}]}
        first = await create(served, **asking)
        assert first.output_text == "I hear you."
        assert upstream.chats[-1].json["messages"][0]["content"] == [PART]
        await create(served, model="whisper", input="And now?", previous_response_id=first.id)
        assert upstream.chats[-1].json["messages"][0]["content"] == [PART]
        listed = await served.client.responses.input_items.with_raw_response.list(first.id)
        assert json.loads(listed.text)["data"][0]["content"] == [PART]


async def test_audio_for_a_model_without_hearing_is_refused_by_its_place() -> None:
    async with served_by(modalities=["image"]) as (served, upstream):
        completions: Any = served.client.chat.completions
        with pytest.raises(BadRequestError, match="takes no audio") as caught:
            await completions.create(**chat_of({"type": "text", "text": "What?"}, PART))
        assert caught.value.param == "messages[0].content[1]"
        error = await refusal(served, model="whisper", input=[{"role": "user", "content": [PART]}])
        assert error["param"] == "input[0].content[0]"
        assert not upstream.chats


BROKEN: dict[str, tuple[Json, str]] = {
    "no base64": ({**AUDIO, "data": "@@"}, "data"),
    "no data": ({**AUDIO, "data": ""}, "data"),
    "a format in words": ({**AUDIO, "format": "audio/wav"}, "format"),
    "no format": ({"data": AUDIO["data"]}, "format"),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
async def test_audio_that_is_none_is_refused_by_its_field(case: tuple[Json, str]) -> None:
    audio, field = case
    part = {"type": "input_audio", "input_audio": audio}
    async with serving() as served:
        completions: Any = served.client.chat.completions
        with pytest.raises(BadRequestError) as caught:
            await completions.create(**{**chat_of(part), "model": "scripted"})
        assert caught.value.param == f"messages[0].content[0].input_audio.{field}"
        error = await refusal(served, input=[{"role": "user", "content": [part]}])
        assert error["param"] == f"input[0].content[0].input_audio.{field}"


async def test_audio_in_the_output_of_a_function_is_heard() -> None:
    call: Json = {"type": "function_call", "call_id": "c1", "name": "record", "arguments": "{}"}
    output: Json = {"type": "function_call_output", "call_id": "c1", "output": [PART]}
    async with serving() as served:
        await create(served, input=[{"role": "user", "content": "Listen."}, call, output])
        sent_messages = plain(chat_requests(served)[-1].messages)
    assert sent_messages[-1]["content"] == [PART]
