"""Vaults through the official SDK: who may see what of them, and which server gets which secret."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import chat_requests, messages
from tests.support.sdk.sessions import NONE, list_items, message, rest, send
from tests.support.servers.fetcher_hosts import SITE
from tests.support.servers.guarded_mcp import GuardedServer
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
VAULT_KEY = "a key of the run config, of 32 characters at least"
USE_TOOL = play([call("guarded__tell", "{}", id="c1")])
PAST = "2020-01-01T00:00:00Z"


class World:
    """A stack, two of its tenants, and a server that demands tokens."""

    def __init__(self, served: Served, guarded: GuardedServer, folder: Path) -> None:
        self.served = served
        self.guarded = guarded
        self.folder = folder
        self.client = sdk_client(served.url, "key-of-a")
        self.stranger = sdk_client(served.url, "key-of-b")

    async def vault(self, *auths: Json, client: AsyncOpenAI | None = None) -> tuple[str, list[Any]]:
        """A new vault with a credential for each of these."""
        vaults: Any = (client or self.client).beta.agents.vaults
        vault = await vaults.create()
        return vault.id, [await vaults.credentials.create(vault.id, name="one", auth=auth) for auth in auths]

    def bearer(self, token: str, **fields: Any) -> Json:
        return {"type": "static_bearer", "mcp_server_url": self.guarded.mcp_url, "token": token, **fields}

    def oauth(self, token: str, refresh_token: str, **fields: Any) -> Json:
        refresh = {
            "client_id": "the client",
            "refresh_token": refresh_token,
            "token_endpoint": f"{self.guarded.url}/token",
            "token_endpoint_auth": {"type": "client_secret_basic", "client_secret": "client/secret"},
            "scope": "tools",
        }
        fields = {"access_token": token, "refresh": refresh, **fields}
        return {"type": "mcp_oauth", "mcp_server_url": self.guarded.mcp_url, **fields}

    async def use_tool(self, *vault_ids: str, client: AsyncOpenAI | None = None, **tool: Any) -> tuple[str, str]:
        """A session that has called the server's tool, and the output or the failure of it."""
        client = client or self.client
        transport = {"type": "http", "server_url": self.guarded.mcp_url}
        agent: Any = {
            "model": "scripted",
            "tools": [{"type": "mcp", "server_label": "guarded", "transport": transport, **tool}],
        }
        sessions: Any = client.beta.agents.sessions
        session = await sessions.create(agent=agent, environment=NONE, input=USE_TOOL, vault_ids=[*vault_ids])
        return session.id, await self.outcome(session.id, client)

    async def outcome(self, session_id: str, client: AsyncOpenAI | None = None) -> str:
        session = await rest(client or self.client, session_id)
        calls: list[Any] = [
            each for each in await list_items(client or self.client, session_id) if each.type == "mcp_call"
        ]
        return session.error or calls[-1].output or str(calls[-1].error)

    async def outcome_of_next(self, session_id: str) -> str:
        """The outcome of one more turn."""
        await send(self.client, session_id, message(USE_TOOL))
        return await self.outcome(session_id)

    async def all_kept_text(self) -> str:
        files = [path for path in self.folder.rglob("*.db*") if path.is_file()]
        return b"".join([await asyncio.to_thread(path.read_bytes) for path in files]).decode(errors="replace")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    folder = tmp_path_factory.mktemp("vaults")
    async with GuardedServer() as guarded:
        fetcher = {
            "provider": "safe",
            "allowed_private_networks": [f"{SITE}/32"],
            "allowed_ports": [guarded.port],
        }
        vaults = {"provider": "kv", "keys": [VAULT_KEY], "allow_http": True, "max_vaults": 50, "max_credentials": 3}
        store = {"provider": "sqlite", "path": str(folder / "store.db")}
        more = {"vaults": vaults, "fetcher": fetcher}
        mcp = {"provider": "mcp", "list_timeout_s": 5, "call_timeout_s": 5}
        async with serving(MODEL, kv_store=store, tool_servers=mcp, server={"api_keys": KEYS}, more=more) as served:
            world = World(served, guarded, folder)
            async with world.client, world.stranger:
                yield world


# --- what is visible, and to whom -------------------------------------------------------------------------------------


