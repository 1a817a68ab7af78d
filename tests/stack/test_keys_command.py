"""The command `stack keys`: the first administrator's key, keys of projects, and servers that run meanwhile."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from openai import AsyncOpenAI, AuthenticationError
from typer.testing import CliRunner

from apis.accounts.accounts import MAX_KEY_AGE_S
from stack.cli import app
from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import serving


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


SCOPES = ("--scope", "read", "--scope", "model:scripted")


async def invoke_meanwhile(*arguments: str) -> tuple[int, str, str]:
    return await asyncio.to_thread(invoke, *arguments)


async def wait_for_usage(file: str, text: str) -> None:
    """Wait until the command shows a row with the text: a server writes what was used within a second or so."""
    async with asyncio.timeout(10):
        while text not in (await asyncio.to_thread(CliRunner().invoke, app, ["usage", file, "--csv"])).stdout:
            pass


async def use_for_ever(client: AsyncOpenAI) -> None:
    while True:
        await client.models.list()


@pytest.fixture
def run_config(tmp_path: Path) -> Path:
    sections = {
        "accounts": {"provider": "stored"},
        "inference": {"provider": "scripted"},
        "kv_store": {"provider": "sqlite", "path": str(tmp_path / "stack.db")},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


async def test_keys_of_the_command_line_work_on_a_server_that_runs(run_config: Path) -> None:
    kv_store = yaml.safe_load(run_config.read_text())["kv_store"]
    file = str(run_config)
    code, printed, _ = await invoke_meanwhile("create", file, "--admin", "--name", "ops")
    assert code == 0
    admin = printed.splitlines()[0]
    async with serving(kv_store=kv_store, more={"accounts": {"provider": "stored"}}) as served:
        organization = served.client.with_options(admin_api_key=admin).admin.organization
        assert [project.id async for project in organization.projects.list()] == []
        code, printed, _ = await invoke_meanwhile(
            "create", file, "--project", "alpha", "--scope", "read", "--scope", "model:scripted"
        )
        assert code == 0
        value = printed.splitlines()[0]
        assert [project.id async for project in organization.projects.list()] == ["alpha"]
        _, printed, _ = await invoke_meanwhile("create", file, "--project", "alpha", "--name", "writer")
        async with sdk_client(served.url, value) as client, sdk_client(served.url, printed.splitlines()[0]) as writer:
            await client.models.list()
            used = (await writer.responses.create(model="scripted", input="hi")).usage
            assert used is not None
        await wait_for_usage(file, f",scripted,1,{used.input_tokens},0,{used.output_tokens},0,")
        rows = {
            row["project_id"]: row for row in reversed(json.loads((await invoke_meanwhile("list", file, "--json"))[1]))
        }
        assert rows["alpha"]["scopes"] == ["read", "model:scripted"]
        assert rows["alpha"]["last_used_at"] is not None
        assert rows[None]["name"] == "ops"
        _, table, _ = await invoke_meanwhile("list", file)
        assert value not in table
        assert admin not in table
        assert (await invoke_meanwhile("revoke", file, rows["alpha"]["id"]))[0] == 0
        async with sdk_client(served.url, value) as client, asyncio.timeout(MAX_KEY_AGE_S + 1):
            with pytest.raises(AuthenticationError):
                await use_for_ever(client)


def test_mistakes_are_named(run_config: Path, tmp_path: Path) -> None:
    file = str(run_config)
    assert invoke("create", file)[0] == 2
    assert invoke("create", file, "--admin", "--project", "alpha")[0] == 2
    assert invoke("create", file, "--admin", "--scope", "read")[0] == 2
    for arguments, message in (
        (("create", file, "--project", "a/b"), "A project's id has 1 to 64"),
        (("create", file, "--project", "a", "--scope", "admin"), "as an admin API key"),
        (("revoke", file, "key_none"), "There is no key key_none"),
    ):
        code, _, errors = invoke(*arguments)
        assert (code, message in errors) == (1, True), errors
    for change, message in (
        ({"accounts": {"provider": "config"}}, "accounts: {provider: stored}"),
        ({"kv_store": {"provider": "memory"}}, "memory ends with its process"),
    ):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump({**yaml.safe_load(run_config.read_text()), **change}))
        code, _, errors = invoke("list", str(other))
        assert (code, message in errors) == (1, True), errors
