"""The Agents API with the ids of another tenant, and with damaged records: every route, and every type of record."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from stack.http.route import Route
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES
from tests.support.damage import DAMAGES, damaged_bytes, read_stored, stored_values, write_stored
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.client import TLS, sdk_client
from tests.support.sdk.environments import MORE, PYTHON, hosted, reach_status, shell
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import rest
from tests.support.servers.serving import serving

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
ROUTES: Final = [route for route in (*API_ROUTES, *EXTENSION_ROUTES) if route.path.startswith(("/agents", "/vaults"))]
AGENT: Json = {"model": "scripted", "multi_agent": {"enabled": True}}
MESSAGE: Json = {"role": "user", "content": [{"type": "input_text", "text": play()}]}
BEARER: Json = {"type": "static_bearer", "token": "t", "mcp_server_url": "https://mcp.example/mcp"}
ONCE: Json = {"type": "once", "run_at": 4_000_000_000, "name": "n"}
BODIES: dict[str, Json] = {
    "/agents/{agent_id}": {"name": "taken"},
    "/agents/sessions/{session_id}": {"metadata": {"taken": "yes"}},
    "/agents/sessions/{session_id}/events": {"events": [{"type": "agent.session.input.message", "input": [MESSAGE]}]},
    "/agents/automations/{automation_id}": {"name": "taken"},
    "/agents/environments/templates/{template_id}": {"name": "taken"},
    "/agents/environments/{environment_id}/files": {"type": "inline", "path": "/workspace/taken", "data": "aGk="},
    "/vaults/{vault_id}": {"name": "taken"},
    "/vaults/{vault_id}/credentials": {"name": "taken", "auth": BEARER},
    "/vaults/{vault_id}/credentials/{credential_id}": {"auth": {"type": "static_bearer", "token": "taken"}},
}
SUBAGENT_TURN: Final = "/agents/sessions/{session_id}/subagents/{subagent_id}/turns/{turn_id}"
_ID: Final = re.compile(r"(?<![a-z])(?:[a-z]+[_-])*[0-9a-f]{16,}(?:\.[a-z]+_[0-9a-f]+)?|(?<=/)\d{3,}(?=/|$)")


@dataclass
class World:
    """A server with one of everything that the Agents API has for each of two tenants, and the ids of these."""

    url: str
    client: httpx.AsyncClient
    database: Path
    ids: dict[str, dict[str, str]]

    async def ask(self, tenant: str, method: str, path: str, body: Json | None = None) -> tuple[int, Any]:
        """The status and the answer of a request, without what a stream has after its beginning."""
        headers = {"Authorization": f"Bearer key-of-{tenant}", "OpenAI-Beta": "agents=v1"}
        async with self.client.stream(method, f"{self.url}/v1{path}", headers=headers, json=body) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return answer.status_code, ""
            text = await answer.aread()
        try:
            return answer.status_code, json.loads(text)
        except ValueError:
            return answer.status_code, text

    async def read_all(self, tenant: str) -> dict[str, tuple[int, str]]:
        """The status and the code of each route that reads something of a tenant's own."""
        answers: dict[str, tuple[int, str]] = {}
        for route in ROUTES:
            if route.method == "GET":
                status, answer = await self.ask(tenant, "GET", fill(route, self.ids[tenant]))
                answers[route.path] = status, "" if status == 200 else answer["error"]["code"]
        return answers


def fill(route: Route, ids: dict[str, str]) -> str:
    """The path of a route with ids."""
    return route.path.format(**ids)