async def test_vaults_are_created_changed_listed_and_deleted(world: World) -> None:
    vaults: Any = world.client.beta.agents.vaults
    vault = await vaults.create(name="  mine ", metadata={"team": "x"})
    assert (vault.object, vault.name, vault.metadata) == ("vault", "mine", {"team": "x"})
    other = await vaults.create()
    assert [each.id async for each in vaults.list(metadata={"team": "x"})] == [vault.id]
    assert [each.id async for each in vaults.list(limit=1)][:2] == [other.id, vault.id]
    assert [each.id async for each in vaults.list(status="archived")] == []
    assert vault.id in [each.id async for each in vaults.list(status=["active", "archived"], order="asc")]
    changed = await vaults.update(vault.id, name=None, metadata={})
    assert (changed.name, changed.metadata) == (None, {})
    assert (await vaults.retrieve(vault.id)).to_dict() == changed.to_dict()
    assert (await vaults.delete(vault.id)).to_dict() == {"id": vault.id, "object": "vault.deleted", "deleted": True}
    for gone in (vaults.retrieve, vaults.delete):
        with pytest.raises(openai.NotFoundError):
            await gone(vault.id)


async def test_secrets_of_credentials_are_not_shown(world: World) -> None:
    variable = {"type": "environment_variable", "secret_name": "API_KEY", "secret_value": "variable-secret-1"}
    limited = {"type": "limited", "allowed_hosts": ["API.example.com"]}
    auths = [world.bearer("bearer-secret-1"), world.oauth("access-secret-1", "refresh-secret-1", expires_at=PAST)]
    vault_id, created = await world.vault(*auths, {**variable, "networking": limited})
    credentials: Any = world.client.beta.agents.vaults.credentials
    visible = [each async for each in credentials.list(vault_id, order="asc")]
    assert [each.to_dict() for each in visible] == [each.to_dict() for each in created]
    assert [each.to_dict() for each in visible] == [
        (await credentials.retrieve(each.id, vault_id=vault_id)).to_dict() for each in visible
    ]
    bearer, oauth, secret = (each.auth for each in visible)
    assert bearer.to_dict() == {"type": "static_bearer", "mcp_server_url": world.guarded.mcp_url}
    assert (oauth.expires_at, oauth.refresh.client_id, oauth.refresh.scope) == (PAST, "the client", "tools")
    assert oauth.refresh.token_endpoint_auth.to_dict() == {"type": "client_secret_basic"}
    assert (secret.secret_name, secret.networking.allowed_hosts) == ("API_KEY", ["api.example.com"])
    changed = await credentials.update(
        visible[1].id,
        vault_id=vault_id,
        auth={"type": "mcp_oauth", "access_token": "access-secret-2", "refresh": {"scope": None}},
    )
    assert (changed.auth.expires_at, changed.auth.refresh.scope) == (None, None)
    all_text = str([visible, changed]) + await world.all_kept_text()
    assert [word for word in ("-secret-1", "-secret-2", "client/secret") if word in all_text] == []


