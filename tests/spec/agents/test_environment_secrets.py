"""Secrets of vaults in environments of sessions, in the real sandbox: who gets which, and what is known inside."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from openai import AsyncOpenAI

from providers.vaults.records import credential_prefix
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.environments import (
    MORE,
    PYTHON,
    commands_of,
    hosted,
    reach_status,
    read_to_rest,
    shell,
    workspace_id,
)
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.sessions import list_items, message, rest, send
from tests.support.servers.container_proxy import server_context
from tests.support.servers.fetcher_hosts import SITE, Site
from tests.support.servers.forked_process import STACK_PROGRAM, ForkedProcess, forked_process
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

Json = dict[str, Any]
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
SECRET = "sk-0123456789-vault-secret"
ROTATED = "sk-9876543210-vault-secret"
NETWORK: Json = {"access": "restricted", "allowed_domains": [SITE]}
KEYS = [{"key": "key-of-a", "tenant": "a"}, {"key": "key-of-b", "tenant": "b"}]
VAULTS = {"provider": "kv", "keys": ["a key of the run config, of 32 characters"]}
LIMITED: Json = {"type": "limited", "allowed_hosts": [SITE]}
PRINT_ALL = """
env
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'
grep -rs "sk-0123456789" /etc /mnt
"""


class World:
    """A server, a client of it, and a site over TLS that containers may reach."""

    def __init__(self, served: Served, site: Site, folder: Path, client: AsyncOpenAI) -> None:
        self.served = served
        self.site = site
        self.folder = folder
        self.client = client
        self.vaults: Any = client.beta.agents.vaults

    async def vault(self, name: str = "API_KEY", networking: Json = LIMITED) -> tuple[str, str]:
        """The ids of a new vault and of the one credential in it."""
        vault = await self.vaults.create()
        return vault.id, await self.add(vault.id, name, networking)

    async def add(self, vault_id: str, name: str = "API_KEY", networking: Json = LIMITED) -> str:
        auth = {"type": "environment_variable", "secret_name": name, "secret_value": SECRET, "networking": networking}
        return (await self.vaults.credentials.create(vault_id, name="n", auth=auth)).id

    def use(self, name: str = "API_KEY") -> str:
        """A command that sends a variable to the site, and prints what it knows."""
        program = (
            "import os, urllib.request as r; "
            f"key = os.environ.get('{name}', 'none'); "
            f"print(key, r.urlopen(r.Request('{self.site.url}/echo', headers={{'X-Key': key}})).read().decode())"
        )
        return f'python3 -c "{program}"'

    @property
    def sent(self) -> str:
        """The key that the site has got last."""
        return self.site.requests[-1][2]["X-Key"]

    async def begin(self, *commands: str, vault_ids: list[str], **environment: Any) -> Any:
        """A session at rest whose first turn has run these commands."""
        configuration = environment if "environment_id" in environment else {"network": NETWORK, **environment}
        sessions: Any = self.client.beta.agents.sessions
        session = await sessions.create(
            agent={"model": "scripted"},
            environment=hosted(**configuration),
            input=play([shell(*commands)]),
            vault_ids=vault_ids,
        )
        return await rest(self.client, session.id)

    async def next_turn(self, session: Any, *commands: str) -> str:
        """The output of the last command of another turn."""
        await send(self.client, session.id, message(play([shell(*commands, id=f"c{len(self.site.requests)}")])))
        await rest(self.client, session.id)
        return await self.output(session)

    async def output(self, session: Any) -> str:
        """The output of the last command of a session."""
        output, _, _ = commands_of(await list_items(self.client, session.id))[-1]
        return output or ""

    async def lose_workspace(self, session: Any) -> None:
        """End the workspace of a session, if there is one."""
        with suppress(openai.NotFoundError):
            await self.client.containers.delete(workspace_id(session))

    async def all_kept_text(self) -> str:
        files = [path for path in self.folder.rglob("*.db*") if path.is_file()]
        return b"".join([await asyncio.to_thread(path.read_bytes) for path in files]).decode(errors="replace")


async def echo(request: web.Request) -> web.Response:
    return web.json_response({**request.headers})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    folder = tmp_path_factory.mktemp("secrets")
    context, trusted = await server_context(folder, "localhost")
    await asyncio.to_thread((folder / "trusted.pem").write_bytes, trusted)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(folder / "trusted.pem"))
        async with Site(context) as site, AsyncExitStack() as stacks:
            site.pages["/echo"] = echo
            served = await stacks.enter_async_context(serving(MODEL, **build_sections(site, folder)))
            client = await stacks.enter_async_context(sdk_client(served.url, "key-of-a"))
            yield World(served, site, folder, client)


def build_sections(site: Site, folder: Path) -> Json:
    """The sections of the servers' run config."""
    egress = {"allowed_hosts": [f"{SITE}:{site.port}"], "allowed_private_networks": [f"{SITE}/32"]}
    return {
        "kv_store": {"provider": "sqlite", "path": str(folder / "store.db")},
        "tool_runtime": {**PYTHON, "timeout_s": 60, "egress": egress},
        "server": {"api_keys": KEYS},
        "more": {**MORE, "vaults": VAULTS},
    }


