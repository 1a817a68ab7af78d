"""Answers that their clients break off: what was generated until then is charged and in the usage log."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio
from openai import APITimeoutError, AsyncOpenAI, RateLimitError

from apis.accounts.limits import NANOS
from apis.accounts.requests import UpdateRateLimit
from apis.accounts.usage import UsageCounts
from tests.spec.accounts.test_stored_keys import new_key
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.servers.upstream_server import HANG, UpstreamServer, delta_chunk, event, head, http_chunk
from tests.support.tenants.accounts import stored_organization

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = 5000
PIECE = "word " * WORDS
PRICE = {"input": 0, "output": 1e6}
STORED: dict[str, Any] = {"accounts": {"provider": "stored", "prices": {"m": PRICE, "qwen3": PRICE}}}
SAID: Any = [{"role": "user", "content": "hi"}]
Leave = Callable[[AsyncOpenAI], Awaitable[Any]]


async def leave(stream: Any) -> None:
    """Read up to the first output, then close the connection."""
    async for chunk in stream:
        if getattr(chunk, "type", "") == "response.output_text.delta" or (
            hasattr(chunk, "choices") and (getattr(chunk.choices[0], "text", "") or chunk.choices[0].delta.content)
        ):
            break
    await stream.close()


async def leave_chat(client: AsyncOpenAI) -> None:
    await leave(await client.chat.completions.create(model="m", messages=SAID, stream=True))


async def leave_completion(client: AsyncOpenAI) -> None:
    chunks: Any = await client.completions.create(model="m", prompt="hi", stream=True)
    async for chunk in chunks:
        if chunk.choices[0].text:
            break
    await chunks.close()


async def leave_response(client: AsyncOpenAI) -> None:
    await leave(await client.responses.create(model="m", input="hi", stream=True, store=False))


async def leave_stored_response(client: AsyncOpenAI) -> None:
    await leave(await client.responses.create(model="m", input="hi", stream=True))


async def leave_waiting(client: AsyncOpenAI) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(model="m", messages=SAID)


async def leave_waiting_response(client: AsyncOpenAI) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).responses.create(model="m", input="hi", store=False)


async def leave_checked_response(client: AsyncOpenAI) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).responses.create(
            model="m", input="hi", store=False, text={"format": {"type": "json_object"}}
        )


async def leave_checked_stream(client: AsyncOpenAI) -> None:
    form: Any = {"format": {"type": "json_object"}}
    stream: Any = await client.responses.create(model="m", input="hi", store=False, stream=True, text=form)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            async for event in stream:
                assert event.type != "response.output_text.delta"
    await stream.close()


async def leave_first_pass(client: AsyncOpenAI) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(
            model="m",
            messages=SAID,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            response_format={"type": "json_object"},
        )


async def leave_possible_thought(client: AsyncOpenAI) -> None:
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(model="qwen3", messages=SAID)


async def leave_summary(client: AsyncOpenAI) -> None:
    said: Any = [*SAID, {"role": "assistant", "content": "ho"}, *SAID]
    compaction: Any = [{"type": "compaction", "compact_threshold": 1}]
    with pytest.raises(APITimeoutError):
        await client.with_options(timeout=0.3, max_retries=0).responses.create(
            model="m", input=said, store=False, extra_body={"context_management": compaction}
        )


WAYS: Mapping[str, Leave] = {
    "chat": leave_chat,
    "completion": leave_completion,
    "response": leave_response,
    "stored": leave_stored_response,
    "waiting": leave_waiting,
    "waiting-response": leave_waiting_response,
    "checked": leave_checked_response,
    "checked-stream": leave_checked_stream,
    "first-pass": leave_first_pass,
    "possible-thought": leave_possible_thought,
    "summary": leave_summary,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    """A stack over a server that sends one large piece of its answer, and then nothing."""
    text = event(delta_chunk(content=PIECE))
    piece = event({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": PIECE}]})
    async with UpstreamServer(models=["m", "qwen3"]) as upstream:
        upstream.routes["/v1/chat/completions"] = [head(), http_chunk(text), HANG]
        upstream.routes["/v1/completions"] = [head(), http_chunk(piece), HANG]
        site = {"provider": "vllm", "base_url": upstream.base_url, "max_retries": 0, "reasoning_tags": "auto"}
        async with serving(site, more=STORED) as running:
            running.streams.check = False
            yield running


async def read_usage(served: Served, project: str) -> UsageCounts:
    """Wait until something of the project is in the usage log, and return the sum."""
    log = stored_organization(served.stack.accounts).usage_log
    now = int(time.time())
    async with asyncio.timeout(5):
        while True:
            entries = await log.read(now - 3600, now + 3700)
            if counts := [entry.counts for entry in entries if entry.subject.project_id == project]:
                (count,) = counts
                return count
            await asyncio.sleep(0)


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_that_is_broken_off_is_charged_for_what_was_generated(served: Served, way: str) -> None:
    """One delta may hold many tokens, so its characters count."""
    key = await new_key(served, way)
    organization = stored_organization(served.stack.accounts)
    limiter, spending = organization.limiter, organization.spend_limits
    least = len(PIECE) // 4
    await limiter.set_limit(way, "*", UpdateRateLimit(max_tokens_per_1_month=least))
    async with sdk_client(served.url, key.value) as client:
        await WAYS[way](client)
        usage = await read_usage(served, way)
        assert (usage.requests, usage.cost) == (1, usage.output_tokens * NANOS)
        assert least <= usage.output_tokens <= len(PIECE)
        with pytest.raises(RateLimitError):
            await WAYS["response"](client)
        spent = await spending.set(way, 10**6 * NANOS)
        assert spent.spent == usage.cost


@pytest.mark.parametrize("many", [{"n": 64}, {"prompt": ["hi"] * 64}, {"n": 8, "prompt": ["hi"] * 8}], ids=str)
async def test_each_text_completion_of_a_request_is_reserved(served: Served, many: dict[str, Any]) -> None:
    """`max_tokens` is that of each of `n` completions of each prompt."""
    project = f"many-{len(str(many))}"
    key = await new_key(served, project)
    limiter = stored_organization(served.stack.accounts).limiter
    await limiter.set_limit(project, "*", UpdateRateLimit(max_tokens_per_1_minute=3000))
    async with sdk_client(served.url, key.value, timeout_s=0.3) as client:
        fields: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 16, **many}
        requests: list[Any] = [client.completions.create(**fields) for _ in range(6)]
        answers: list[Any] = await asyncio.gather(*requests, return_exceptions=True)
    assert sum(isinstance(answer, RateLimitError) for answer in answers) == 4


async def test_a_websocket_that_is_left_is_charged_for_what_was_generated(served: Served) -> None:
    """Also where nothing is stored."""
    key = await new_key(served, "socket")
    async with sdk_client(served.url, key.value) as client, talking(served, client) as talk:
        await talk.send(model="m", store=False)
        await talk.until("response.output_text.delta")
    assert (await read_usage(served, "socket")).output_tokens >= len(PIECE) // 4


async def test_a_request_that_is_left_before_a_model_works_gives_back_what_it_reserved() -> None:
    """A client that leaves the queue has used nothing."""
    slow = scripted([{"text": "hi"}, {"wait_s": 30}], model="m")
    server = {"max_running": 1, "max_waiting": 5}
    async with serving(slow, more={"accounts": {"provider": "stored"}}, server=server) as served:
        key = await new_key(served, "queued")
        limiter = stored_organization(served.stack.accounts).limiter
        await limiter.set_limit("queued", "*", UpdateRateLimit(max_tokens_per_1_month=1500))
        async with sdk_client(served.url, key.value) as client:
            running = await client.chat.completions.create(model="m", messages=SAID, max_tokens=10, stream=True)
            await leave_waiting(client)
            async with asyncio.timeout(5):
                left_again = False
                while not left_again:
                    with suppress(RateLimitError):  # each reserves more than half of the limit
                        await leave_waiting(client)
                        left_again = True
            await running.close()