@pytest.mark.parametrize(
    ("auth", "param"),
    [
        ({"type": "static_bearer", "mcp_server_url": "https://u:p@a.example/mcp", "token": "t"}, "auth.mcp_server_url"),
        ({"type": "static_bearer", "mcp_server_url": "ftp://a.example/mcp", "token": "t"}, "auth.mcp_server_url"),
        ({"type": "static_bearer", "mcp_server_url": "https://a.example/mcp", "token": "two words"}, "auth.token"),
        (
            {"type": "mcp_oauth", "mcp_server_url": "https://a.example", "access_token": "t", "expires_at": "soon"},
            "auth.expires_at",
        ),
        (
            {
                "type": "environment_variable",
                "secret_name": "HTTPS_PROXY",
                "secret_value": "0123456789",
                "networking": {"type": "unrestricted"},
            },
            "auth.secret_name",
        ),
        (
            {
                "type": "environment_variable",
                "secret_name": "KEY",
                "secret_value": "01234\n6789",
                "networking": {"type": "unrestricted"},
            },
            "auth.secret_value",
        ),
        (
            {
                "type": "environment_variable",
                "secret_name": "KEY",
                "secret_value": "0123456789",
                "networking": {"type": "limited", "allowed_hosts": ["a.example", "*.b.example"]},
            },
            "auth.networking.allowed_hosts[1]",
        ),
    ],
)
async def test_a_wrong_credential_is_refused_by_its_field(world: World, auth: Json, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await world.vault(auth)
    assert caught.value.param == param
    assert "01234" not in str(caught.value)


async def test_another_tenant_knows_nothing_of_a_vault(world: World) -> None:
    vault_id, [credential] = await world.vault(world.bearer("token-of-a-0"))
    vaults: Any = world.stranger.beta.agents.vaults
    credentials = vaults.credentials
    calls = [
        vaults.retrieve(vault_id),
        vaults.update(vault_id, name="x"),
        vaults.delete(vault_id),
        credentials.create(vault_id, name="x", auth=world.bearer("t")),
        credentials.retrieve(credential.id, vault_id=vault_id),
        credentials.update(credential.id, vault_id=vault_id, auth={"type": "static_bearer", "token": "t"}),
        credentials.delete(credential.id, vault_id=vault_id),
        world.stranger.beta.agents.sessions.create(
            agent={"model": "scripted"}, environment=NONE, input="x", vault_ids=[vault_id]
        ),
        world.stranger.responses.create(model="scripted", input="x", extra_body={"vault_ids": [vault_id]}),
    ]
    for each in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            await each
        assert caught.value.code == "not_found_error"
    assert vault_id not in [each.id async for each in vaults.list()]


async def test_vaults_are_bounded(world: World) -> None:
    vault_id, _ = await world.vault(*(world.bearer("t") for _ in range(3)))
    with pytest.raises(openai.BadRequestError, match=r"vaults\.max_credentials"):
        await world.client.beta.agents.vaults.credentials.create(vault_id, name="x", auth=world.bearer("t"))  # type: ignore[arg-type] # a dict


async def test_without_keys_the_error_names_the_line_of_the_run_config() -> None:
    async with serving(MODEL) as served:
        vaults = served.client.beta.agents.vaults
        with pytest.raises(openai.BadRequestError, match=r"`vaults\.keys`"):
            await vaults.create()
        with pytest.raises(openai.BadRequestError, match=r"`vaults\.keys`") as caught:
            await served.client.beta.agents.sessions.create(
                agent={"model": "scripted"}, environment=NONE, input="x", vault_ids=["vault_1"]
            )
        assert caught.value.param == "vault_ids"


# --- tokens of MCP servers -------------------------------------------------------------------------------------------


async def test_a_session_sends_the_token_for_the_server_and_shows_it_nowhere(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    token = "token+of/a~session="
    world.guarded.accepted = {token}
    vault_id, [credential] = await world.vault(world.bearer(token))
    session_id, outcome = await world.use_tool(vault_id)
    assert outcome.startswith("I know")
    session = await world.client.beta.agents.sessions.retrieve(session_id)
    assert session.vault_ids == [vault_id]
    stream = await world.client.beta.agents.sessions.events.stream(session_id, extra_query={"starting_after": 0})
    log: list[Any] = []
    async with stream:
        async for event in stream:
            log.append(event.to_dict())
            if event.type == "agent.session.idle":
                break
    visible = (
        str([log, outcome, messages(world.served), chat_requests(world.served)[-1].tools]) + await world.all_kept_text()
    )
    spellings = [token, "token%2Bof%2Fa~session%3D", base64.b64encode(token.encode()).decode()]
    assert [each for each in spellings if each in visible + caplog.text] == []
    assert "is left out" in caplog.text
    await world.client.beta.agents.vaults.credentials.delete(credential.id, vault_id=vault_id)
    world.guarded.tokens.clear()
    assert "401" in await world.outcome_of_next(session_id)
    assert set(world.guarded.tokens) == {None}


async def test_of_several_credentials_a_tool_names_one(world: World) -> None:
    world.guarded.accepted = {"token-number-1", "token-number-2"}
    vault_id, [first, second] = await world.vault(world.bearer("token-number-1"), world.bearer("token-number-2"))
    assert "credential_id" in (await world.use_tool(vault_id))[1]
    for token, credential in (("token-number-1", first), ("token-number-2", second)):
        world.guarded.tokens.clear()
        assert (await world.use_tool(vault_id, credential_id=credential.id))[1].startswith("I know")
        assert set(world.guarded.tokens) == {token}
    elsewhere, [other] = await world.vault(world.bearer("token-number-3", mcp_server_url="https://other.example/mcp"))
    world.guarded.tokens.clear()
    assert "No credential" in (await world.use_tool(elsewhere, credential_id=other.id))[1]
    assert world.guarded.tokens == []


async def test_a_response_uses_vaults_too_and_says_where_a_credential_is_missing(world: World) -> None:
    world.guarded.accepted = {"token-of-a-response"}
    vault_id, _ = await world.vault(world.bearer("token-of-a-response"))
    tool: Json = {"type": "mcp", "server_label": "guarded", "server_url": world.guarded.mcp_url}
    create: Any = world.client.responses.create
    response = await create(
        model="scripted",
        input=USE_TOOL,
        tools=[{**tool, "require_approval": "never"}],
        extra_body={"vault_ids": [vault_id]},
    )
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert "token-of-a-response" not in response.to_json()
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="scripted", input=USE_TOOL, tools=[{**tool, "credential_id": "vcred_1"}])
    assert caught.value.param == "tools[0].credential_id"


# --- tokens that expire ----------------------------------------------------------------------------------------------


async def test_an_expired_token_is_renewed_once_for_all_who_wait(world: World) -> None:
    guarded = world.guarded
    guarded.accepted, guarded.grants, guarded.tokens = {"access-token-new"}, [], []
    guarded.next_tokens = [{"access_token": "access-token-new", "refresh_token": "refresh-2", "expires_in": 3600}]
    vault_id, [credential] = await world.vault(world.oauth("access-token-old", "refresh-1", expires_at=PAST))
    outcomes = await asyncio.gather(*(world.use_tool(vault_id) for _ in range(3)))
    assert {outcome[:6] for _, outcome in outcomes} == {"I know"}
    assert [grant["refresh_token"] for grant in guarded.grants] == ["refresh-1"]
    assert (guarded.grants[0]["grant_type"], guarded.grants[0]["scope"]) == ("refresh_token", "tools")
    assert (
        guarded.grant_headers[-1]["Authorization"]
        == f"Basic {base64.b64encode(b'the+client:client%2Fsecret').decode()}"
    )
    assert "access-token-old" not in guarded.tokens
    visible: Any = await world.client.beta.agents.vaults.credentials.retrieve(credential.id, vault_id=vault_id)
    assert visible.auth.expires_at > "2026"
    guarded.accepted = {"access-token-3"}
    guarded.next_tokens = [{"access_token": "access-token-3"}]
    assert (await world.use_tool(vault_id))[1].startswith("I know")
    assert [grant["refresh_token"] for grant in guarded.grants] == ["refresh-1", "refresh-2"]


async def test_a_refused_refresh_is_an_error_without_the_secret(world: World) -> None:
    guarded = world.guarded
    guarded.accepted, guarded.grants, guarded.next_tokens, guarded.tokens = {"x"}, [], [], []
    vault_id, _ = await world.vault(world.oauth("access-token-old", "refresh_token_nine", expires_at=PAST))
    session_id, outcome = await world.use_tool(vault_id)
    assert "invalid_grant" in outcome
    assert "refresh_token_nine" not in outcome
    guarded.grant_error = "refresh_token_nine"
    _, outcome = await world.use_tool(vault_id)
    assert "HTTP 400)" in outcome
    await world.client.beta.agents.vaults.delete(vault_id)
    assert "401" in (await world.outcome_of_next(session_id))
    assert set(guarded.tokens) == {None}


# --- records that were changed in the store --------------------------------------------------------------------------


async def test_a_record_that_was_moved_or_changed_in_the_store_is_of_no_use(world: World) -> None:
    world.guarded.accepted, world.guarded.tokens = {"token-of-tenant-a", "token-of-tenant-b"}, []
    mine, [own] = await world.vault(world.bearer("token-of-tenant-a"))
    theirs, [foreign] = await world.vault(
        world.bearer("token-of-tenant-b", mcp_server_url="https://b.example/mcp"), client=world.stranger
    )
    kv = world.served.stack.kv_store
    foreign_record = await kv.get(f"b/vault_credential/{theirs}/{foreign.id}")
    own_record = await kv.get(f"a/vault_credential/{mine}/{own.id}")
    assert foreign_record is not None
    assert own_record is not None
    await kv.put(f"a/vault_credential/{mine}/{own.id}", foreign_record.value)
    assert "No credential" in (await world.use_tool(mine, credential_id=own.id))[1]
    other_url = foreign_record.value.replace(b"https://b.example/mcp", world.guarded.mcp_url.encode().ljust(21))
    moved = own_record.value.replace(world.guarded.mcp_url.encode(), world.guarded.mcp_url.encode()[:-1] + b"q")
    assert moved != own_record.value
    for value in (other_url, moved):
        await kv.put(f"a/vault_credential/{mine}/{own.id}", value)
        await world.use_tool(mine)
    assert {token for token in world.guarded.tokens if token is not None} == set()
    await kv.put(f"a/vault_credential/{mine}/broken", b"no record")
    await kv.put(f"a/vault_credential/{mine}/{own.id}", own_record.value)
    assert (await world.use_tool(mine))[1].startswith("I know")
