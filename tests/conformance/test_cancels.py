"""Background responses that are cancelled on another worker than the one that makes them.

STACK_CANCELS says how many (3 by default); how long the answer takes, and until the model is left, is printed.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from tests.support.sdk.requests import responses
from tests.support.servers.serving import Served, serving
from tests.support.servers.upstream_server import HANG, Repeat, UpstreamServer, delta_chunk, event, head, http_chunk
from tests.support.waiting import until_text

CANCELS = int(os.environ.get("STACK_CANCELS", "3"))
LEFT_S = 2.0
FIRST = [head(), http_chunk(event(delta_chunk(content="a")))]
NEXT = http_chunk(event(delta_chunk(content="b")))


def describe(name: str, taken_s: Sequence[float]) -> str:
    ordered = sorted(taken_s)
    middle, nearly = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return f"{name}: median {middle * 1e3:.0f} ms, p99 {nearly * 1e3:.0f} ms, longest {ordered[-1] * 1e3:.0f} ms"


async def read_to_the_end(served: Served, response_id: str) -> None:
    async for _ in await responses(served).retrieve(response_id, stream=True):
        pass


async def test_any_worker_cancels_and_the_model_is_left(shared_store: dict[str, Any]) -> None:
    answered: list[float] = []
    delays_s: list[float] = []
    read_s: list[float] = []
    async with UpstreamServer([*FIRST, Repeat(NEXT, 0.02)], [*FIRST, HANG]) as upstream:
        for _ in range(CANCELS // 2):  # every other model has nothing more to say for now
            upstream.then([*FIRST, Repeat(NEXT, 0.02)], [*FIRST, HANG])
        model = {"provider": "vllm", "base_url": upstream.base_url}
        async with (
            serving(model, kv_store=shared_store, responses={"background": {"poll_s": 0.05}}) as maker,
            serving(model, kv_store=shared_store, responses={"background": {"poll_s": 10}}) as other,
        ):
            for _ in range(CANCELS):
                async with asyncio.timeout(20):
                    queued = await responses(maker).create(model="fake-model", input="hi", background=True)
                    reading = asyncio.create_task(read_to_the_end(maker, queued.id))
                    await until_text(responses(other), queued.id)
                    upstream.left.clear()
                    began = time.monotonic()
                    response = await responses(other).cancel(queued.id)
                    answered.append(time.monotonic() - began)
                    await upstream.left.wait()
                    delays_s.append(time.monotonic() - began)
                    await reading
                    read_s.append(time.monotonic() - began)
                assert (response.status, response.output_text[:1]) == ("cancelled", "a")
                for served in (maker, other):
                    assert (
                        await responses(served).cancel(queued.id)
                        == await responses(maker).retrieve(queued.id)
                        == response
                    )
    print(
        f"{CANCELS} cancels over {shared_store['provider']};",
        f"{describe('answer', answered)}; {describe('left', delays_s)}",
    )
    assert max(delays_s) < LEFT_S
    assert max(read_s) < LEFT_S, "a reader in the process that made the response"
