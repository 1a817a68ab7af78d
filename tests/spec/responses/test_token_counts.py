"""Counting tokens and compacting with upstreams that cannot count."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.sdk.requests import create, responses
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, delta_chunk, error_answer, text_chunks, usage_chunk
from tests.support.servers.upstream_server import stream as streamed

LONG = "word " * 400
"""2,000 bytes: 500 tokens by the estimate."""


def answer(text: str, prompt_tokens: int) -> Any:
    return streamed([delta_chunk(content=text), delta_chunk("stop"), usage_chunk(prompt_tokens)])


@asynccontextmanager
async def upstreamed(engine: str, *answers: Any) -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    """A stack over a server of chat completions without /tokenize."""
    async with UpstreamServer(*answers) as upstream:
        upstream.routes["/tokenize"] = error_answer(404)
        async with serving({"provider": "vllm", "base_url": upstream.base_url, "engine": engine}) as served:
            yield served, upstream


async def counted(served: Served, **fields: Any) -> Any:
    return await responses(served).input_tokens.count(model="fake-model", **fields)


@pytest.mark.parametrize("engine", ["openai", "vllm"])
async def test_a_server_that_cannot_count_gets_an_estimate_that_is_named_as_one(engine: str) -> None:
    """The estimate is of the text, then corrected by the usage of the last turn."""
    async with upstreamed(engine, answer("Hi.", 1010)) as (served, _):
        before = await counted(served, input=LONG)
        await create(served, model="fake-model", input=LONG)
        after = await counted(served, input=LONG)
    assert 450 < before.input_tokens < 550
    assert abs(after.input_tokens - 1010) <= 10
    assert before.model_extra == after.model_extra == {"estimated": True}


async def test_an_exact_count_is_not_called_an_estimate() -> None:
    """A server that counts is believed."""
    async with (
        UpstreamServer(streamed(text_chunks("Hi."))) as upstream,
        serving({"provider": "vllm", "base_url": upstream.base_url}) as served,
    ):
        count = await counted(served, input=LONG)
    assert (count.input_tokens, count.model_extra) == (5, {})


@pytest.mark.parametrize("engine", ["openai", "vllm"])
async def test_a_chain_is_compacted_by_the_usage_of_a_server_that_cannot_count(engine: str) -> None:
    """The threshold holds by estimate; below it nothing is compacted."""
    answers = [answer("One.", 700), answer("Two.", 700), answer("All of it.", 700), answer("Three.", 90)]
    async with upstreamed(engine, *answers) as (served, upstream):
        below = {"context_management": [{"type": "compaction", "compact_threshold": 5000}]}
        above = {"context_management": [{"type": "compaction", "compact_threshold": 600}]}
        first = await create(served, model="fake-model", input=LONG, **above)
        second = await create(served, model="fake-model", input="b", previous_response_id=first.id, **below)
        third = await create(served, model="fake-model", input="c", previous_response_id=second.id, **above)
    assert [item.type for item in second.output] == ["message"]
    assert [item.type for item in third.output] == ["compaction", "message"]
    assert third.output_text == "Three."
    assert len(upstream.chats) == 4
