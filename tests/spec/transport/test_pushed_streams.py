"""Streams whose tokens go from the upstream's socket to the client's in one callback: slow clients, and those that
leave."""

import asyncio
from typing import Any, Literal

from tests.providers.inference.remote import LIMITS, sent
from tests.stack.http.raw import connection, request
from tests.support.sdk.requests import create
from tests.support.servers.serving import serving
from tests.support.servers.upstream_server import (
    DONE,
    HANG,
    LAST_HTTP_CHUNK,
    Act,
    UpstreamServer,
    Wait,
    delta_chunk,
    event,
    http_chunk,
    usage_chunk,
)

ASK: dict[str, Any] = {"model": "fake-model", "input": "hi", "stream": True}
LAST_EVENTS = (event(delta_chunk("stop", content="")), event(usage_chunk()), DONE)
ENDING: list[Act] = [*map(http_chunk, LAST_EVENTS), LAST_HTTP_CHUNK]


class Milestone(asyncio.Event):
    """A place in an answer that the upstream reaches without waiting there."""

    async def wait(self) -> Literal[True]:
        self.set()
        return True


def section(upstream: UpstreamServer) -> dict[str, Any]:
    return {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_answer_bytes": 64 * 1024 * 1024}


def word(text: str) -> Act:
    return http_chunk(event(delta_chunk(content=text)))


async def test_each_token_is_an_event_of_its_own_with_its_number() -> None:
    pace = [asyncio.Event() for _ in range(30)]
    acts = [act for number, ready in enumerate(pace) for act in (Wait(ready), word(f"{number} "))]
    async with UpstreamServer([*sent(), *acts, *ENDING]) as upstream, serving(section(upstream)) as served:
        pace[0].set()
        texts, completed = list[str](), None
        async for sent_event in await create(served, **ASK):
            if sent_event.type == "response.output_text.delta":
                texts.append(sent_event.delta)
                if len(texts) < len(pace):
                    pace[len(texts)].set()
            elif sent_event.type == "response.completed":
                completed = sent_event.response
        assert texts == [f"{number} " for number in range(30)]
        assert completed is not None
        assert completed.output_text == "".join(texts)


async def test_while_a_client_does_not_read_the_upstream_waits() -> None:
    flood = [word("x" * 60_000)] * 400
    reached = Milestone()
    async with (
        UpstreamServer([*sent(delta_chunk(content="a")), *flood, Wait(reached), *ENDING]) as upstream,
        serving(section(upstream)) as served,
        connection(served.url) as (reader, writer),
    ):
        writer.write(request(served.url, ASK))
        await reader.readuntil(b"output_text.delta")
        await asyncio.sleep(0.4)
        assert not reached.is_set()
        async with asyncio.timeout(20):
            end = b""
            while b"event: response.completed" not in end:
                end = end[-100:] + await reader.read(1 << 20)
        assert reached.is_set()


async def test_a_client_that_leaves_between_two_tokens_ends_the_upstreams_answer() -> None:
    async with (
        UpstreamServer([*sent(delta_chunk(content="a")), *[word("b")] * 5, HANG]) as upstream,
        serving(section(upstream)) as served,
    ):
        async with connection(served.url) as (reader, writer):
            writer.write(request(served.url, ASK))
            await reader.readuntil(b'"delta":"b"')
        await asyncio.wait_for(upstream.left.wait(), 5)
        async with asyncio.timeout(5):
            while not (rows := await served.stack.kv_store.scan("default/response/")):  # noqa: ASYNC110  # sets no event
                await asyncio.sleep(0.01)
        response = await served.client.responses.retrieve(rows[0][0].rpartition("/")[2])
        assert response.status == "cancelled"
        assert response.output_text.startswith("ab")