async def populate(url: str, tenant: str) -> dict[str, str]:
    """Create one of everything; return the ids by the names that routes have for them."""
    async with sdk_client(url, f"key-of-{tenant}") as client:
        api: Any = client.beta.agents
        ids = {"agent_id": (await api.create(**AGENT)).id}
        vault = await api.vaults.create(name="v")
        ids["vault_id"] = vault.id
        ids["credential_id"] = (await api.vaults.credentials.create(vault.id, name="c", auth=BEARER)).id
        ids["template_id"] = (await api.environments.templates.create(name="t")).id
        child = call("create_subagent", json.dumps({"task": play([shell("echo x > outputs/f")])}), id="c1")
        turns = play([child], [call("wait_for_subagents", "{}", id="c2")], [shell("echo y > outputs/g", id="c3")])
        session = await api.sessions.create(
            agent=AGENT, environment=hosted(env={"A": "b"}), input=turns, vault_ids=[vault.id]
        )
        await rest(client, session.id)
        ids |= {"session_id": session.id, "environment_id": session.environment.id}
        for name, listing in (("turn", api.sessions.turns), ("subagent", api.sessions.subagents)):
            ids[f"{name}_id"] = (await listing.list(session.id)).data[0].id
        ids["artifact_id"] = (await api.sessions.artifacts.list(session.id)).data[0].id
        early = await api.environments.create(environment=hosted(), vault_ids=[vault.id])
        await reach_status(client, early.id, "ready")
        ids["early_id"] = early.id
        target = {"type": "response", "request": {"model": "scripted", "input": play()}}
        automation = await api.automations.create(**ONCE, target=target)
        ids["automation_id"] = automation.id
        ids["invocation_id"] = (await api.automations.invocations.create(automation.id)).id
        return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    database = tmp_path_factory.mktemp("agents") / "store.db"
    async with (
        serving(
            MODEL,
            kv_store={"provider": "sqlite", "path": str(database), "survives_power_loss": False},
            tool_runtime=PYTHON,
            server={"api_keys": KEYS},
            more={**MORE, "vaults": {"provider": "kv", "keys": ["a key of the run config, of 32 characters"]}},
        ) as served,
        httpx.AsyncClient(trust_env=False, verify=TLS, timeout=20) as client,
    ):
        yield World(served.url, client, database, {each: await populate(served.url, each) for each in "ab"})


def values_of(world: World, tenant: str) -> dict[str, bytes]:
    """The stored values of a tenant's objects."""
    return {key: value for key, value in stored_values(world.database).items() if key.startswith(f"{tenant}/")}


async def test_no_route_finds_what_another_tenant_has(world: World) -> None:
    before = values_of(world, "a")
    names = set[str]()
    for route in ROUTES:
        if "{" not in route.path:
            continue
        names |= {*re.findall(r"\{(\w+)\}", route.path)}
        body = BODIES.get(route.path) if route.body is not None else None
        assert (body is None) == (route.body is None), route.path
        status, answer = await world.ask("b", route.method, fill(route, world.ids["a"]), body)
        assert (status, answer["error"]["code"]) == (404, "not_found_error"), (route, answer)
    assert names <= {*world.ids["a"]}
    assert values_of(world, "a") == before


async def test_no_part_of_an_object_is_found_below_an_object_of_the_stranger(world: World) -> None:
    """The first id of a path is the stranger's own, the others are foreign."""
    before = values_of(world, "a")
    for route in ROUTES:
        first, *others = re.findall(r"\{(\w+)\}", route.path) or [""]
        if others:
            ids = {**world.ids["a"], first: world.ids["b"][first]}
            status, answer = await world.ask("b", route.method, fill(route, ids), BODIES.get(route.path))
            assert (status, answer["error"]["code"]) == (404, "not_found_error"), (route, answer)
    assert values_of(world, "a") == before


async def test_no_request_and_no_cursor_names_what_another_tenant_has(world: World) -> None:
    foreign, before = world.ids["a"], values_of(world, "a")
    session: Json = {"agent": AGENT, "environment": {"type": "none"}, "input": play()}
    target: Json = {"type": "new_session", "agent": AGENT, "environment": {"type": "none"}, "input": [MESSAGE]}
    existing = {"type": "existing_session", "session_id": foreign["session_id"], "instructions": "x"}
    template = hosted(environment_template_id=foreign["template_id"])
    for path, body in (
        ("/agents/sessions", {**session, "agent": None, "agent_id": foreign["agent_id"]}),
        ("/agents/sessions", {**session, "vault_ids": [foreign["vault_id"]]}),
        ("/agents/sessions", {**session, "environment": hosted(environment_id=foreign["early_id"])}),
        ("/agents/sessions", {**session, "environment": template}),
        ("/agents/environments", {"environment": template}),
        ("/agents/environments", {"environment": hosted(), "vault_ids": [foreign["vault_id"]]}),
        ("/agents/automations", {**ONCE, "target": existing}),
        ("/agents/automations", {**ONCE, "target": {**target, "agent": None, "agent_id": foreign["agent_id"]}}),
        ("/agents/automations", {**ONCE, "target": {**target, "vault_ids": [foreign["vault_id"]]}}),
        ("/agents/automations", {**ONCE, "target": {**target, "environment": template}}),
        ("/responses", {"model": f"agent/{foreign['agent_id']}", "input": "hi"}),
    ):
        status, answer = await world.ask("b", "POST", path, body)
        assert status in (400, 404), (path, body, answer)
    for route in ROUTES:
        if route.method == "GET" and route.query is not None and "after" in route.query.model_fields:
            for after in foreign.values():
                path = f"{fill(route, world.ids['b'])}?after={after}"
                status, answer = await world.ask("b", "GET", path)
                assert status in (400, 404), (path, answer)
    for query in (f"agent_id={foreign['agent_id']}", f"session_id={foreign['session_id']}"):
        for path in ("/agents/sessions", "/agents/automations"):
            status, answer = await world.ask("b", "GET", f"{path}?{query}")
            assert status in (400, 404) or not {each["id"] for each in answer["data"]} & {*foreign.values()}
    assert values_of(world, "a") == before


