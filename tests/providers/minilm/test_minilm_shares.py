"""Embeddings of several tenants: batches in turn, few that wait, and none for a caller that has left."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.documents.embeddings import EmbeddingRequest
from apis.errors import RateLimited, UpstreamError
from providers.inference.minilm.provider import MODEL, TENANT_BATCHES, MiniLM
from tests.support.models.tiny_bert import write_tiny_bert


@asynccontextmanager
async def started(folder: Path, **fields: Any) -> AsyncGenerator[MiniLM]:
    config = MiniLM.Config.model_validate({"model_path": write_tiny_bert(folder), "threads": 1, **fields})
    provider = MiniLM(config)
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


@contextmanager
def stopped(provider: MiniLM) -> Generator[None]:
    """The model does not answer within the context."""
    supervisor: Any = provider._process  # pyright: ignore[reportPrivateUsage] - its process is to be stopped
    os.kill(supervisor._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor._process.pid, signal.SIGCONT)


def embedding(
    provider: MiniLM, order: list[str], tenant: str, text: str = "the cat on the market"
) -> asyncio.Task[None]:
    async def embed() -> None:
        texts = [text] * (16 if len(text) < 100 else 1)
        await provider.embed(EmbeddingRequest.model_validate({"model": MODEL, "input": texts}), tenant=tenant)
        order.append(tenant)

    return asyncio.create_task(embed())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_flood_of_one_tenant_delays_another_by_one_batch(tmp_path: Path) -> None:
    """Batches are computed in turn by tenant."""
    order: list[str] = []
    async with started(tmp_path) as provider:
        with stopped(provider):
            loud = [embedding(provider, order, "loud") for _ in range(4)]
            await turns()
            quiet = embedding(provider, order, "quiet")
            await turns()
        async with asyncio.timeout(20):
            await asyncio.gather(*loud, quiet)
    assert (sorted(order[:2]), order[2:]) == (["loud", "quiet"], ["loud"] * 3)


async def test_many_queries_of_one_tenant_wait_together_for_one_step_of_another(tmp_path: Path) -> None:
    """Neighbours: short queries that come faster than another tenant's steps end do not wait for one step each."""
    order: list[str] = []
    async with started(tmp_path) as provider:
        with stopped(provider):
            loud = [embedding(provider, order, "loud", "the cat on the market " * 1000) for _ in range(3)]
            await turns()
            quiet = [embedding(provider, order, "quiet", "the cat") for _ in range(TENANT_BATCHES)]
            await turns()
            supervisor: Any = provider._process  # pyright: ignore[reportPrivateUsage] - its turns are counted
            turn_count, serve = 0, supervisor._exchange

            async def count(message: dict[str, Any]) -> Any:
                nonlocal turn_count
                turn_count += not order or len(order) < TENANT_BATCHES
                return await serve(message)

            supervisor._exchange = count
        async with asyncio.timeout(20):
            await asyncio.gather(*loud, *quiet)
    assert order == ["quiet"] * TENANT_BATCHES + ["loud"] * 3
    assert turn_count <= 2 * TENANT_BATCHES


async def test_a_long_text_of_one_tenant_delays_another_by_one_step(tmp_path: Path) -> None:
    """Neighbours: a query waits for no batch of another tenant."""
    order: list[str] = []
    async with started(tmp_path) as provider:
        with stopped(provider):
            loud = embedding(provider, order, "loud", "the cat on the market " * 1000)
            await turns()
            quiet = embedding(provider, order, "quiet")
            await turns()
        async with asyncio.timeout(20):
            await asyncio.gather(loud, quiet)
    assert order == ["quiet", "loud"]


async def test_only_so_many_requests_of_a_tenant_wait(tmp_path: Path) -> None:
    """One more is refused at once; another tenant's waits."""
    order: list[str] = []
    async with started(tmp_path, max_tenant_waiting=2) as provider:
        with stopped(provider):
            loud = [embedding(provider, order, "loud") for _ in range(TENANT_BATCHES + 2)]
            await turns()
            with pytest.raises(RateLimited):
                await embedding(provider, order, "loud")
            quiet = embedding(provider, order, "quiet")
            await turns()
            assert not quiet.done()
        await asyncio.gather(*loud, quiet)


async def test_a_batch_whose_caller_has_left_is_dropped_before_it_begins(tmp_path: Path) -> None:
    """Only the batch that the model has begun is computed."""
    order: list[str] = []
    async with started(tmp_path) as provider:
        with stopped(provider):
            remaining = [embedding(provider, order, "loud") for _ in range(5)]
            await turns()
            for task in remaining:
                task.cancel()
            await asyncio.wait(remaining)
            supervisor: Any = provider._process  # pyright: ignore[reportPrivateUsage] - the work that is left in it
            assert len(supervisor._request_tasks) == 1
        await embedding(provider, order, "quiet")
    assert order == ["quiet"]


async def test_close_ends_those_that_wait(tmp_path: Path) -> None:
    """No waiting request starts the model again after the end."""
    order: list[str] = []
    async with started(tmp_path) as provider:
        supervisor: Any = provider._process  # pyright: ignore[reportPrivateUsage] - its process is to be stopped
        os.kill(supervisor._process.pid, signal.SIGSTOP)
        tasks = [embedding(provider, order, "loud") for _ in range(3)]
        await turns()
        await provider.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, UpstreamError, UpstreamError]
    assert supervisor._process is None
