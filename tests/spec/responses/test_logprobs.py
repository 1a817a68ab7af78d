"""Log-probabilities of the answer's tokens, from a model that gives them: an upstream server of chat completions."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.support.sdk.requests import bare, create, responses, stream
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import UpstreamServer, delta_chunk, usage_chunk
from tests.support.servers.upstream_server import stream as played

INCLUDE = ["message.output_text.logprobs"]


def token(text: str, logprob: float, *others: tuple[str, float]) -> dict[str, Any]:
    top = [{"token": each, "logprob": value, "bytes": list(each.encode())} for each, value in others]
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": top}


TOKENS = [token("Hel", -0.5, ("Hel", -0.5), ("Hal", -1.5)), token("lo", -0.25, ("lo", -0.25), ("p", -2.0))]
ANSWER = played(
    [
        delta_chunk(role="assistant", content=""),
        *(delta_chunk(content=each["token"], logprobs={"content": [each]}) for each in TOKENS),
        delta_chunk("stop", content=""),
        usage_chunk(),
    ]
)


@asynccontextmanager
async def talking() -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    """A stack over an upstream that says `Hello` in two tokens."""
    async with AsyncExitStack() as entered:
        upstream = await entered.enter_async_context(UpstreamServer(ANSWER, models=["scripted"]))
        inference = {"provider": "vllm", "base_url": upstream.base_url}
        yield await entered.enter_async_context(serving(inference)), upstream


def plain(logprobs: Any) -> list[dict[str, Any]]:
    return [each.model_dump() for each in logprobs]


@pytest.mark.parametrize("fields", [{"include": INCLUDE}, {"top_logprobs": 2}, {"include": INCLUDE, "top_logprobs": 2}])
async def test_logprobs_are_asked_of_the_model_when_a_client_wants_them(fields: dict[str, Any]) -> None:
    async with talking() as (served, upstream):
        response = await create(served, **fields)
    body = upstream.chats[0].json
    assert body["logprobs"] is True
    assert body.get("top_logprobs", 0) == fields.get("top_logprobs", 0)
    assert response.top_logprobs == fields.get("top_logprobs", 0)


async def test_logprobs_are_not_asked_for_otherwise() -> None:
    async with talking() as (served, upstream):
        await create(served)
    assert not upstream.chats[0].json.get("logprobs")


async def test_logprobs_are_part_of_the_text() -> None:
    async with talking() as (served, _):
        response = await create(served, include=INCLUDE, top_logprobs=2)
        stored = await responses(served).retrieve(response.id, include=INCLUDE)
        included = await create(served, include=INCLUDE)
        without = await responses(served).retrieve(included.id)
    assert plain(response.output[0].content[0].logprobs) == TOKENS
    assert bare(stored) == bare(response)
    assert without.output[0].content[0].logprobs == []


async def test_logprobs_come_with_their_delta_and_again_when_the_text_is_done() -> None:
    async with talking() as (served, _):
        events = await stream(served, include=INCLUDE, top_logprobs=2)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [(event.delta, plain(event.logprobs)) for event in deltas if event.delta] == [
        ("Hel", TOKENS[:1]),
        ("lo", TOKENS[1:]),
    ]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert plain(done.logprobs) == TOKENS


async def test_text_without_logprobs_has_an_empty_list_of_them() -> None:
    async with serving() as served:
        events = await stream(served)
    assert [event.logprobs for event in events if event.type.startswith("response.output_text")] == [[], []]
    assert events[-1].response.output[0].content[0].logprobs == []


async def test_a_stored_response_shows_the_logprobs_that_its_end_has_shown() -> None:
    """`top_logprobs` asks for them by itself, so they need no `include` later either."""
    async with talking() as (served, _):
        response = await create(served, top_logprobs=2)
        again = await responses(served).retrieve(response.id)
    assert plain(response.output[0].content[0].logprobs) == TOKENS
    assert bare(again) == bare(response)
