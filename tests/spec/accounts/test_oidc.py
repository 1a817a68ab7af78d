"""Sign-in by an identity provider: the SDK with tokens as its key, over HTTP and WebSocket."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import AuthenticationError, InternalServerError, NotFoundError, PermissionDeniedError, RateLimitError

from apis.accounts.accounts import MAX_KEY_AGE_S
from apis.accounts.directory import KeyOptions
from apis.accounts.requests import UpdateRateLimit
from tests.stack.http.raw import ask, bearer, check_error
from tests.support.sdk.client import sdk_client
from tests.support.sdk.websockets import talking
from tests.support.servers.issuer import Issuer, issuing, oidc_section
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import stored_organization
from tests.support.tenants.forged_tokens import FORGED

ROLES: dict[str, Any] = {
    "claim": "role",
    "values": {
        "engineer": {"scopes": ["responses", "files", "read"]},
        "intern": {"scopes": ["responses", "model:scripted"], "limits": {"max_requests_per_1_day": 2}},
        "operator": {"scopes": ["admin"]},
    },
}
OLD_KEY = {"key": "sk-old", "tenant": "alpha"}


def chained(issuer: Issuer, **fields: Any) -> dict[str, Any]:
    """Keys of the run config, tokens and stored keys, in the order that the documents recommend."""
    providers = {
        "config": {"provider": "config"},
        "people": oidc_section(issuer.url, roles=ROLES, **fields),
        "stored": {"provider": "stored"},
    }
    return {"accounts": {"provider": "chain", "providers": providers}}


@pytest_asyncio.fixture
async def issuer() -> AsyncGenerator[Issuer]:
    async with issuing() as running:
        yield running


@pytest_asyncio.fixture
async def served(issuer: Issuer) -> AsyncGenerator[Served]:
    async with serving(more=chained(issuer), server={"api_keys": [OLD_KEY]}) as running:
        yield running


def token_of(issuer: Issuer, role: str = "engineer", **claims: Any) -> str:
    return issuer.token(issuer.claims(role=role, **claims), "EdDSA").decode()


async def say(client: Any, **fields: Any) -> Any:
    return await client.responses.create(**{"model": "scripted", "input": "hi", **fields})


async def list_models_forever(client: Any) -> None:
    while True:
        await client.models.list()
        await asyncio.sleep(0.05)


async def test_a_token_is_the_key_of_its_team(served: Served, issuer: Issuer) -> None:
    one, other = token_of(issuer), token_of(issuer, team="beta", sub="eve")
    async with sdk_client(served.url, one) as client, sdk_client(served.url, other) as stranger:
        response = await say(client)
        assert (await client.responses.retrieve(response.id)).id == response.id
        with pytest.raises(NotFoundError):
            await stranger.responses.retrieve(response.id)
        with pytest.raises(PermissionDeniedError):
            await client.get("/organization/projects", cast_to=object)
        assert [event async for event in await say(client, stream=True)][-1].type == "response.completed"


async def test_a_chain_admits_configured_and_stored_keys_and_tokens_to_one_team(served: Served, issuer: Issuer) -> None:
    first = await say(served.client)
    directory = stored_organization(served.stack.accounts).directory
    project = await directory.create_project("alpha", project_id="alpha")
    account = await directory.create_service_account(project.id, "app")
    stored = await directory.create_key(account, KeyOptions("app"))
    for key in (token_of(issuer), stored.value):
        async with sdk_client(served.url, key) as client:
            assert (await client.responses.retrieve(first.id)).id == first.id
    for key in ("sk-other", "a.b.c", token_of(issuer)[:-8]):
        async with sdk_client(served.url, key) as client:
            with pytest.raises(AuthenticationError):
                await say(client)


async def test_forged_tokens_get_the_answer_of_any_wrong_key(served: Served, issuer: Issuer) -> None:
    wrong = await ask(served.url, b"", method="GET", path="/v1/models", headers=bearer("sk-wrong"))
    expected = check_error(wrong, 401)
    names = ("unsigned as none", "HS256 by the public key as PEM", "RS256 by another key", "too long", "deep lists")
    for name in (*names, "the team '.admin'", "the expiry -1 s from now", "jku of its own keys, id evil"):
        token = FORGED[name](issuer).decode()
        answer = await ask(served.url, b"", method="GET", path="/v1/models", headers=bearer(token))
        assert check_error(answer, 401) == expected, name


async def test_an_open_websocket_ends_when_its_token_expires(served: Served, issuer: Issuer) -> None:
    expires_at = int(time.time()) + 2
    async with sdk_client(served.url, token_of(issuer, exp=expires_at)) as client, talking(served, client) as talk:
        await talk.ask()
        error = await talk.recv()
        assert (error.type, error.status, error.error.code) == ("error", 401, "invalid_api_key")
        assert time.time() >= expires_at - 0.1
        async with asyncio.timeout(5):
            with pytest.raises(Exception, match="1008"):
                await talk.connection.recv()
        with pytest.raises(AuthenticationError):
            await say(client)


async def test_the_limits_of_a_project_and_of_a_role_hold_for_tokens(served: Served, issuer: Issuer) -> None:
    accounts = served.stack.accounts
    organization = stored_organization(accounts)
    directory, limiter = organization.directory, organization.limiter
    for project in ("alpha", "beta"):
        await directory.create_project(project, project_id=project)
    await limiter.set_limit("beta", "*", UpdateRateLimit(max_tokens_per_1_month=1))
    await limiter.set_limit("alpha", "key:oidc:bob", UpdateRateLimit(max_requests_per_1_day=0))
    async with sdk_client(served.url) as client:
        intern = client.with_options(api_key=token_of(issuer, "intern"))
        await say(intern)
        await say(intern)
        with pytest.raises(RateLimitError, match="key:oidc:ada"):
            await say(intern)
        with pytest.raises(PermissionDeniedError):
            await intern.files.list()
        await say(client.with_options(api_key=token_of(issuer, "intern", sub="eve")))
        with pytest.raises(RateLimitError, match="key:oidc:bob"):
            await say(client.with_options(api_key=token_of(issuer, sub="bob")))
        beta = client.with_options(api_key=token_of(issuer, team="beta"))
        await say(beta)
        with pytest.raises(RateLimitError) as refusal:
            await say(beta)
        assert refusal.value.code == "insufficient_quota"


async def test_tokens_of_an_archived_project_are_refused_within_a_second(served: Served, issuer: Issuer) -> None:
    operator = token_of(issuer, "operator", team=...)
    async with sdk_client(served.url, token_of(issuer)) as client:
        organization: Any = client.with_options(admin_api_key=operator).admin.organization
        directory = stored_organization(served.stack.accounts).directory
        await directory.create_project("alpha", project_id="alpha")
        await say(client)
        await organization.projects.archive("alpha")
        async with asyncio.timeout(MAX_KEY_AGE_S + 1):
            with pytest.raises(AuthenticationError):
                await list_models_forever(client)
        with pytest.raises(PermissionDeniedError):
            await say(client.with_options(api_key=operator))


async def test_tokens_alone_need_no_other_keys_and_may_be_bound_to_projects_that_exist(issuer: Issuer) -> None:
    section = oidc_section(issuer.url, roles=ROLES, require_project=True)
    async with serving(more={"accounts": section}) as served, sdk_client(served.url, token_of(issuer)) as client:
        with pytest.raises(AuthenticationError):
            await say(client)
        organization: Any = client.with_options(admin_api_key=token_of(issuer, "operator")).admin.organization
        project = await organization.projects.create(name="new")
        member = client.with_options(api_key=token_of(issuer, team=project.id))
        assert (await say(member)).output_text
        usage = await organization.usage.completions(
            start_time=int(time.time()) - 7200, bucket_width="1h", group_by=["project_id", "api_key_id"]
        )
        (result,) = [each for bucket in usage.data for each in bucket.results]
        assert (result.project_id, result.api_key_id) == (project.id, "oidc:ada")


async def test_no_token_is_admitted_while_the_keys_of_the_issuer_were_never_read(issuer: Issuer) -> None:
    issuer.answers.clear()
    async with serving(more=chained(issuer), server={"api_keys": [OLD_KEY]}) as served:
        await say(served.client)
        with pytest.raises(InternalServerError) as failure:
            await say(served.client.with_options(api_key=token_of(issuer)))
        assert failure.value.status_code == 503
        with pytest.raises(AuthenticationError):
            await say(served.client.with_options(api_key="sk-wrong"))
