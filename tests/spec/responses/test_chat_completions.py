"""Chat completions, the second way to the same models."""

from typing import Any

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError

from tests.support.models.images import PIXEL_URL
from tests.support.sdk.answer_shapes import SHAPES, Script, call
from tests.support.sdk.requests import chat_requests, messages
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import UpstreamServer, delta_chunk, usage_chunk
from tests.support.servers.upstream_server import stream as played

Json = dict[str, Any]
TOOL: Json = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
ACCUMULATED = {name: shape for name, shape in SHAPES.items() if "custom" not in name}
"""The SDK puts no pieces of custom calls together here."""
USAGE = {"input_tokens": 9, "output_tokens": 7, "cached_tokens": 4, "reasoning_tokens": 3}


async def complete(served: Served, **fields: Any) -> Any:
    """A whole completion; of `hi` unless `fields` say otherwise."""
    completions: Any = served.client.chat.completions
    return await completions.create(**{"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **fields})


async def chunks(served: Served, **fields: Any) -> list[Any]:
    """All chunks of a streamed completion."""
    return [chunk async for chunk in await complete(served, stream=True, **fields)]


def joined(received_events: list[Any], field: str = "content") -> str:
    """One field of all deltas."""
    deltas = [chunk.choices[0].delta for chunk in received_events if chunk.choices]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


async def test_an_answer_comes_whole() -> None:
    async with serving(scripted([{"text": ["Hel", "lo"]}])) as served:
        completion = await complete(served)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")
    assert completion.model == "scripted"


async def test_an_answer_comes_in_chunks() -> None:
    async with serving(scripted([{"text": ["Hel", "lo"]}])) as served:
        received_chunks = await chunks(served)
    assert received_chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in received_chunks] == ["", "Hel", "lo", None]
    assert [chunk.choices[0].finish_reason for chunk in received_chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in received_chunks}) == 1
    assert {chunk.object for chunk in received_chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("shape", ACCUMULATED.values(), ids=ACCUMULATED)
async def test_what_the_sdk_accumulates_is_the_whole_answer(shape: Script) -> None:
    async with serving(scripted(shape)) as served:
        whole = (await complete(served)).choices[0]
        fields: Json = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        async with served.client.chat.completions.stream(**fields) as events:
            async for _ in events:
                pass
            streamed: Any = (await events.get_final_completion()).choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert (streamed.message.refusal or None) == whole.message.refusal
    for one, other in zip(streamed.message.tool_calls or (), whole.message.tool_calls or (), strict=True):
        assert (one.id, one.function.name, one.function.arguments) == (
            other.id,
            other.function.name,
            other.function.arguments,
        )


async def test_the_reasoning_is_sent_with_the_answer() -> None:
    """Under both names that servers give it."""
    async with serving(scripted([{"reasoning": ["th", "ink"]}, {"text": "Hello"}])) as served:
        whole = (await complete(served)).choices[0].message
        received_chunks = await chunks(served)
    assert (whole.reasoning_content, whole.content) == ("think", "Hello")
    assert (joined(received_chunks, "reasoning_content"), joined(received_chunks)) == ("think", "Hello")
    assert (whole.reasoning, joined(received_chunks, "reasoning")) == ("think", "think")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True}, "'store'.* not offered"),
        ({"functions": [{"name": "f"}]}, "has moved to 'tools'"),
        ({"audio": {"format": "mp3", "voice": "ash"}}, "'audio' is not offered"),
        ({"modalities": ["text", "audio"]}, "'modalities'.* not offered"),
        ({"web_search_options": {}}, "'web_search_options' is not offered"),
    ],
)
async def test_what_a_completion_cannot_have_is_refused_by_name(fields: Json, words: str) -> None:
    """Neither dropped nor called invalid."""
    async with serving() as served:
        with pytest.raises(BadRequestError, match=words) as caught:
            await complete(served, **fields)
        assert caught.value.param == next(iter(fields))
        await complete(served, store=False, modalities=["text"])


async def test_calls_of_functions_are_returned() -> None:
    calls = [call("get", '{"a"', ":1}", id="c1"), call("get", '{"b"', ":2}", id="c2")]
    async with serving(scripted([{"calls": calls}])) as served:
        choice = (await complete(served, tools=[TOOL])).choices[0]
        received_chunks = await chunks(served, tools=[TOOL])
    assert choice.finish_reason == received_chunks[-1].choices[0].finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [(each.id, each.function.arguments) for each in choice.message.tool_calls] == [
        ("c1", '{"a":1}'),
        ("c2", '{"b":2}'),
    ]
    pieces = [each for chunk in received_chunks if chunk.choices for each in chunk.choices[0].delta.tool_calls or ()]
    assert [(each.index, each.id) for each in pieces if each.id] == [(0, "c1"), (1, "c2")]
    assert [each.index for each in pieces] == [0, 1, 0, 1, 0, 1]


