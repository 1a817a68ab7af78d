"""Files of vector stores that are made searchable: their tokens are counted, priced and limited as embeddings are."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest_asyncio
from openai import AsyncOpenAI

from tests.support.sdk.client import sdk_client
from tests.support.sdk.library import POLL_MS, sections
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import ROOT, new_project, organization_of, usage_results

TEXT = b"The blue whale eats krill. " * 20
STORED: Any = {"provider": "stored", "prices": {"hashing": {"input": 1_000_000, "output": 0}}}
ACCOUNTS: Any = {"provider": "chain", "providers": {"config": {"provider": "config"}, "stored": STORED}}


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Served]:
    more = {**sections(tmp_path, lease_s=0.2), "accounts": ACCOUNTS}
    async with serving(more=more, server={"api_keys": [ROOT]}) as running:
        yield running


async def test_the_tokens_of_a_file_are_usage_of_its_project(served: Served) -> None:
    """With the model's price, and one request for each file."""
    organization = organization_of(served.client)
    project_id, key = await new_project(organization)
    async with sdk_client(served.url, key) as client:
        store = await client.vector_stores.create()
        await client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("whales.md", TEXT), poll_interval_ms=POLL_MS
        )
    query: Any = {"start_time": int(time.time()) - 86_400, "project_ids": [project_id], "group_by": ["model"]}
    async with asyncio.timeout(5):
        while not (results := usage_results(await organization.usage.embeddings(**query))):  # noqa: ASYNC110 - usage sets no event
            await asyncio.sleep(0.02)
    (result,) = results
    assert (result.model, result.num_model_requests, result.input_tokens) == ("hashing", 1, 1)
    costs = usage_results(await organization.usage.costs(start_time=query["start_time"], project_ids=[project_id]))
    assert [cost.amount.value for cost in costs] == [1]


async def add_two(client: AsyncOpenAI) -> tuple[str, str]:
    """Add a batch of two files to a new store, each of one token; return the ids of the store and the batch."""
    store = await client.vector_stores.create()
    ids = [(await client.files.create(file=("whales.md", TEXT), purpose="assistants")).id for _ in range(2)]
    return store.id, (await client.vector_stores.file_batches.create(store.id, file_ids=ids)).id


async def test_a_file_waits_for_a_limit_of_its_project(served: Served) -> None:
    """A limit that the tokens of files have reached holds the next file back until it allows it."""
    organization = organization_of(served.client)
    project_id, key = await new_project(organization, {"max_tokens_per_1_day": 1})
    async with sdk_client(served.url, key) as client:
        store_id, batch_id = await add_two(client)
        await asyncio.sleep(1)
        counts = (await client.vector_stores.file_batches.retrieve(batch_id, vector_store_id=store_id)).file_counts
        assert (counts.completed, counts.in_progress) == (1, 1)
        await organization.projects.rate_limits.update_rate_limit(
            "rl-*", project_id=project_id, extra_body={"max_tokens_per_1_day": 1_000_000}
        )
        async with asyncio.timeout(20):
            batch = await client.vector_stores.file_batches.poll(
                batch_id, vector_store_id=store_id, poll_interval_ms=POLL_MS
            )
        assert batch.file_counts.completed == 2


async def test_a_file_above_a_budget_fails_and_says_so(served: Served) -> None:
    """It is not embedded, and its error names the limit."""
    _, key = await new_project(organization_of(served.client), {"max_tokens_per_1_month": 1})
    async with sdk_client(served.url, key) as client:
        store_id, batch_id = await add_two(client)
        async with asyncio.timeout(20):
            await client.vector_stores.file_batches.poll(batch_id, vector_store_id=store_id, poll_interval_ms=POLL_MS)
        files = [file async for file in client.vector_stores.files.list(store_id)]
    assert sorted(file.status for file in files) == ["completed", "failed"]
    (message,) = [file.last_error.message for file in files if file.last_error is not None]
    assert "tokens a month" in message
    assert served.stack.inference.request_sizes == [1]  # type: ignore[attr-defined]  # the model of these tests
