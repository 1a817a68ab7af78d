"""The page distributions/team, with its run config, its programs and a real identity provider."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import AuthenticationError, RateLimitError

from apis.accounts.directory import KeyOptions
from stack.config import load_config
from tests.support.sdk.client import sdk_client
from tests.support.servers.practice_provider import browser_of, practice_provider
from tests.support.servers.serving import serving
from tests.support.servers.stack_process import STACK, running_stack
from tests.support.tenants.accounts import stored_organization
from tests.test_documents import ROOT, blocks, named_block, output_of

PAGE = "distributions/team/README.md"
CONFIG = ROOT / "distributions/team/teams.yaml"
COMPOSE = ROOT / "distributions/team/compose.yaml"


def program(name: str, url: str = "") -> str:
    """A program of the page, for the server at the URL."""
    text = named_block(PAGE, "python", f"# {name}")
    return text.replace("http://127.0.0.1:8321", url)


async def run_program(name: str, url: str, **environment: str) -> str:
    """The output of a program of the page, in a process of its own."""
    return (await output_of((sys.executable, "-c", program(name, url)), None, **environment)).strip()


async def sign_in(person: str, issuer: str) -> str:
    environment = {"OIDC_ISSUER": issuer, "BROWSER": browser_of(person)}
    return await run_program("sign_in.py", "", **environment)


def run_here(name: str, url: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """Run a program of the page in this process, which has imported the SDK already."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    exec(compile(program(name, url), name, "exec"), {"__name__": "__main__"})


async def test_people_of_two_teams_sign_in_and_spend_the_budget_of_their_own_team(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with practice_provider(program("identity_provider.py")) as issuer:
        loaded = await asyncio.to_thread(load_config, str(CONFIG), env={"OIDC_ISSUER": issuer})
        config = loaded.model_dump(exclude_unset=True)
        sections = {"more": {"accounts": config["accounts"]}, "server": {"console": config["server"]["console"]}}
        ada, ben = await asyncio.gather(sign_in("ada", issuer), sign_in("ben", issuer))
        async with serving(**sections) as served, sdk_client(served.url, ada) as client:
            with pytest.raises(AuthenticationError):
                await client.models.list()
            directory = stored_organization(served.stack.accounts).directory
            for team in ("red", "blue"):
                await directory.create_project(team, project_id=team)
            root = await directory.create_key(None, KeyOptions("ops"))
            await asyncio.to_thread(run_here, "budgets.py", served.url, monkeypatch, ADMIN_KEY=root.value)
            await asyncio.sleep(1)  # a limit holds within a second
            for token in (ada, ben):
                await asyncio.to_thread(run_here, "ask.py", served.url, monkeypatch, TOKEN=token)
            assert capsys.readouterr().out == "Who are you?\n" * 2
            create: Any = client.responses.create
            long: dict[str, Any] = {"model": "scripted", "input": "Go on.", "max_output_tokens": 5000}
            assert (await create(**long)).output_text
            with pytest.raises(RateLimitError) as refusal:
                await client.with_options(api_key=ben).responses.create(**long)
            assert refusal.value.code == "insufficient_quota"
            with pytest.raises(AuthenticationError):
                await create(**long, extra_headers={"Authorization": f"Bearer {ada[:-4]}AAAA"})


async def command(text: str, cwd: Path, environment: Mapping[str, str]) -> str:
    text = text.replace("distributions/team/teams.yaml", "teams.yaml").replace("stack ", f"{STACK} ", 1)
    return await output_of(("bash", "-c", text), cwd=cwd, **environment)


@pytest.mark.long
async def test_the_commands_of_the_page_work_as_they_stand(tmp_path: Path) -> None:
    """The model aside: it is the scripted one."""
    config = yaml.safe_load(CONFIG.read_text())
    (tmp_path / "teams.yaml").write_text(yaml.safe_dump({**config, "inference": {"provider": "scripted"}}))
    lines = named_block(PAGE, "sh", "stack keys create").splitlines()
    async with practice_provider(program("identity_provider.py")) as issuer:
        environment = {"OIDC_ISSUER": issuer, "PATH": f"{STACK.parent}:{os.environ['PATH']}"}
        export, *keys, run = lines
        admin_key = (await command(f"{export}; echo $ADMIN_KEY", tmp_path, environment)).strip()
        for line in keys:
            await command(line, tmp_path, environment)
        assert run == "stack run distributions/team/teams.yaml"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OIDC_ISSUER", issuer)
            async with running_stack("teams.yaml", cwd=tmp_path) as (url, _):
                await run_program("budgets.py", url, ADMIN_KEY=admin_key)
                token = await sign_in("ben", issuer)
                assert await run_program("ask.py", url, TOKEN=token) == "Who are you?"
                page = await output_of(("curl", "-s", f"{url}/"))
                assert "<title>" in page
        usage = await command("stack usage distributions/team/teams.yaml", tmp_path, environment)
    assert re.search(r"blue +oidc:ben +scripted +1 ", usage), usage


def test_the_compose_file_sets_what_the_run_config_reads() -> None:
    """It is laid over the file of distributions/local, whose image and volumes it has."""
    read = set(re.findall(r"\$\{env\.([A-Z_]+)", CONFIG.read_text()))
    (service,) = yaml.safe_load(COMPOSE.read_text())["services"].values()
    local = yaml.safe_load((ROOT / "distributions/local/compose.yaml").read_text())["services"]["stack"]
    assert read <= {*service["environment"], *local["environment"]}
    assert set(service["environment"]) <= read
    (mount,) = service["volumes"]
    source, target, _ = mount.split(":")
    assert (ROOT / "distributions/local" / source).resolve() == CONFIG
    assert target in (ROOT / "distributions/local/Containerfile").read_text()
    commands = "\n".join(blocks(PAGE, "sh"))
    assert "-f distributions/local/compose.yaml -f distributions/team/compose.yaml" in commands
