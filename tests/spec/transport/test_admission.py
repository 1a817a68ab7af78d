"""Overload: a process answers so many requests at once, others wait in a fair queue, and the rest is refused."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]


@asynccontextmanager
async def busy(wait_s: float, **server: Any) -> AsyncGenerator[tuple[Served, AsyncOpenAI, AsyncOpenAI]]:
    """A server whose model takes its time for the first request, with clients of two tenants."""
    turns = [{"wait_s": wait_s}, {"text": "done"}], *[[{"text": "done"}]] * 9
    async with (
        serving(scripted(*turns), server={"api_keys": KEYS, **server}) as served,
        sdk_client(served.url, "key-a") as a,
        sdk_client(served.url, "key-b") as b,
    ):
        yield served, a, b


async def ask(client: AsyncOpenAI, text: str, **fields: Any) -> str:
    responses: Any = client.responses
    return str((await responses.create(model="scripted", input=text, store=False, **fields)).output_text)


async def wait_for_waiting(served: Served, count: int) -> None:
    await until(lambda: served.app.state.services.admission.waiting == count)


def texts_of(served: Served) -> list[str]:
    """The inputs in the order in which the model received them."""
    return [str(chat.messages[-1].content) for chat in chat_requests(served)]


async def test_requests_wait_by_tier_and_flex_waits_for_every_tenant() -> None:
    async with busy(2, max_running=1) as (served, a, b):
        tasks = [asyncio.create_task(ask(a, "first"))]
        await until(lambda: chat_requests(served))
        waiting: list[tuple[AsyncOpenAI, str]] = [
            (a, "flex"),
            (a, "default"),
            (a, "priority"),
            (b, "auto"),
            (b, "auto"),
        ]
        for number, (client, tier) in enumerate(waiting):
            tasks.append(asyncio.create_task(ask(client, f"{number} {tier}", service_tier=tier)))
            await wait_for_waiting(served, number + 1)
        assert await asyncio.gather(*tasks) == ["done"] * 6
        order = texts_of(served)
        own = [text for text in order if text.split()[-1] in ("default", "priority", "flex")]
        assert [text.split()[-1] for text in own] == ["priority", "default", "flex"]
        assert "flex" in order[-1]
        # the tenants take turns
        assert [text.split()[-1] for text in order[1:5]] == ["auto", "priority", "auto", "default"]


async def test_a_request_beyond_the_queue_is_refused_before_any_work() -> None:
    async with busy(1, max_running=1, max_waiting=2) as (served, a, b):
        tasks = [asyncio.create_task(ask(a, "one"))]
        await until(lambda: chat_requests(served))
        tasks += [asyncio.create_task(ask(client, "more")) for client in (a, b)]
        await wait_for_waiting(served, 2)
        for call in (
            ask(b, "too many"),
            b.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "too many"}]),
        ):
            with pytest.raises(InternalServerError, match="max_waiting") as refusal:
                await call
            assert refusal.value.status_code == 503
            assert int(refusal.value.response.headers["retry-after"]) >= 1
        async with talking(served, b) as talk:
            assert (await talk.refused()).status == 503
        assert not any("too many" in text for text in texts_of(served))
        await asyncio.gather(*tasks)
        # background responses have places of their own, and free places are free again
        await ask(b, "again")


async def test_a_request_that_waits_too_long_is_refused_and_one_whose_client_leaves_is_forgotten() -> None:
    async with busy(2, max_running=1, max_wait_s=0.2) as (served, a, b):
        running = asyncio.create_task(ask(a, "one"))
        await until(lambda: chat_requests(served))
        began_at = time.monotonic()
        with pytest.raises(InternalServerError, match="max_wait_s"):
            await ask(b, "late")
        assert time.monotonic() - began_at < 2
        leaving = asyncio.create_task(ask(b, "gone"))
        await wait_for_waiting(served, 1)
        leaving.cancel()
        await wait_for_waiting(served, 0)
        running.cancel()
        assert texts_of(served) == ["one"]
