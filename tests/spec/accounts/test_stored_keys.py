"""Keys in the store: who is admitted, to what, and for how long."""

import asyncio
import time
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, InternalServerError, NotFoundError, PermissionDeniedError

from apis.accounts.accounts import ADMIN_TENANT, MAX_KEY_AGE_S
from apis.accounts.directory import KeyOptions, NewKey
from apis.errors import StoreUnavailable
from apis.storage.kv_store import KVStore
from providers.accounts.directory import StoredDirectory
from stack.http.route import Route
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES, REFUSED_ROUTES
from tests.stack.http.raw import ask, bearer, error_code
from tests.support.sdk.client import sdk_client
from tests.support.sdk.decisions import DECISION_FIELDS
from tests.support.sdk.websockets import talking
from tests.support.servers.serving import Served, serving
from tests.support.tenants.accounts import CHAINED, stored_organization

STORED: dict[str, Any] = {"accounts": {"provider": "stored"}}


def directory_of(served: Served) -> StoredDirectory:
    return stored_organization(served.stack.accounts).directory


async def new_key(served: Served, project: str = "alpha", *scopes: str, expires_in_s: int | None = None) -> NewKey:
    directory = directory_of(served)
    page = await served.stack.kv_store.get(f"/accounts/projects/{project}")
    if page is None:
        await directory.create_project(project, project_id=project)
    account = await directory.create_service_account(project, "app")
    return await directory.create_key(account, KeyOptions("app", scopes, expires_in_s))


async def say(client: AsyncOpenAI, **fields: Any) -> Any:
    create: Any = client.responses.create
    return await create(model="scripted", input="hi", **fields)


async def test_a_stored_key_admits_to_its_own_project_and_no_key_admits_no_one() -> None:
    async with serving(more=STORED) as served:
        with pytest.raises(AuthenticationError):
            await say(served.client)
        one, other = await new_key(served, "alpha"), await new_key(served, "beta")
        async with sdk_client(served.url, one.value) as client, sdk_client(served.url, other.value) as stranger:
            response = await say(client)
            assert (await client.responses.retrieve(response.id)).id == response.id
            with pytest.raises(NotFoundError):
                await stranger.responses.retrieve(response.id)
            with pytest.raises(PermissionDeniedError) as refusal:
                await client.get("/organization/projects", cast_to=object)
            assert refusal.value.code == "missing_scope"
        stored = [entry.value for _, entry in await served.stack.kv_store.scan("/accounts/")]
        assert not any(one.value.encode() in value for value in stored)
        assert one.key.redacted_value.endswith(one.value[-4:])


async def test_a_chain_admits_keys_of_the_config_and_of_the_store() -> None:
    async with serving(more=CHAINED, server={"api_keys": [{"key": "sk-old", "tenant": "alpha"}]}) as served:
        first = await say(served.client)
        key = await new_key(served, "alpha")
        async with sdk_client(served.url, key.value) as client:
            assert (await client.responses.retrieve(first.id)).id == first.id
            with pytest.raises(AuthenticationError):
                await say(client.with_options(api_key="sk-other"))


async def test_a_revoked_key_is_refused_within_a_second_on_an_open_websocket_too() -> None:
    async with serving(more=STORED) as served:
        key = await new_key(served)
        async with sdk_client(served.url, key.value) as client, talking(served, client) as talk:
            await talk.ask()
            await directory_of(served).revoke_key("alpha", key.key.id)
            revoked_at = time.monotonic()
            async with asyncio.timeout(MAX_KEY_AGE_S + 1):
                while True:
                    try:
                        await say(client)
                    except AuthenticationError:
                        break
            assert time.monotonic() - revoked_at <= MAX_KEY_AGE_S + 0.5
            error = await talk.refused()
            assert (error.status, error.error.code) == (401, "invalid_api_key")


async def test_an_expired_key_is_refused_at_once_and_an_archived_project_within_a_second() -> None:
    async with serving(more=STORED) as served:
        short, long = await new_key(served, expires_in_s=1), await new_key(served)
        async with sdk_client(served.url, short.value) as brief, sdk_client(served.url, long.value) as client:
            await say(client)
            await directory_of(served).archive_project("alpha")
            async with asyncio.timeout(2.5):
                for each in (brief, client):
                    while True:
                        try:
                            await each.models.list()
                        except AuthenticationError:
                            break


async def test_a_key_is_read_from_the_store_once_for_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(more=STORED) as served:
        key = await new_key(served)
        reads: list[str] = []
        kv: KVStore = served.stack.kv_store
        get = kv.get

        async def count(name: str) -> Any:
            reads.append(name)
            return await get(name)

        monkeypatch.setattr(kv, "get", count)
        async with sdk_client(served.url, key.value) as client:
            await asyncio.gather(*(client.models.list() for _ in range(8)))
            for _ in range(20):
                await client.models.list()
        assert 1 <= len([name for name in reads if name.startswith("/accounts/digests/")]) <= 4
        (used_at,) = await directory_of(served).last_uses([key.key])
        assert used_at is not None
        assert abs(used_at - time.time()) < 5


async def test_nothing_is_admitted_while_the_store_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(more=STORED) as served:
        key = await new_key(served)

        async def fail(*_: object, **__: object) -> None:
            raise StoreUnavailable("The store is down.")

        monkeypatch.setattr(served.stack.kv_store, "get", fail)
        async with sdk_client(served.url, key.value) as client:
            with pytest.raises(InternalServerError) as failure:
                await client.models.list()
        assert failure.value.status_code == 503


