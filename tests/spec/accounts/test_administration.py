"""The SDK's `admin.organization` against the stack: projects, service accounts and keys."""

import asyncio
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, PermissionDeniedError
from openai.types.admin.organization import AdminAPIKey, Project
from openai.types.admin.organization.projects import ProjectAPIKey, ProjectServiceAccount

from apis.accounts.accounts import MAX_KEY_AGE_S
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import ROOT, organization_of


@pytest.fixture
def organization(served: Served) -> Any:
    return organization_of(served.client)


def assert_complete(value: Any, kind: type[Any]) -> None:
    """Raise unless the SDK's type, checked strictly, has every field that the server sent."""
    kind.model_validate(value.to_dict(), strict=True)


async def test_projects_are_created_renamed_listed_and_archived(organization: Any) -> None:
    one = await organization.projects.create(name="one")
    assert_complete(one, Project)
    assert (one.object, one.status, one.archived_at) == ("organization.project", "active", None)
    others = [await organization.projects.create(name=f"p{number}") for number in range(4)]
    renamed = await organization.projects.update(one.id, name="first")
    assert (renamed.id, renamed.name) == (one.id, "first")
    assert [project.id async for project in organization.projects.list(limit=2)] == [
        project.id for project in (one, *others)
    ]
    archived = await organization.projects.archive(others[1].id)
    assert (archived.status, archived.archived_at is None) == ("archived", False)
    listed = [project.id async for project in organization.projects.list(limit=2)]
    assert others[1].id not in listed
    assert len(listed) == 4
    every = [project.id async for project in organization.projects.list(limit=2, include_archived=True)]
    assert len(every) == 5
    assert (await organization.projects.retrieve(others[1].id)).status == "archived"
    with pytest.raises(BadRequestError, match="archived"):
        await organization.projects.service_accounts.create(others[1].id, name="late")
    with pytest.raises(NotFoundError):
        await organization.projects.retrieve("proj_of_no_one")
    with pytest.raises(BadRequestError) as refusal:
        await organization.projects.create(name="eu", geography="EU")
    assert refusal.value.param == "geography"


async def test_a_service_account_has_a_key_that_works_and_is_shown_once(served: Served, organization: Any) -> None:
    project = await organization.projects.create(name="one")
    account = await organization.projects.service_accounts.create(project.id, name="app")
    async with sdk_client(served.url, account.api_key.value) as client:
        await client.responses.create(model="scripted", input="hi")
    (key,) = [key async for key in organization.projects.api_keys.list(project.id)]
    assert_complete(key, ProjectAPIKey)
    assert key.owner.service_account.id == account.id
    assert key.last_used_at is not None
    assert account.api_key.value not in key.to_json()
    read = await organization.projects.api_keys.retrieve(key.id, project_id=project.id)
    assert read.redacted_value == key.redacted_value
    stored = await organization.projects.service_accounts.retrieve(account.id, project_id=project.id)
    assert_complete(stored, ProjectServiceAccount)
    deletion = await organization.projects.api_keys.delete(key.id, project_id=project.id)
    assert (deletion.deleted, deletion.object) == (True, "organization.project.api_key.deleted")
    await _expect_refusal(served, account.api_key.value)
    assert [key async for key in organization.projects.api_keys.list(project.id)] == []


async def test_a_deleted_service_account_takes_its_keys_with_it(served: Served, organization: Any) -> None:
    project = await organization.projects.create(name="one")
    accounts = organization.projects.service_accounts
    silent = await accounts.create(project.id, name="silent", create_service_account_only=True)
    assert (silent.api_key, silent.role) == (None, "none")
    account = await accounts.create(project.id, name="app", expires_in_seconds=3600)
    assert account.api_key.expires_at == account.api_key.created_at + 3600
    second = await accounts.api_keys.create(account.id, project_id=project.id, name="second", scopes=["files"])
    async with sdk_client(served.url, second.value) as client:
        with pytest.raises(PermissionDeniedError):
            await client.responses.create(model="scripted", input="hi")
    with pytest.raises(BadRequestError) as refusal:
        await accounts.api_keys.create(account.id, project_id=project.id, scopes=["everything"])
    assert refusal.value.param == "scopes"
    assert (await accounts.update(account.id, project_id=project.id, name="renamed")).name == "renamed"
    assert (await accounts.delete(account.id, project_id=project.id)).deleted
    for value in (account.api_key.value, second.value):
        await _expect_refusal(served, value)
    assert [each.id async for each in accounts.list(project.id)] == [silent.id]
    with pytest.raises(NotFoundError):
        await accounts.api_keys.create(account.id, project_id=project.id)


async def test_keys_of_administrators_manage_and_do_nothing_else(served: Served, organization: Any) -> None:
    keys = [await organization.admin_api_keys.create(name=f"ops {number}") for number in range(3)]
    async with sdk_client(served.url, keys[0].value) as client:
        ops: Any = client.with_options(admin_api_key=keys[0].value).admin.organization
        assert [key.id async for key in ops.admin_api_keys.list(limit=2)] == [key.id for key in keys]
        newest_first = [key.id async for key in ops.admin_api_keys.list(limit=2, order="desc")]
        assert newest_first == [key.id for key in reversed(keys)]
        read = await ops.admin_api_keys.retrieve(keys[1].id)
        assert_complete(read, AdminAPIKey)
        assert (await ops.admin_api_keys.delete(keys[1].id)).deleted
        with pytest.raises(PermissionDeniedError):
            await client.responses.create(model="scripted", input="hi")
        with pytest.raises(NotFoundError):  # one project's key is not found below another, nor below none
            await ops.projects.api_keys.retrieve(keys[0].id, project_id=".admin")


async def test_a_server_whose_keys_are_in_its_run_config_says_so() -> None:
    async with serving(server={"api_keys": [ROOT]}) as served:
        organization = organization_of(served.client)
        with pytest.raises(BadRequestError, match=r"accounts: \{provider: stored\}"):
            await organization.projects.create(name="one")


async def _expect_refusal(served: Served, value: str) -> None:
    """Wait until the key is refused; the bound of the wait is the promise."""

    async with sdk_client(served.url, value) as client, asyncio.timeout(MAX_KEY_AGE_S + 1):
        while True:
            try:
                await client.models.list()
            except AuthenticationError:
                return
