"""Permissions and retention of a project: set through the SDK's `admin.organization`, and enforced for all its keys."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, PermissionDeniedError
from openai.types.admin.organization.projects import (
    ProjectDataRetention,
    ProjectHostedToolPermissions,
    ProjectModelPermissions,
    ProjectServiceTierSettings,
)

from apis.accounts.accounts import MAX_KEY_AGE_S
from tests.spec.accounts.test_administration import assert_complete
from tests.spec.accounts.test_stored_keys import say
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of


@dataclass
class Project:
    """A project with one key, the client of that key, and the administrator's view of all projects."""

    id: str
    client: AsyncOpenAI
    projects: Any
    served: Served


@asynccontextmanager
async def project(**more: Any) -> AsyncGenerator[Project]:
    async with serving(more={**CHAINED, **more}, server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization)
        async with sdk_client(served.url, key) as client:
            yield Project(project_id, client, organization.projects, served)


async def until_refused(call: Any) -> PermissionDeniedError:
    """Repeat the call until it is refused; the bound of the wait is the promise."""
    async with asyncio.timeout(MAX_KEY_AGE_S + 1):
        while True:
            try:
                await call()
            except PermissionDeniedError as exc:
                return exc


async def test_model_permissions_bound_what_all_keys_of_a_project_may_use() -> None:
    async with project() as one:
        permissions = one.projects.model_permissions
        initial = await permissions.retrieve(one.id)
        assert_complete(initial, ProjectModelPermissions)
        assert (initial.mode, initial.api_model_ids) == ("deny_list", [])
        await say(one.client)
        allowed = await permissions.update(one.id, mode="allow_list", model_ids=["other", "other"])
        assert_complete(allowed, ProjectModelPermissions)
        assert allowed.api_model_ids == ["other"]
        refusal = await until_refused(lambda: say(one.client))
        assert (refusal.param, refusal.code) == ("model", "model_not_allowed")
        for call in (
            one.client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}]),
            one.client.embeddings.create(model="scripted", input="hi"),
            one.client.responses.input_tokens.count(model="scripted", input="hi"),
        ):
            with pytest.raises(PermissionDeniedError):
                await call
        await one.client.conversations.create(items=[])
        deletion = await permissions.delete(one.id)
        assert (deletion.deleted, deletion.object) == (True, "project.model_permissions.deleted")
        await permissions.update(one.id, mode="deny_list", model_ids=["scripted"])
        with pytest.raises(PermissionDeniedError):
            await say(one.client)
        with pytest.raises(NotFoundError):
            await permissions.retrieve("proj_of_no_one")
        await one.projects.archive(one.id)
        with pytest.raises(BadRequestError, match="archived"):
            await permissions.delete(one.id)


async def test_hosted_tools_that_are_disabled_are_refused_on_every_way() -> None:
    async with project() as one:
        permissions = one.projects.hosted_tool_permissions
        initial = await permissions.retrieve(one.id)
        ProjectHostedToolPermissions.model_validate(initial.to_dict(), strict=True)
        assert initial.web_search.enabled
        changed = await permissions.update(one.id, web_search={"enabled": False}, code_interpreter={"enabled": False})
        assert [changed.web_search.enabled, changed.code_interpreter.enabled, changed.mcp.enabled] == [
            *(False, False),
            True,
        ]
        changed = await permissions.update(one.id, mcp={"enabled": False}, code_interpreter={"enabled": True})
        assert [changed.web_search.enabled, changed.code_interpreter.enabled, changed.mcp.enabled] == [
            *(False, True),
            False,
        ]
        await permissions.update(one.id, code_interpreter={"enabled": False})
        function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
        await say(one.client, tools=[function, {"type": "shell", "environment": {"type": "local"}}])
        server = {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"}
        for tool in (
            {"type": "web_search"},
            {"type": "web_search_preview"},
            {"type": "code_interpreter", "container": {"type": "auto"}},
            {"type": "shell", "environment": {"type": "container_auto"}},
            server,
        ):
            with pytest.raises(PermissionDeniedError) as refusal:
                await say(one.client, tools=[function, tool])
            assert (refusal.value.param, refusal.value.code) == ("tools[1]", "tool_not_allowed")
        loaded: Any = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [server]}
        with pytest.raises(PermissionDeniedError):
            await one.client.responses.create(model="scripted", input=[loaded])
        async with talking(one.served, one.client) as talk:
            error = await talk.refused(tools=[server])
            assert (error.status, error.error.param) == (403, "tools[0]")


async def test_service_tiers_are_enabled_and_defaulted_by_project() -> None:
    async with project() as one:
        tiers = one.projects.service_tier_settings
        initial = await tiers.retrieve(one.id)
        assert_complete(initial, ProjectServiceTierSettings)
        assert (initial.default, initial.enabled_tiers) == ("standard", "all")
        changed = await tiers.update(one.id, default="fast", enabled_tiers=["fast"])
        assert_complete(changed, ProjectServiceTierSettings)
        queued = await say(one.client, background=True)
        assert queued.service_tier == "priority"  # the name of the rank that `fast` has
        assert (await say(one.client, background=True, service_tier="default")).service_tier == "default"
        for tier in ("flex", "ultrafast"):
            with pytest.raises(PermissionDeniedError) as refusal:
                await say(one.client, service_tier=tier)
            assert (refusal.value.param, refusal.value.code) == ("service_tier", "service_tier_not_allowed")
        await tiers.update(one.id, enabled_tiers="all")
        with pytest.raises(BadRequestError) as refused:
            await tiers.update(one.id, default="scale")
        assert refused.value.param == "default"


async def test_a_project_with_zero_data_retention_stores_nothing() -> None:
    async with project(files={"provider": "kv"}) as one:
        retention = one.projects.data_retention
        initial = await retention.retrieve(one.id)
        assert_complete(initial, ProjectDataRetention)
        assert initial.type == "organization_default"
        changed = await retention.update(one.id, retention_type="zero_data_retention")
        assert_complete(changed, ProjectDataRetention)
        response = await say(one.client, store=True)
        assert response.store is False
        with pytest.raises(NotFoundError):
            await one.client.responses.retrieve(response.id)
        for call in (
            say(one.client, background=True),
            say(one.client, conversation="conv_1"),
            say(one.client, extra_headers={"Idempotency-Key": "again"}),
            one.client.conversations.create(),
            one.client.files.create(file=("a.txt", b"a"), purpose="user_data"),
            one.client.vector_stores.create(name="v"),
            one.client.post("/webhook_endpoints", cast_to=object, body={"url": "https://example.com"}),
        ):
            with pytest.raises(PermissionDeniedError, match="stores nothing"):
                await call
        async with talking(one.served, one.client) as talk:
            await talk.ask(store=True)
        stored = await one.served.stack.kv_store.scan(f"{one.id}/")
        assert [key for key, _ in stored] == []
        for refused in ("modified_abuse_monitoring", "enhanced_zero_data_retention"):
            with pytest.raises(BadRequestError) as refusal:
                await retention.update(one.id, retention_type=refused)
            assert refusal.value.param == "retention_type"
        extended = await retention.update(one.id, retention_type="none", extra_body={"retention_days": 7})
        assert extended.to_dict()["retention_days"] == 7
