"""A key reads its own rights, limits and usage, and those of no other key."""

import time
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.admin.organization import UsageCompletionsResponse
from openai.types.admin.organization.projects import ProjectRateLimit

from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import serving
from tests.support.tenants.accounts import CHAINED, ROOT, organization_of


async def read(client: AsyncOpenAI, path: str, **query: Any) -> Any:
    return await client.get(path, cast_to=object, options={"params": query})


async def test_a_key_reads_its_rights_its_limits_and_its_usage_alone() -> None:
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        project = await organization.projects.create(name="p")
        account = await organization.projects.service_accounts.create(project.id, name="app")
        own = await organization.projects.service_accounts.api_keys.create(
            account.id, project_id=project.id, scopes=["responses", "model:scripted", "tool:web_search"]
        )
        for subject in ("*", f"key:{own.id}", f"key:{account.api_key.id}", "scripted", "other-model"):
            await organization.projects.rate_limits.update_rate_limit(
                f"rl-{subject}", project_id=project.id, max_requests_per_1_day=100
            )
        async with sdk_client(served.url, account.api_key.value) as other:
            await other.responses.create(model="scripted", input="not of the key")
        async with sdk_client(served.url, own.value) as client:
            response = await client.responses.create(model="scripted", input="one")
            key = await read(client, "/stack/key")
            page = await read(client, "/stack/usage", start_time=int(time.time()) // 86_400 * 86_400)
            foreign = await read(
                client, "/stack/usage", start_time=int(time.time()) - 3600, api_key_ids=[account.api_key.id]
            )
            with pytest.raises(BadRequestError) as refusal:
                await read(client, "/stack/usage", start_time="yesterday")
            assert refusal.value.param == "start_time"
        limits = [ProjectRateLimit.model_validate(limit) for limit in key.pop("limits")]
        assert [limit.model for limit in limits] == ["*", f"key:{own.id}", "scripted"]
        assert all(limit.max_requests_per_1_day == 100 for limit in limits)
        assert key == {
            "object": "stack.key",
            "id": own.id,
            "project_id": project.id,
            "scopes": ["responses"],
            "models": ["scripted"],
            "tools": ["web_search"],
            "expires_at": None,
            "manages_accounts": False,
            "records_usage": True,
            "currency": "USD",
        }
        UsageCompletionsResponse.model_validate(page)
        assert response.usage is not None
        for answer in (page, foreign):
            (result,) = [result for bucket in answer["data"] for result in bucket["results"]]
            assert (result["num_model_requests"], result["input_tokens"], result["output_tokens"]) == (
                1,
                response.usage.input_tokens,
                response.usage.output_tokens,
            )


async def test_an_administrators_key_manages_and_uses_nothing() -> None:
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        admin = await organization.admin_api_keys.create(name="ops")
        async with sdk_client(served.url, admin.value) as client:
            key = await read(client, "/stack/key")
            page = await read(client, "/stack/usage", start_time=int(time.time()) - 3600)
        assert (key["scopes"], key["project_id"]) == (["admin"], None)
        assert (key["manages_accounts"], key["records_usage"]) == (True, False)
        assert [result for bucket in page["data"] for result in bucket["results"]] == []


async def test_a_server_without_stored_keys_says_what_is_missing() -> None:
    async with serving() as served:
        key = await read(served.client, "/stack/key")
        assert (key["id"], key["manages_accounts"], key["records_usage"]) == (None, False, False)
        with pytest.raises(BadRequestError) as refusal:
            await read(served.client, "/stack/usage", start_time=0)
        assert refusal.value.code == "not_configured"
