"""Batches of stored keys: their lines have the rights and limits of the key, and count as its usage."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from tests.support.sdk.batch_files import batch_line, create_batch, read_results, wait_for_end
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, scripted, serving
from tests.support.tenants.accounts import CHAINED, ROOT, organization_of, usage_results
from tests.support.waiting import until_status

MORE: dict[str, Any] = {
    **CHAINED,
    "files": {"provider": "kv"},
    "batches": {"provider": "leased", "poll_s": 0.05, "retry_s": 0.1, "max_attempts": 2},
}


@asynccontextmanager
async def key_client(
    inference: dict[str, Any], limits: dict[str, int], scopes: list[str]
) -> AsyncGenerator[tuple[Served, AsyncOpenAI, Any, str, str]]:
    """A stack, a client with a stored key of these limits and scopes, the administration, and the ids of its project
    and key."""
    async with serving(inference, more=MORE, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        project = await organization.projects.create(name="p")
        account = await organization.projects.service_accounts.create(project.id, name="a")
        key = await organization.projects.service_accounts.api_keys.create(
            account.id, project_id=project.id, name="k", scopes=scopes
        )
        if limits:
            await organization.projects.rate_limits.update_rate_limit(
                f"rl-key:{key.id}", project_id=project.id, extra_body=limits
            )
        async with sdk_client(served.url, key.value) as client:
            yield served, client, organization, project.id, key.id


async def test_lines_wait_for_their_keys_limit_and_count_as_its_usage() -> None:
    limits = {"max_concurrent_responses": 1, "max_tokens_per_1_month": 1_000_000}
    async with key_client(scripted([{"text": "hello"}]), limits, []) as (_, client, organization, project_id, key_id):
        batch = await create_batch(client, [batch_line(f"l{number}") for number in range(4)])
        batch = await wait_for_end(client, batch)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 4)
        page = await organization.usage.completions(
            start_time=int(time.time()) - 86_400, project_ids=[project_id], group_by=["api_key_id", "batch"]
        )
        (result,) = usage_results(page)
        assert (result.api_key_id, result.batch, result.num_model_requests) == (key_id, True, 4)
        assert batch.usage is not None
        assert result.input_tokens + result.output_tokens == batch.usage.total_tokens


async def test_lines_may_use_only_what_their_key_may() -> None:
    scopes = ["responses", "files", "model:scripted", "tool:file_search"]
    async with key_client(scripted([{"text": "hello"}]), {}, scopes) as (_, client, *_):
        lines = [
            batch_line("mine"),
            batch_line("tools", tools=[{"type": "web_search"}]),
        ]
        batch = await wait_for_end(client, await create_batch(client, lines))
        assert [line["custom_id"] for line in await read_results(client, batch.output_file_id)] == ["mine"]
        (error,) = await read_results(client, batch.error_file_id)
        assert error["response"]["status_code"] == 403
        assert error["response"]["body"]["error"]["code"] == "tool_not_allowed"


async def test_a_used_up_budget_fails_the_lines_without_further_attempts() -> None:
    limits = {"max_tokens_per_1_month": 0}
    async with key_client(scripted([{"text": "hello"}]), limits, []) as (served, client, *_):
        batch = await wait_for_end(client, await create_batch(client, [batch_line("one")]))
        (error,) = await read_results(client, batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "insufficient_quota"
        assert not getattr(served.stack.inference, "requests")  # noqa: B009 - of the scripted model only


async def test_a_revoked_key_ends_its_batch_and_says_so() -> None:
    slow = scripted([{"wait_s": 30}, {"text": "late"}])
    async with key_client(slow, {"max_concurrent_responses": 1}, []) as (served, client, organization, project_id, key):
        batch = await create_batch(client, [batch_line("one"), batch_line("two")])
        await until_status(client.batches, batch.id, "in_progress")
        other = await organization.projects.service_accounts.create(project_id, name="other")
        await organization.projects.api_keys.delete(key, project_id=project_id)
        async with sdk_client(served.url, other.api_key.value) as reader:
            batch = await wait_for_end(reader, batch)
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert (batch.status, [error.code for error in batch.errors.data]) == ("cancelled", ["api_key_revoked"])
            errors = await read_results(reader, batch.error_file_id)
        assert len(errors) == 2
        for line in errors:  # one that was about to be executed has the answer to a request with this key
            error = line["error"] or line["response"]["body"]["error"]
            assert error["code"] in ("api_key_revoked", "invalid_api_key")
