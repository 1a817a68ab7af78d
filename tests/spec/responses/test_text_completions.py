"""`/v1/completions` through the official SDK: G24's row `/completions`, passed through to engines that have it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError

from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    CUT,
    HANG,
    Act,
    Chunk,
    UpstreamServer,
    error_answer,
    event,
    head,
    http_chunk,
    plain_answer,
    stream,
)


def piece(text: str, index: int = 0, finish_reason: str | None = None, logprobs: Any = None) -> Chunk:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "own", "choices": [choice]}


USAGE: Chunk = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": None},
}
ANSWER = stream([piece("Hel"), piece("lo", finish_reason="length"), USAGE])


@asynccontextmanager
async def served_by(
    *answers: Sequence[Act], server: Any = None, **fields: Any
) -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    async with UpstreamServer(*answers) as upstream:
        own = {"provider": "vllm", "base_url": upstream.base_url, "health_interval_s": 0, "max_retries": 0, **fields}
        router = {
            "provider": "router",
            "providers": {"own": own, "scripted": {"provider": "scripted"}},
            "aliases": {"alias": "fake-model"},
        }
        async with serving(router, server=server) as served:
            yield served, upstream


async def complete(served: Served, **fields: Any) -> Any:
    completions: Any = served.client.completions
    return await completions.create(**{"model": "fake-model", "prompt": "Once", **fields})


async def test_a_completion_is_passed_through_whole() -> None:
    async with served_by(ANSWER) as (served, upstream):
        completion = await complete(
            served, model="alias", max_tokens=2, temperature=0.5, stop=["x"], seed=1, suffix="!"
        )
        sent = upstream.received[-1]
    assert (completion.object, completion.model) == ("text_completion", "alias")
    assert completion.id.startswith("cmpl-")
    assert [(one.index, one.text, one.finish_reason) for one in completion.choices] == [(0, "Hello", "length")]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        5,
        2,
        7,
    )
    assert sent.path == "/v1/completions"
    assert sent.json == {
        "model": "fake-model",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 2,
        "stop": ["x"],
        "seed": 1,
        "suffix": "!",
    }


async def test_a_completion_is_streamed_piece_by_piece() -> None:
    async with served_by(ANSWER) as (served, _):
        chunks = [chunk async for chunk in await complete(served, stream=True)]
        assert [chunk.choices[0].text for chunk in chunks] == ["Hel", "lo"]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
        with_usage = await complete(served, stream=True, stream_options={"include_usage": True})
        last = [chunk async for chunk in with_usage][-1]
        assert (last.choices, last.usage.total_tokens) == ([], 7)


async def test_several_prompts_and_samples_keep_their_index() -> None:
    pieces = [
        *(piece(f"{index}", index) for index in (3, 0, 2, 1)),
        *(piece("!", index, "stop") for index in (1, 0, 3, 2)),
    ]
    async with served_by(stream([*pieces, USAGE])) as (served, upstream):
        completion = await complete(served, prompt=[[1, 2], [3]], n=2)
        assert upstream.received[-1].json["prompt"] == [[1, 2], [3]]
    assert [(one.index, one.text) for one in completion.choices] == [(0, "0!"), (1, "1!"), (2, "2!"), (3, "3!")]


async def test_an_echoed_prompt_has_log_probabilities() -> None:
    def logprobs(token: str, offset: int, number: float | None) -> Any:
        top = None if number is None else {token: number}
        return {"tokens": [token], "token_logprobs": [number], "top_logprobs": [top], "text_offset": [offset]}

    answer = stream([piece("Once", logprobs=logprobs("Once", 0, None)), piece("!", 0, "stop", logprobs("!", 4, -0.5))])
    async with served_by(answer) as (served, upstream):
        (choice,) = (await complete(served, echo=True, logprobs=1)).choices
        assert (upstream.received[-1].json["echo"], upstream.received[-1].json["logprobs"]) == (True, 1)
    assert choice.text == "Once!"
    assert choice.logprobs.tokens == ["Once", "!"]
    assert choice.logprobs.token_logprobs == [None, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"!": -0.5}]
    assert choice.logprobs.text_offset == [0, 4]


async def test_tokens_are_counted_in_the_figures() -> None:
    async with served_by(ANSWER, server={"metrics": "open"}) as (served, _):
        await complete(served)
        async for _chunk in await complete(served, stream=True):
            pass
        text = await served.client.get("/../metrics", cast_to=str)
    counted = [line for line in text.splitlines() if line.startswith("stack_tokens_total") and "fake-model" in line]
    assert any("input" in line and line.endswith(" 10.0") for line in counted), counted
    assert any("output" in line and line.endswith(" 4.0") for line in counted), counted
    assert any('"/v1/completions"' in line for line in text.splitlines() if "requests_total" in line)


async def test_tenants_have_prefix_caches_of_their_own() -> None:
    keys = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
    async with served_by(ANSWER, server={"api_keys": keys}) as (served, upstream):
        await complete(served)
        await served.client.with_options(api_key="key-b").completions.create(model="fake-model", prompt="Once")
        salts = [received.json["cache_salt"] for received in upstream.received if received.path == "/v1/completions"]
    assert len(set(salts)) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_provider_without_completions_refuses_by_name(streamed: bool) -> None:
    async with served_by(plain_answer(b'{"detail":"Not Found"}', 404)) as (served, upstream):
        with pytest.raises(BadRequestError, match="'scripted' has no text completions here") as caught:
            await complete(served, model="scripted", stream=streamed)
        assert caught.value.param == "model"
        for _ in range(6):  # it says nothing about the health of the server
            with pytest.raises(BadRequestError, match="This model's server has no text completions"):
                await complete(served, stream=streamed)
        upstream.then(ANSWER)
        with pytest.raises(NotFoundError):
            await complete(served, model="unknown", stream=streamed)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "a token that is none": ({"prompt": [1, "a"]}, "prompt[1]"),
    "too many completions": ({"prompt": ["a"] * 100, "n": 2}, "n"),
    "best_of": ({"best_of": 2}, "best_of"),
    "a temperature": ({"temperature": 3}, "temperature"),
    "log probabilities": ({"logprobs": 99}, "logprobs"),
    "an engine option of no one": ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_field_is_refused_by_name(name: str) -> None:
    fields, param = BAD[name]
    async with served_by(ANSWER) as (served, upstream):
        with pytest.raises(BadRequestError) as caught:
            await complete(served, **fields)
        assert caught.value.param == param
        assert all(received.path != "/v1/completions" for received in upstream.received)


async def test_a_field_of_vllm_is_refused_for_other_servers() -> None:
    async with served_by(ANSWER, engine="openai") as (served, _):
        with pytest.raises(BadRequestError) as caught:
            await complete(served, extra_body={"top_k": 3})
        assert caught.value.param == "top_k"
        assert (await complete(served)).choices[0].text == "Hello"


LIARS: dict[str, Sequence[Act]] = {
    "no end": stream([piece("Hel")]),
    "a cut": [head(), http_chunk(event(piece("Hel"))), CUT],
    "an index of no completion": stream([piece("x", 7, "stop")]),
    "no JSON": stream(["{oops"]),
    "an error": stream([{"error": {"message": "CUDA"}}]),
    "an error that is no UTF-8": plain_answer(b'data: {"object":"error","message":"\xff"}\n\n'),
    "too much": stream([piece("x" * 900), piece("y" * 900, finish_reason="stop")]),
    "silence": [head(), http_chunk(b": hi\n\n"), HANG],
}


@pytest.mark.parametrize("name", LIARS)
async def test_an_upstream_that_fails_is_an_error_and_never_a_completion(name: str) -> None:
    fields = {"max_answer_bytes": 1024, "first_token_timeout_s": 0.2}
    async with served_by(LIARS[name], **fields) as (served, _):
        with pytest.raises(APIStatusError) as caught:
            await complete(served)
        assert caught.value.status_code in (502, 504)
        with pytest.raises(APIError):
            async for _chunk in await complete(served, stream=True):
                pass


async def test_a_refusal_of_the_upstream_is_passed_on() -> None:
    async with served_by(error_answer(400, "This model's maximum context length is 10 tokens")) as (served, _):
        with pytest.raises(BadRequestError) as caught:
            await complete(served)
        assert caught.value.code == "context_length_exceeded"


async def test_a_client_that_leaves_ends_the_generation() -> None:
    endless: Sequence[Act] = [head(), http_chunk(event(piece("Hel"))), HANG]
    async with served_by(endless) as (served, upstream):
        chunks = await complete(served, stream=True)
        assert (await anext(aiter(chunks))).choices[0].text == "Hel"
        await chunks.close()
        async with asyncio.timeout(5):
            await upstream.left.wait()