async def test_a_key_for_some_models_and_tools_uses_no_others() -> None:
    async with serving(more=STORED) as served:
        key = await new_key(served, "alpha", "model:scripted", "tool:web_search")
        async with sdk_client(served.url, key.value) as client:
            function: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
            await say(client, tools=[function])
            with pytest.raises(PermissionDeniedError) as refusal:
                await say(client, tools=[function, {"type": "code_interpreter", "container": {"type": "auto"}}])
            assert (refusal.value.param, refusal.value.code) == ("tools[1]", "tool_not_allowed")
            server: Any = {"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"}
            loaded: Any = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [server]}
            with pytest.raises(PermissionDeniedError):
                await client.responses.create(model="scripted", input=[loaded])
            with pytest.raises(PermissionDeniedError):
                await client.conversations.create(items=[loaded])
            with pytest.raises(PermissionDeniedError) as refusal:
                await client.responses.create(model="other", input="hi")
            assert (refusal.value.param, refusal.value.code) == ("model", "model_not_allowed")
            async with talking(served, client) as talk:
                await talk.ask()
                error = await talk.refused(model="other")
                assert (error.status, error.error.param) == (403, "model")


ROUTES: tuple[Route, ...] = (*API_ROUTES, *EXTENSION_ROUTES, *REFUSED_ROUTES)


async def test_every_route_that_takes_a_model_is_closed_to_keys_for_other_models() -> None:
    """Generated from the table of routes, so no new route can leave the check out."""
    async with serving(more=STORED) as served:
        key = await new_key(served, "alpha", "model:mine")
        taken = [route for route in ROUTES if route.body is not None and "model" in route.body.model_fields]
        assert {"/responses", "/chat/completions", "/embeddings"} <= {route.path for route in taken}
        said = [{"role": "user", "content": "hi"}]
        fields = {"model": "other", "input": "hi", "messages": said, "max_tokens": 9}
        for route in taken:
            assert route.body is not None
            body = {name: value for name, value in fields.items() if name in route.body.model_fields}
            body |= DECISION_FIELDS.get(route.path, {})
            if not {"input", "state"} & body.keys() and "messages" not in body:
                body["prompt"] = "hi"
            headers = [*bearer(key.value), ("openai-beta", "agents=v1")]
            answer = await ask(served.url, body, path=f"/v1{route.path}", headers=headers)
            assert error_code(answer, 403) == "model_not_allowed", route


AGENT_SCOPES = ("api.agents.read", "api.agents.write", "api.vaults.read", "api.vaults.write")
SCOPES = ("responses", "files", "read", *AGENT_SCOPES, "admin")


def admitted(route: Route, scope: str) -> bool:
    """The privilege matrix: which routes each scope admits to, written down independently of the code."""
    resource = route.path.split("/")[1]
    own = {
        "responses": {
            *(
                "responses",
                "chat",
                "completions",
                "conversations",
                "containers",
                "embeddings",
                "decisions",
                "systemone",
                "images",
                "moderations",
                "audio",
            ),
            *("batches", "messages", "stack", "traces", "webhook_endpoints", "webhook_event_types"),
        },
        "files": {"files", "skills", "uploads", "vector_stores"},
        "read": set[str](),
        "api.agents.read": {"agents"} if route.method == "GET" else set[str](),
        "api.agents.write": {"agents"},
        "api.vaults.read": {"vaults"} if route.method == "GET" else set[str](),
        "api.vaults.write": {"vaults"},
        "admin": {"organization"},
    }[scope]
    if resource == "models":
        return scope != "admin"
    if route.path.startswith("/stack/models"):
        return scope == "admin"
    if route.path in ("/stack/key", "/stack/usage") or route.path.startswith("/stack/models"):
        return True
    return resource in own or (scope == "read" and route.method == "GET" and resource != "organization")


async def test_the_privilege_matrix_of_every_route_and_scope_holds() -> None:
    """Generated from the table of routes."""
    async with serving(more=STORED) as served:
        values = {scope: (await new_key(served, "alpha", scope)).value for scope in SCOPES[:-1]}
        admin = await directory_of(served).create_key(None, KeyOptions("root"))
        assert admin.key.project_id == ADMIN_TENANT
        values["admin"] = admin.value
        for route in ROUTES:
            path = route.path.replace("{", "").replace(":path}", "").replace("}", "")
            # without the prefix it is the same route: one scope that it admits and one that it refuses show that
            few = {admitted(route, scope): scope for scope in SCOPES}.values()
            requests = [*(("/v1", scope) for scope in SCOPES), *(("", scope) for scope in few)]
            for prefix, scope in requests:
                answer = await ask(
                    served.url, b"", method=route.method, path=f"{prefix}{path}", headers=bearer(values[scope])
                )
                refused = answer.status == 403 and b"missing_scope" in answer.body
                assert refused != admitted(route, scope), (route.method, path, scope, answer)
        for path in ("/version", "/openapi.json"):
            for value in values.values():
                answer = await ask(served.url, b"", method="GET", path=path, headers=bearer(value))
                assert answer.status == 200
        unknown = await ask(served.url, b"", method="GET", path="/v1/novelty", headers=bearer(values["files"]))
        assert unknown.status == 403