def families_of(world: World, tenant: str) -> dict[str, list[str]]:
    """The keys of the Agents API's records of a tenant, by their types."""
    families: dict[str, list[str]] = defaultdict(list)
    for key in values_of(world, tenant):
        family = _ID.sub("ID", key)
        if family.startswith((f"{tenant}/agent", f"{tenant}/automation", f"{tenant}/vault", f"{tenant}/cred")):
            families[family].append(key)
    return families


FIRST_DAMAGES: Final = [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, len(DAMAGES)))]
"""Which damage the first type of record has. The next one has the next damage: all have all in the long run."""


@pytest.mark.parametrize("first_damage", FIRST_DAMAGES)
async def test_a_damaged_record_is_an_error_that_says_so_and_stops_its_owner_alone(
    world: World, first_damage: int, caplog: pytest.LogCaptureFixture
) -> None:
    families = families_of(world, "a")
    assert len(families) > 15, sorted(families)
    own, whole = await world.read_all("a"), await world.read_all("b")
    # the turn is one of the session, and not of its subagent
    assert [path for path, (status, _) in own.items() if status != 200] == [SUBAGENT_TURN, f"{SUBAGENT_TURN}/items"]
    all_originals, all_damaged = dict[str, bytes](), dict[str, bytes]()
    for number, (family, keys) in enumerate(sorted(families.items()), first_damage):
        damage = DAMAGES[number % len(DAMAGES)]
        originals = {key: value for key in keys if (value := read_stored(world.database, key)) is not None}
        damaged = {key: damaged_bytes(value, damage) for key, value in originals.items()}
        all_originals |= originals
        all_damaged |= damaged
        write_stored(world.database, damaged)
        try:
            answers = await world.read_all("a")
        finally:
            write_stored(world.database, originals)
        wrong = {
            path: answer
            for path, answer in answers.items()
            if answer[0] not in (200, 404) and answer not in ((500, "storage_corrupt"), (400, "invalid_value"))
        }
        assert wrong == {}, family
        assert [record.getMessage() for record in caplog.records if record.exc_info] == [], family
    assert await world.read_all("a") == own
    write_stored(world.database, all_damaged)
    try:
        assert await world.read_all("b") == whole
    finally:
        write_stored(world.database, all_originals)


@pytest.mark.parametrize("first_damage", FIRST_DAMAGES)
async def test_what_is_damaged_can_be_deleted(world: World, first_damage: int) -> None:
    ids = await populate(world.url, "a")
    for number, (family, path) in enumerate(
        (
            ("a/agent/ID", "/agents/{agent_id}"),
            ("a/automation/ID", "/agents/automations/{automation_id}"),
            ("a/agent_template/ID", "/agents/environments/templates/{template_id}"),
            ("a/agent_session/ID", "/agents/sessions/{session_id}"),
        ),
        first_damage,
    ):
        keys = [key for key in families_of(world, "a")[family] if any(key.endswith(each) for each in ids.values())]
        assert keys, family
        originals = {key: value for key in keys if (value := read_stored(world.database, key)) is not None}
        damage = DAMAGES[number % len(DAMAGES)]
        write_stored(world.database, {key: damaged_bytes(value, damage) for key, value in originals.items()})
        status, answer = await world.ask("a", "DELETE", path.format(**ids))
        assert status == 200, answer
        assert all(read_stored(world.database, key) is None for key in keys), family