async def test_a_secret_of_a_vault_is_sent_from_a_session_and_never_known_inside(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    vault_id, _ = await world.vault()
    session = await world.begin(f"{world.use()}; {PRINT_ALL}", vault_ids=[vault_id])
    assert world.sent == SECRET
    output = await world.output(session)
    assert output.startswith("placeholder-")
    assert "API_KEY=placeholder-" in output
    events = [event.to_dict() for event in await read_to_rest(world.client, session.id)]
    visible = f"{output} {session.to_json()} {events} {caplog.text} {await world.all_kept_text()}"
    assert (session.id in visible, SECRET in visible) == (True, False)


async def test_a_credential_that_is_rotated_or_deleted_counts_with_the_next_turn(world: World) -> None:
    vault_id, credential_id = await world.vault()
    session = await world.begin(world.use(), vault_ids=[vault_id])
    rotated = {"type": "environment_variable", "secret_value": ROTATED}
    await world.vaults.credentials.update(credential_id, vault_id=vault_id, auth=rotated)
    before = await world.output(session)
    after = await world.next_turn(session, world.use())
    assert world.sent == ROTATED
    assert after.split()[0] == before.split()[0], "the placeholder stays"
    await world.vaults.credentials.delete(credential_id, vault_id=vault_id)
    await world.next_turn(session, world.use())
    assert world.sent.startswith("placeholder-")
    await world.add(vault_id)
    await world.next_turn(session, world.use())
    assert world.sent == SECRET
    await world.vaults.delete(vault_id)
    await world.next_turn(session, world.use())
    assert world.sent.startswith("placeholder-")


async def test_a_credential_that_comes_later_is_there_with_the_next_turn(world: World) -> None:
    vault = await world.vaults.create()
    session = await world.begin(world.use(), vault_ids=[vault.id])
    assert world.sent == "none"
    await world.add(vault.id)
    await world.next_turn(session, world.use())
    assert world.sent == SECRET


async def test_an_environment_that_was_prepared_gets_them_with_its_session(world: World) -> None:
    environments: Any = world.client.beta.agents.environments
    prepared = await environments.create(
        environment=hosted(network=NETWORK, setup_commands=[{"command": "env > seen"}])
    )
    await reach_status(world.client, prepared.id, "ready")
    vault_id, _ = await world.vault()
    session = await world.begin(f"{world.use()}; cat seen", vault_ids=[vault_id], environment_id=prepared.id)
    assert world.sent == SECRET
    assert "API_KEY=" not in await world.output(session)


async def test_setup_commands_of_a_session_have_them(world: World) -> None:
    vault_id, _ = await world.vault()
    await world.begin("true", vault_ids=[vault_id], setup_commands=[{"command": world.use()}])
    assert world.sent == SECRET


async def test_a_prepared_environment_has_vaults_of_its_own_besides_those_of_its_session(world: World) -> None:
    environments: Any = world.client.beta.agents.environments
    (own_id, _), (session_id, _) = await world.vault("OWN_KEY"), await world.vault("SESSION_KEY")
    shared_id = await world.add(own_id, "SHARED_KEY")
    await world.add(session_id, "SHARED_KEY")
    rotated = {"type": "environment_variable", "secret_value": ROTATED}
    await world.vaults.credentials.update(shared_id, vault_id=own_id, auth=rotated)
    setup = [{"command": world.use("OWN_KEY")}]
    prepared = await environments.create(environment=hosted(network=NETWORK, setup_commands=setup), vault_ids=[own_id])
    await reach_status(world.client, prepared.id, "ready")
    assert world.sent == SECRET
    names = ("OWN_KEY", "SESSION_KEY", "SHARED_KEY")
    session = await world.begin("; ".join(map(world.use, names)), vault_ids=[session_id], environment_id=prepared.id)
    assert [request[2]["X-Key"] for request in world.site.requests[-3:]] == [SECRET] * 3
    assert session.vault_ids == [session_id]
    await world.vaults.delete(session_id)
    await world.next_turn(session, world.use("SHARED_KEY"))
    assert world.sent == ROTATED
    await world.lose_workspace(session)
    await world.next_turn(session, world.use("OWN_KEY"))
    assert world.sent == SECRET


async def test_an_environment_has_no_vault_that_its_tenant_has_not(world: World) -> None:
    vault_id, _ = await world.vault()
    async with sdk_client(world.served.url, "key-of-b") as stranger:
        environments: Any = stranger.beta.agents.environments
        with pytest.raises(openai.NotFoundError) as refusal:
            await environments.create(environment=hosted(), vault_ids=[vault_id])
        assert refusal.value.param == "vault_ids[0]"
        assert (await environments.list()).data == []


async def test_a_host_that_the_credential_does_not_name_gets_the_placeholder(world: World) -> None:
    elsewhere = {"type": "limited", "allowed_hosts": ["elsewhere.example"]}
    vault_id, _ = await world.vault("FIRST")
    await world.add(vault_id, "SECOND", elsewhere)
    session = await world.begin(world.use("FIRST"), world.use("SECOND"), vault_ids=[vault_id])
    assert sorted(request[2]["X-Key"] for request in world.site.requests[-2:]) == ["none", SECRET]
    allowed = {"access": "disabled"}
    session = await world.begin("env", vault_ids=[vault_id], network=allowed)
    assert "FIRST" not in await world.output(session)


async def test_a_variable_of_the_environment_goes_first(world: World) -> None:
    vault_id, _ = await world.vault()
    session = await world.begin(world.use(), vault_ids=[vault_id], env={"API_KEY": "own-key"})
    assert world.sent == "own-key"
    secrets = [{"domain": SITE, "name": "API_KEY", "value": ROTATED}]
    session = await world.begin(world.use(), vault_ids=[vault_id], network={**NETWORK, "domain_secrets": secrets})
    assert world.sent == ROTATED
    await world.next_turn(session, world.use())
    assert world.sent == ROTATED


async def test_a_session_without_the_vault_has_nothing_of_it(world: World) -> None:
    await world.vault()
    await world.begin(world.use(), vault_ids=[])
    assert world.sent == "none"


async def test_another_tenants_vault_is_refused_by_its_field(world: World) -> None:
    own, _ = await world.vault()
    async with sdk_client(world.served.url, "key-of-b") as stranger:
        foreign = await stranger.beta.agents.vaults.create()
    with pytest.raises(openai.NotFoundError) as caught:
        await world.begin("true", vault_ids=[own, foreign.id])
    assert caught.value.param == "vault_ids[1]"


async def test_subagents_have_what_their_session_has(world: World) -> None:
    vault_id, _ = await world.vault()
    for vault_ids, sent in (([vault_id], SECRET), ([], "none")):
        task = json.dumps({"task": play([shell(world.use())])})
        turns = [call("create_subagent", task, id="s")], [call("wait_for_subagents", "{}", id="w")]
        sessions: Any = world.client.beta.agents.sessions
        session = await sessions.create(
            agent={"model": "scripted", "multi_agent": {"enabled": True}},
            environment=hosted(network=NETWORK),
            input=play(*turns),
            vault_ids=vault_ids,
        )
        count = len(world.site.requests)
        assert (await rest(world.client, session.id)).status == "idle"
        assert (len(world.site.requests) - count, world.sent) == (1, sent)


async def test_an_automation_and_a_template_give_theirs_to_environments_and_show_none(world: World) -> None:
    values = "value-of-the-variable", "sk-value-of-the-domain"
    secrets = [{"domain": SITE, "name": "API_KEY", "value": values[1]}]
    configuration: Json = {"env": {"PLAIN": values[0]}, "network": {**NETWORK, "domain_secrets": secrets}}
    agents: Any = world.client.beta.agents
    template = await agents.environments.templates.create(**configuration)
    for fields in ({"environment_template_id": template.id}, configuration):
        content = [{"type": "input_text", "text": play([shell(world.use(), "test $PLAIN")])}]
        target = {
            "type": "new_session",
            "environment": hosted(**fields),
            "agent": {"model": "scripted"},
            "input": [{"role": "user", "content": content}],
        }
        automation = await agents.automations.create(type="once", name="n", run_at=2**33, target=target)
        invocation = await agents.automations.invocations.create(automation.id)

        async def is_delivered() -> bool:
            nonlocal invocation
            invocation = await agents.automations.invocations.retrieve(invocation.id, automation_id=automation.id)  # noqa: B023 - it ends in the loop
            return invocation.status == "completed"

        await until(is_delivered)
        session = await rest(world.client, invocation.session_id)
        assert world.sent == values[1]
        assert [code for _, code, _ in commands_of(await list_items(world.client, session.id))] == [0, 0]
        listed = [each async for each in agents.automations.list()]
        visible = repr([template, automation, invocation, session, listed]) + await world.all_kept_text()
        assert [value for value in values if value in visible] == []


async def test_a_credential_that_cannot_be_decrypted_fails_the_turn_and_not_the_environment(world: World) -> None:
    vault_id, credential_id = await world.vault()
    session = await world.begin(world.use(), vault_ids=[vault_id])
    kv = world.served.stack.kv_store
    key = f"{credential_prefix('a', vault_id)}{credential_id}"
    entry = await kv.get(key)
    assert entry is not None
    await kv.put(key, entry.value.replace(b'"allowed_hosts"', b'"allowed_hostz"'))
    for _ in range(2):  # with its workspace, and without
        await send(world.client, session.id, message(play([shell("true", id="c2")])))
        failed = await rest(world.client, session.id)
        assert failed.status == "failed"
        assert credential_id in str(failed.error)
        await world.lose_workspace(session)
    await world.vaults.credentials.delete(credential_id, vault_id=vault_id)
    assert (await world.next_turn(session, "echo on")) == "on\n"


async def test_a_workspace_that_is_restored_has_them_again(world: World) -> None:
    vault_id, _ = await world.vault()
    session = await world.begin(f"{world.use()}; echo kept > a", vault_ids=[vault_id])
    await world.lose_workspace(session)
    output = await world.next_turn(session, f"cat a; {world.use()}")
    assert output.startswith("kept\nplaceholder-")
    assert world.sent == SECRET


async def test_another_worker_has_them_again_after_a_kill(world: World, tmp_path: Path) -> None:
    sections = build_sections(world.site, tmp_path)
    more = sections.pop("more")
    config = {"inference": MODEL, **sections, **more, "server": {"api_keys": KEYS, "port": 0}}
    file = tmp_path / "config.yaml"
    await asyncio.to_thread(file.write_text, yaml.safe_dump(config))
    worlds: list[World] = []
    async with AsyncExitStack() as stacks:

        async def start() -> ForkedProcess:
            process = await stacks.enter_async_context(forked_process(STACK_PROGRAM, "run", str(file)))
            client = await stacks.enter_async_context(sdk_client(await process.listening(), "key-of-a"))
            worlds.append(World(world.served, world.site, tmp_path, client))
            return process

        first = await start()
        vault_id, _ = await worlds[0].vault()
        session = await worlds[0].begin("echo kept > a", vault_ids=[vault_id])
        first.kill()
        await first.wait()
        await start()
        await worlds[1].lose_workspace(session)  # if the process of the sandboxes has not ended with its last worker
        output = await worlds[1].next_turn(session, f"cat a; {world.use()}")
        assert output.startswith("kept\nplaceholder-")
        assert world.sent == SECRET
