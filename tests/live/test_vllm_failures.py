"""The errors that a client gets from a real vLLM that refuses, or dies; and vLLM's end when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError

from tests.live.asking import FRANCE, answer, create, requests_running, streamed
from tests.live.vllm_server import VLLMServer
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(300, func_only=True)]

NOTICED_WITHIN_S = 5
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
WITHOUT_END: dict[str, Any] = {"stream": True, "max_output_tokens": 3900}


@pytest.fixture
async def endless(vllm: VLLMServer, tmp_path: Path) -> AsyncGenerator[Served]:
    """A stack whose answers reach the longest permitted length."""
    inference = {"provider": "vllm", "base_url": f"{vllm.url}/v1", "extra_body": {"ignore_eos": True}}
    async with serving(inference, kv_store={"provider": "sqlite", "path": str(tmp_path / "responses.db")}) as stack:
        yield stack


async def until_running(vllm: VLLMServer, count: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while await requests_running(vllm.url) != count:
            pass


# --- refusals --------------------------------------------------------------------------------------------------------


async def test_a_prompt_that_does_not_fit_is_refused(served: Served) -> None:
    with pytest.raises(BadRequestError) as caught:
        await answer(served, "word " * 5000)
    assert caught.value.code == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    for ask in (answer, streamed):
        with pytest.raises(NotFoundError) as caught:
            await ask(served, FRANCE, model="gpt-99")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_an_image_for_a_model_of_text_is_refused(served: Served) -> None:
    image = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    with pytest.raises(BadRequestError):
        await answer(served, [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]}])


async def test_a_schema_that_means_nothing_is_refused(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    text = {"format": {"type": "json_schema", "name": "bad", "schema": schema, "strict": True}}
    with pytest.raises(BadRequestError):
        await answer(served, FRANCE, text=text)


# --- a client that leaves --------------------------------------------------------------------------------------------


async def test_the_generation_stops_when_the_reader_of_a_stream_leaves(vllm: VLLMServer, endless: Served) -> None:
    async with await create(endless, FRANCE, **WITHOUT_END) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await until_running(vllm, 1, 60)
    await until_running(vllm, 0, NOTICED_WITHIN_S)


async def test_the_generation_stops_when_one_who_waits_for_the_whole_leaves(vllm: VLLMServer, endless: Served) -> None:
    waiting = asyncio.create_task(create(endless, FRANCE, max_output_tokens=3900))
    await until_running(vllm, 1, 60)
    waiting.cancel()
    await until_running(vllm, 0, NOTICED_WITHIN_S)


# --- a server that dies ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def brought_back(vllm: VLLMServer) -> AsyncGenerator[None]:
    """Start the server again afterwards: other tests want it too."""
    try:
        yield
    finally:
        await asyncio.to_thread(vllm.start)


async def break_stream(served: Served, kill: Callable[[], Awaitable[None]]) -> None:
    """Stream an answer, kill its maker in the middle, and see the response fail and stay failed."""
    killed = False
    async with await create(served, FRANCE, **WITHOUT_END) as stream:
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and not killed:
                killed = True
                await kill()
    failed = events[-1]
    assert failed.type == "response.failed"
    assert all(event.type != "response.completed" for event in events)
    assert failed.response.error.code == "server_error"
    assert failed.response.output[-1].status == "incomplete"
    stored = await served.client.responses.retrieve(failed.response.id)
    assert stored.status == "failed"


async def test_a_killed_server_fails_the_response_and_serves_again_when_it_is_back(
    vllm: VLLMServer, endless: Served
) -> None:
    async with brought_back(vllm):
        await break_stream(endless, lambda: asyncio.to_thread(vllm.kill))
        with pytest.raises(InternalServerError) as caught:
            await answer(endless, FRANCE, max_output_tokens=16)
        assert caught.value.status_code == 502
    assert (await answer(endless, FRANCE, max_output_tokens=16)).output_text


async def test_a_killed_engine_of_a_living_server_fails_the_response(vllm: VLLMServer, endless: Served) -> None:
    async with brought_back(vllm):
        await break_stream(endless, lambda: asyncio.to_thread(vllm.kill_engine))
        with pytest.raises(APIStatusError) as caught:
            await answer(endless, FRANCE, max_output_tokens=16)
        assert caught.value.status_code >= 500
