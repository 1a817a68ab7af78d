"""Background responses that wait while their key is revoked, or their project archived."""

import asyncio
from typing import Any

import pytest
from openai import AuthenticationError

from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import chat_requests
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, ROOT, new_project, organization_of
from tests.support.waiting import until, until_empty

HOLDING = {"provider": "tests.support.servers.held_model:Held"}
ENDED = ("completed", "failed", "incomplete", "cancelled")
ONE_AT_A_TIME = {"background": {"max_running": 1, "poll_s": 0.05, "lease_s": 1}}


async def create_waiting(served: Served, client: Any, **fields: Any) -> list[str]:
    """Create background responses that wait for one which is running; return their ids."""
    ids: list[str] = []
    for text in ("hold", "second", "third"):
        options = fields if text != "hold" else {}
        ids.append((await client.responses.create(model="scripted", input=text, background=True, **options)).id)
    model: Any = served.stack.inference  # one that holds its answers, or a scripted one
    await until(lambda: asked_texts(served) or model.held_count)
    return ids


def asked_texts(served: Served) -> list[str]:
    return [str(request.messages[-1].content) for request in chat_requests(served)]


@pytest.mark.parametrize("way", ["queued", "deferred"])
@pytest.mark.parametrize("end", ["key revoked", "project archived"])
async def test_responses_that_wait_fail_when_their_key_has_ended(way: str, end: str) -> None:
    """The key and its project are looked at again when it is their turn; one that runs goes on."""
    async with serving(HOLDING, responses=ONE_AT_A_TIME, server={"api_keys": [ROOT]}, more=CHAINED) as served:
        organization = organization_of(served.client)
        project_id, key = await new_project(organization)
        window: dict[str, Any] = {"extra_body": {"background_options": {"completion_window": "1h"}}}
        async with sdk_client(served.url, key) as client:
            ids = await create_waiting(served, client, **(window if way == "deferred" else {}))
            if end == "key revoked":
                (stored,) = (await organization.projects.api_keys.list(project_id)).data
                await organization.projects.api_keys.delete(stored.id, project_id=project_id)
            else:
                await organization.projects.archive(project_id)
            await until_empty(lambda: is_admitted(client))
        getattr(served.stack.inference, "released").set()  # noqa: B009 - of the held model only
        ended = [await wait_for_end(served, response_id, project_id) for response_id in ids]
    assert [(response.status, response.error and response.error.code) for response in ended] == [
        ("completed", None),
        ("failed", "api_key_revoked"),
        ("failed", "api_key_revoked"),
    ]
    assert "revoked" in ended[1].error.message


async def is_admitted(client: Any) -> bool:
    try:
        await client.models.list()
    except AuthenticationError:
        return False
    return True


async def wait_for_end(served: Served, response_id: str, tenant: str) -> Any:
    """Return a response at its end, as the server has it: no key may read it any more."""
    async with asyncio.timeout(20):
        while (response := await served.stack.responses.get(response_id, tenant=tenant)).status not in ENDED:  # noqa: ASYNC110 - a server sets no event
            await asyncio.sleep(0.02)
    return response


async def test_queued_work_without_a_key_has_the_settings_and_limits_of_its_project() -> None:
    """The work of a person whose token has ended; an archived project has no such work."""
    async with serving(more=CHAINED, server={"api_keys": [ROOT]}) as served:
        organization, accounts = organization_of(served.client), served.stack.accounts
        project_id, _ = await new_project(organization, {"max_requests_per_1_minute": 7})
        permissions = organization.projects.hosted_tool_permissions
        await permissions.update(project_id, web_search={"enabled": False})
        owner = await accounts.find_owner(project_id, "")
        await organization.projects.archive(project_id)
        archived = await accounts.find_owner(project_id, "")
        unknown = await accounts.find_owner("of-the-issuer", "")
    assert owner is not None
    assert (owner.tenant, owner.settings.disabled_tools) == (project_id, ("web_search",))
    assert [limit.minute_requests for limit in owner.limits.values()] == [7]
    assert archived is None
    assert unknown is not None
    assert unknown.tenant == "of-the-issuer"