async def test_a_custom_call_is_sent_whole() -> None:
    async with serving(scripted([call("patch", "***", " End", custom=True)])) as served:
        tool = {"type": "custom", "custom": {"name": "patch"}}
        (called,) = (await complete(served, tools=[tool])).choices[0].message.tool_calls
    assert (called.type, called.custom.name, called.custom.input) == ("custom", "patch", "*** End")


async def test_a_refusal_is_sent_as_a_refusal() -> None:
    async with serving(scripted([{"refusal": ["N", "o"]}])) as served:
        assert (await complete(served)).choices[0].message.refusal == "No"
        assert joined(await chunks(served), "refusal") == "No"


async def test_usage_is_whole() -> None:
    script = scripted([{"text": "a"}, {"finish": "stop", "usage": USAGE}])
    async with serving(script) as served:
        usage = (await complete(served)).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 7, 16)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert usage.completion_tokens_details.reasoning_tokens == 3


async def test_usage_of_a_stream_comes_last_to_those_who_ask() -> None:
    async with serving(scripted([{"text": "a"}, {"finish": "stop", "usage": USAGE}])) as served:
        received_chunks = await chunks(served, stream_options={"include_usage": True})
        silent = await chunks(served)
    assert received_chunks[-1].choices == []
    assert received_chunks[-1].usage.total_tokens == 16
    assert [chunk.usage for chunk in received_chunks[:-1]] == [None] * (len(received_chunks) - 1)
    assert [chunk.usage for chunk in silent] == [None] * len(silent)


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
async def test_the_reason_of_the_end_is_the_models(reason: str) -> None:
    async with serving(scripted([{"text": "a"}, {"finish": reason}])) as served:
        assert (await complete(served)).choices[0].finish_reason == reason
        assert (await chunks(served))[-1].choices[0].finish_reason == reason


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_either_token_limit_holds(field: str) -> None:
    async with serving(scripted([{"text": ["a "] * 20}])) as served:
        choice = (await complete(served, **{field: 3})).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a a a ", "length")


async def test_logprobs_are_returned() -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    end = [delta_chunk("stop", content=""), usage_chunk()]
    answer = played([delta_chunk(content="Hi", logprobs={"content": [token]}), *end])
    async with UpstreamServer(answer, models=["scripted"]) as upstream:
        inference = {"provider": "vllm", "base_url": upstream.base_url}
        async with serving(inference) as served:
            whole = (await complete(served, logprobs=True)).choices[0].logprobs
            received_chunks = await chunks(served, logprobs=True)
        assert upstream.chats[0].json["logprobs"] is True
    streamed = [
        each
        for chunk in received_chunks
        if chunk.choices and chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert [each.model_dump() for each in whole.content] == [each.model_dump() for each in streamed] == [token]


FORMS: dict[str, list[Json]] = {
    "a conversation": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": PIXEL_URL}},
            ],
        }
    ],
    "tools": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ],
    "reasoning": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "hm"}],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_messages_reach_the_model_as_they_are(form: list[Json]) -> None:
    async with serving() as served:
        await complete(served, messages=form)
        assert messages(served) == form


async def test_the_thought_a_client_sends_back_is_kept() -> None:
    input_items = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    async with serving() as served:
        await complete(served, messages=[{"role": "user", "content": "a"}, input_items])
        assert messages(served)[1] == {"role": "assistant", "content": "b", "reasoning": "hm"}


async def test_options_reach_the_model() -> None:
    options: Json = {
        "temperature": 0.5,
        "seed": 7,
        "stop": ["END"],
        "reasoning_effort": "low",
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
    }
    async with serving() as served:
        await complete(served, **options)
        sent_request = chat_requests(served)[-1].model_dump(exclude_none=True)
    assert {key: sent_request[key] for key in options} == options


async def test_a_failure_at_once_is_an_http_status() -> None:
    async with serving(scripted([{"fail": "Nobody is there."}])) as served:
        for ask in (complete, chunks):
            with pytest.raises(InternalServerError, match="Nobody is there") as caught:
                await ask(served)
            assert caught.value.status_code == 502


async def test_a_failure_in_the_middle_is_raised_by_the_sdk() -> None:
    async with serving(scripted([{"text": "half"}, {"fail": "The upstream broke off."}])) as served:
        stream = aiter(await complete(served, stream=True))
        first = [await anext(stream), await anext(stream)]
        with pytest.raises(APIError, match="The upstream broke off"):
            await anext(stream)
    assert joined(first) == "half"


async def test_an_unknown_model_is_not_found() -> None:
    async with serving() as served:
        for ask in (complete, chunks):
            with pytest.raises(NotFoundError) as caught:
                await ask(served, model="gpt-17")
            assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields: Json, param: str) -> None:
    async with serving() as served:
        with pytest.raises(BadRequestError) as caught:
            await complete(served, **fields)
    assert caught.value.param == param
