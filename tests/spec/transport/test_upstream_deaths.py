"""An upstream may die anywhere, and no client gets `completed` for half an answer: every death, kind and transport."""

import asyncio
import time
from typing import Any

import pytest
from openai import APIStatusError

from tests.providers.inference.chat_completions.test_stream_deaths import KINDS, deaths
from tests.providers.inference.remote import LIMITS
from tests.support.sdk.requests import chat_requests, create, responses
from tests.support.servers.serving import scripted, serving
from tests.support.servers.upstream_server import UpstreamServer

TOOLS: list[dict[str, Any]] = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]


def stack_section(upstream: UpstreamServer) -> dict[str, Any]:
    return {"provider": "vllm", "base_url": upstream.base_url, **LIMITS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("death", deaths(*KINDS["text"]))
async def test_a_dead_upstream_is_never_a_completed_response(death: str, kind: str) -> None:
    answer = deaths(*KINDS[kind])[death]
    async with UpstreamServer(answer) as upstream, serving(stack_section(upstream)) as served:
        fields: dict[str, Any] = {"model": "fake-model", "tools": TOOLS}
        with pytest.raises(APIStatusError) as caught:
            await create(served, **fields)
        assert caught.value.status_code in (502, 504)
        events: list[Any] = []
        began = time.monotonic()
        try:
            async with asyncio.timeout(10):
                events = [event async for event in await create(served, stream=True, **fields)]
        except APIStatusError:  # dead before the first event: a status again
            return
        assert time.monotonic() - began < 5
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.usage is not None
        stored = await responses(served).retrieve(events[-1].response.id)
        assert stored.status == "failed"


async def test_what_a_model_has_begun_to_say_is_not_asked_for_again_by_the_sdk() -> None:
    begun = [{"text": "half"}, {"fail": "The upstream broke off."}]
    for turns, asks in (([begun] * 3, 1), ([[{"fail": "Nobody is there."}]] * 3, 3)):
        async with serving(scripted(*turns)) as served:
            client = served.client.with_options(max_retries=2)
            with pytest.raises(APIStatusError) as caught:
                await client.responses.create(model="scripted", input="hi")
            assert caught.value.response.headers.get("x-should-retry") == ("false" if asks == 1 else None)
            assert len(chat_requests(served)) == asks
