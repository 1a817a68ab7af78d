"""When a stream begins: not before the upstream has answered with a status, and not much later than after a second."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest

from apis.shared_timeout import SharedTimeout
from tests.providers.inference.remote import LIMITS
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import (
    HANG,
    LAST_HTTP_CHUNK,
    Answer,
    UpstreamServer,
    Wait,
    error_answer,
    event,
    head,
    http_chunk,
    stream,
    text_chunks,
)

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
SILENT: Final = ("/v1/chat/completions", "/v1/completions")


def text_completion() -> Answer:
    chunk = {"choices": [{"index": 0, "text": "Hello.", "finish_reason": "stop"}]}
    return stream([chunk])


def answer_of(path: str) -> Answer:
    return text_completion() if path == "/v1/completions" else stream(text_chunks("Hello."))


@asynccontextmanager
async def served_by(answer: Answer, **section: Any) -> AsyncGenerator[tuple[Served, UpstreamServer]]:
    async with UpstreamServer(answer) as upstream:
        fields = {"provider": "vllm", "base_url": upstream.base_url, **LIMITS, "max_retries": 0}
        async with serving({**fields, **section}, server={"keep_alive_s": 0.2}) as served:
            yield served, upstream


@asynccontextmanager
async def open_stream(served: Served, path: str) -> AsyncGenerator[aiohttp.ClientResponse]:
    body = {"model": "fake-model", "stream": True, **BODIES[path]}
    async with aiohttp.ClientSession() as session, session.post(f"{served.url}{path}", json=body) as response:
        yield response


def shorten_wait(served: Served) -> None:
    """Let the head of a stream wait for a twentieth of a second."""
    served.app.state.services.monitor.head_timeout = SharedTimeout(0.05)


SLOWNESS: Final[dict[str, Callable[[asyncio.Event, Answer], Answer]]] = {
    "before its head": lambda release, whole: [Wait(release), *whole],
    "after its head": lambda release, whole: [whole[0], Wait(release), *whole[1:]],
    "with comments": lambda release, whole: [whole[0], http_chunk(b": wait\n\n"), Wait(release), *whole[1:]],
    "after an empty delta": lambda release, whole: [
        whole[0],
        http_chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})),
        Wait(release),
        *whole[1:],
    ],
}


@pytest.mark.parametrize(
    ("path", "slowness"), [*((SILENT[0], slowness) for slowness in SLOWNESS), (SILENT[1], "before its head")]
)
async def test_a_stream_of_chunks_begins_however_its_engine_is_slow(path: str, slowness: str) -> None:
    """Headers, then comments, so that no proxy takes the connection for a dead one."""
    release = asyncio.Event()
    async with served_by(SLOWNESS[slowness](release, answer_of(path))) as (served, _):
        shorten_wait(served)
        async with open_stream(served, path) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            release.set()
            rest = await response.read()
    data = [line for line in rest.split(b"\n\n") if line.startswith(b"data: ")]
    assert b"Hello." in b"".join(data)
    assert data[-1] == b"data: [DONE]"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("status", "mapped"), [(401, 502), (429, 429), (503, 502), (400, 400)])
async def test_a_late_refusal_is_an_http_status(path: str, status: int, mapped: int) -> None:
    """An upstream has about a second to refuse a streamed request."""
    release = asyncio.Event()
    answer = error_answer(status, "no", {"retry-after": "7"})
    async with served_by([Wait(release), *answer]) as (served, upstream):
        asyncio.get_running_loop().call_later(0.15, release.set)
        async with open_stream(served, path) as response:
            assert response.status == mapped
            assert "error" in await response.json()
            assert (response.headers.get("retry-after") == "7") is (status in (429, 503))
        assert len(upstream.chats) == (path != "/v1/completions")


@pytest.mark.parametrize("path", SILENT)
async def test_an_error_after_the_head_is_the_last_frame(path: str) -> None:
    """A failure after a second is an error within the stream."""
    release = asyncio.Event()
    async with served_by([Wait(release), *error_answer(429)]) as (served, _):
        shorten_wait(served)
        async with open_stream(served, path) as response:
            assert response.status == 200
            release.set()
            frames = [frame for frame in (await response.read()).split(b"\n\n") if frame.startswith(b"data: ")]
    assert json.loads(frames[0][6:])["error"]["code"] == "rate_limit_exceeded"
    assert frames[1:] == [b"data: [DONE]"]


async def test_a_response_waits_a_second_for_the_status_of_its_server() -> None:
    """Then the first events leave; an accepted request is not waited for."""
    release = asyncio.Event()
    async with served_by([Wait(release), *answer_of("/v1/responses")]) as (served, _):
        began = time.monotonic()
        async with open_stream(served, "/v1/responses") as response:
            assert await response.content.readuntil(b"\n\n")
            assert time.monotonic() - began >= 0.9
            release.set()
            assert b"response.completed" in await response.read()
    accepted = asyncio.Event()
    answer = [head(), Wait(accepted), LAST_HTTP_CHUNK]
    async with served_by(answer) as (served, _), open_stream(served, "/v1/responses") as response:
        assert b"response.created" in await response.content.readuntil(b"\n\n")  # while the server is silent
        accepted.set()


@pytest.mark.parametrize("path", SILENT)
async def test_a_client_that_leaves_before_the_stream_begins_ends_the_generation(path: str) -> None:
    """The wait for the head holds nothing."""
    async with served_by([HANG]) as (served, upstream):
        body = {"model": "fake-model", "stream": True, **BODIES[path]}
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(f"{served.url}{path}", json=body))
            await upstream.until_received(1)
            request.cancel()
        async with asyncio.timeout(5):
            await upstream.left.wait()
