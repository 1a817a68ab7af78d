"""Every example of the documents is executed, and every path and provider they name is there."""

import asyncio
import configparser
import os
import re
import shutil
import sqlite3
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from providers import PROVIDERS
from stack import __version__
from stack.cli import app
from stack.config import load_config
from stack.server_config import HttpServerConfig
from stack.wiring import wire_providers
from tests.support.sdk.client import sdk_client
from tests.support.sdk.reference_pages import render_pages
from tests.support.servers.forked_process import forked_output, forked_stack
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.stack_process import STACK, running_stack
from tests.support.waiting import until
from tests.test_vocabulary import PROSE

ROOT = Path(__file__).parent.parent
OPERATING = "distributions/docs"
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(path for top in ROOT.glob("[a-z]*") for path in top.rglob("*.md"))]
    if "node_modules" not in path.parts
)
SCRIPTED = {"inference": {"provider": "scripted"}, "kv_store": {"provider": "memory"}}
Json = dict[str, Any]
MAX_WORDS_OF_SENTENCE = 25
MAX_WORDS_OF_PAGE = 950
MAX_LINES_OF_INDEX = 60
MAX_LINES_OF_VERSION = 200


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, without the indentation of the list that they may stand in."""
    text = (ROOT / document).read_text()
    match = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, body in match]


def named_block(document: str, language: str, word: str) -> str:
    (block,) = (block for block in blocks(document, language) if word in block)
    return block


async def output_of(command: Sequence[str], cwd: Path | None = None, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=cwd, env={**os.environ, **environment}
    )
    async with asyncio.timeout(100):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


def test_the_first_command_of_the_readme_starts_a_stack_and_the_last_one_tests_it() -> None:
    run, *_, test = blocks("README.md", "sh")
    assert run.count("\n") == 1
    assert "stack run configs/local.yaml" in run
    assert test == "bash tests/run.sh --install-system\n"
    assert test.strip() in (ROOT / ".ci/run").read_text()


def test_every_file_that_names_the_version_names_the_same() -> None:
    """The package, the command line, the chart and the images of the distributions have one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "distributions/kubernetes/responses-stack/Chart.yaml").read_text())
    files = [path for path in (ROOT / "distributions").rglob("*") if path.is_file()]
    images = {tag for path in files for tag in re.findall(r"responses-stack-[a-z-]+:(\d[\w.]*)", path.read_text())}
    assert {project["version"], chart["version"], chart["appVersion"], *images} == {__version__}


def test_the_changelog_has_versions_with_what_was_added_changed_and_fixed() -> None:
    """A line for users goes under the newest version, and never under a heading of another kind."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions: list[str] = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert versions[0] == f"{__version__} (Unreleased)" or re.fullmatch(r"[\d.]+ \(\d{4}-\d\d-\d\d\)", versions[0])
    assert [version for version in versions if not re.match(r"\d+\.\d+\.\d+ \(", version)] == []
    assert set(re.findall(r"^### (.*)$", changelog, re.MULTILINE)) <= {"Added", "Changed", "Fixed"}
    assert len(changelog.partition("\n## ")[2].partition("\n## ")[0].splitlines()) <= MAX_LINES_OF_VERSION


def test_the_license_of_the_package_is_its_license_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "LICENSE").read_text()
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License\n" in text
    assert "Copyright 2026 The Responses Stack authors" in text
    for path in (ROOT / "distributions").glob("*/Containerfile"):
        assert (
            "COPY pyproject.toml README.md LICENSE ./" in path.read_text()
        )  # the build of the package reads all three


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.fixture(scope="module")
def generated_pages() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", "100")  # the width of a terminal that is none
        return render_pages()


def test_the_generated_pages_are_those_of_the_code(generated_pages: dict[str, str]) -> None:
    """`python -m tests.support.sdk.reference_pages` writes them from the errors, the refusals and the routes."""
    assert len(generated_pages) == 5
    for name, page in generated_pages.items():
        assert (ROOT / name).read_text() == page


def sentences(document: str) -> Iterator[str]:
    """Yield the sentences of the prose of a document: without its examples, and the cells of its tables one by one."""
    text = re.sub(r"^( *)```.*?^ *```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\n|\n(?=#|- |\d\. )", text):
        for part in re.split(r"[|;]", block) if block.lstrip().startswith("|") else [block]:
            yield from re.split(r"(?<=[.!?:])\s", " ".join(part.split()))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_sentence_of_the_documents_is_short_and_plain(document: str) -> None:
    long = [
        sentence
        for sentence in sentences(document)
        if len(re.findall(r"\w[\w'./-]*", sentence)) > MAX_WORDS_OF_SENTENCE
    ]
    avoided = [sentence for sentence in sentences(document) if PROSE.search(sentence)]
    assert (long, avoided) == ([], [])


@pytest.mark.parametrize("folder", ["apis", "distributions", "providers"])
def test_pages_are_short_and_their_index_links_them_all(folder: str, generated_pages: dict[str, str]) -> None:
    index = (ROOT / folder / "README.md").read_text()
    pages = sorted((ROOT / folder / "docs").glob("*.md"))
    assert len(index.splitlines()) <= MAX_LINES_OF_INDEX
    assert [page.name for page in pages if f"](docs/{page.name})" not in index] == []
    generated = [ROOT / name for name in generated_pages]
    words = {page.name: len(page.read_text().split()) for page in pages if page not in generated}
    assert {name: count for name, count in words.items() if count > MAX_WORDS_OF_PAGE} == {}


async def test_the_client_program_streams_an_answer_of_the_embedded_model(tmp_path: Path) -> None:
    program = blocks("README.md", "python")[0]
    async with running_stack(str(ROOT / "configs/local.yaml"), cwd=tmp_path) as (url, _):
        assert "http://127.0.0.1:8321" in program
        output = await forked_output(program.replace("http://127.0.0.1:8321", url))
    assert "Paris" in output


async def test_the_program_of_the_page_on_messages_prints_an_answer(tmp_path: Path) -> None:
    program, config = blocks("apis/docs/messages.md", "python")[0], blocks("apis/docs/messages.md", "yaml")[0]
    aliases = yaml.safe_load(config)["inference"]["aliases"]
    one: Json = {"provider": "scripted", "model": aliases["claude-sonnet-5-5"], "turns": [[{"text": ["Pa", "ris"]}]]}
    router: Json = {"provider": "router", "providers": {"one": one}, "aliases": aliases}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SCRIPTED, "inference": router}))
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _):
        assert "http://127.0.0.1:8321" in program
        output = await forked_output(program.replace("http://127.0.0.1:8321", url))
    assert output == "Paris"


async def test_the_program_of_the_page_on_agents_prints_an_answer(tmp_path: Path) -> None:
    turns = [[{"call": "weather", "arguments": '{"city": "Bonn"}'}], [{"text": "Yes."}]]
    assert await output_of_page("apis/docs/agents.md", turns, tmp_path) == "Yes.\n"


async def test_the_program_of_the_page_on_subagents_prints_an_answer(tmp_path: Path) -> None:
    create = {"call": "create_subagent", "arguments": '{"task": "a.py", "name": "first"}'}
    turns = [[create], [{"text": "Good."}], [{"text": "Good."}]]
    assert await output_of_page("apis/docs/subagents.md", turns, tmp_path) == "Good.\nfirst active\n"


async def test_the_program_of_the_page_on_automations_prints_an_invocation(tmp_path: Path) -> None:
    output = await output_of_page("apis/docs/automations.md", [[{"text": "Sun."}]], tmp_path)
    assert re.fullmatch(r"automation_\w+ queued\n", output)


async def output_of_page(document: str, turns: Sequence[Sequence[Json]], folder: Path) -> str:
    """Run the first program of a page against a scripted model of the name that it asks for."""
    program = blocks(document, "python")[0]
    (model,) = re.findall(r'"?model"?[=:] ?"([^"]+)"', program)
    inference: Json = {"provider": "scripted", "model": model, "turns": turns}
    (folder / "run.yaml").write_text(yaml.safe_dump({**SCRIPTED, "inference": inference}))
    async with forked_stack("run.yaml", cwd=folder) as (url, _):
        assert "http://127.0.0.1:8321" in program
        return await forked_output(program.replace("http://127.0.0.1:8321", url))


async def output_of_feature(word: str, turns: Sequence[Sequence[Json]], folder: Path, **sections: Json) -> str:
    """Run a program of the README that uses `client`, against a scripted model of the name that it asks for."""
    program = named_block("README.md", "python", word)
    (model,) = re.findall(r'model="([^"]+)"', program)
    inference: Json = {"provider": "scripted", "model": model, "turns": turns}
    (folder / "run.yaml").write_text(yaml.safe_dump({**SCRIPTED, "inference": inference, **sections}))
    async with forked_stack("run.yaml", cwd=folder) as (url, _):
        client = f"from openai import OpenAI\nclient = OpenAI(base_url='{url}/v1', api_key='none')\n"
        return await forked_output(client + program)


async def test_the_program_that_loses_a_background_stream_reads_the_rest_of_it(tmp_path: Path) -> None:
    output = await output_of_feature("background=True", [[{"text": ["A ", "report."]}]], tmp_path)
    numbers, types = zip(*(line.split() for line in output.splitlines()), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert types[-1] == "response.completed"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_the_program_with_a_tool_of_the_server_prints_its_code_and_the_answer(tmp_path: Path) -> None:
    code = {"call": "python", "arguments": '{"code": "print(2**61 - 1)"}'}
    python: Json = {"provider": "python", **SHARED_PYTHON}
    output = await output_of_feature("code_interpreter", [[code], [{"text": "Yes."}]], tmp_path, tool_runtime=python)
    assert output == "['print(2**61 - 1)'] Yes.\n"


@pytest.mark.parametrize(
    ("document", "name", "model", "answer"),
    [
        ("README.md", "shout", "shout", "HI!!"),
        ("providers/inference/gpt_oss/README.md", "hello", "next-token", "Hello!"),
    ],
)
async def test_the_example_provider_runs(document: str, name: str, model: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(named_block(document, "python", f"# {name}.py"))
    (config,) = (block for block in blocks(document, "yaml") if f"{name}:" in block or f"{name}.py:" in block)
    (tmp_path / "run.yaml").write_text(config)
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _), sdk_client(url) as client:
        assert (await client.responses.create(model=model, input="Hi")).output_text == answer


@pytest.mark.parametrize(
    ("document", "number"), [(name, number) for name in DOCUMENTS for number in range(len(blocks(name, "yaml")))]
)
def test_every_run_config_of_the_documents_is_valid(document: str, number: int, tmp_path: Path) -> None:
    sections = yaml.safe_load(blocks(document, "yaml")[number])
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SCRIPTED, **sections}))
    environment = {
        "WEBHOOK_SECRET": "whsec_" + "A" * 32,
        "KEY_OF_ALPHA": "a" * 32,
        "KEY_OF_BETA": "b" * 32,
        "VAULT_KEY": "c" * 32,
    }
    config = load_config(str(path), env=environment)
    if "shout:Shout" not in path.read_text():
        wire_providers(config)


async def create_response(url: str) -> str:
    async with sdk_client(url) as client:
        return (await client.responses.create(model="scripted", input="Hi")).id


async def test_a_backup_restores_and_a_purge_deletes_one_tenant_only(tmp_path: Path) -> None:
    config = {"inference": {"provider": "scripted"}, "kv_store": {"provider": "sqlite", "path": "responses.db"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    programs = {
        name: named_block(f"{OPERATING}/{page}", "python", f"# {name}.py")
        for name, page in (("backup", "backup.md"), ("purge", "retention.md"))
    }
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _):
        response_id = await create_response(url)
        await forked_output(programs["backup"], cwd=tmp_path)
    shutil.copy(tmp_path / "backup.db", tmp_path / "responses.db")
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"responses.db{suffix}").unlink(missing_ok=True)
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _), sdk_client(url) as client:
        assert (await client.responses.retrieve(response_id)).id == response_id
    with sqlite3.connect(tmp_path / "responses.db") as database:
        database.execute("INSERT INTO entries VALUES (x'64656661756c74302f78', x'', 1, NULL)")  # default0/x
    await forked_output(programs["purge"], "default", cwd=tmp_path)
    with sqlite3.connect(tmp_path / "responses.db") as database:
        keys = [bytes(key) for (key,) in database.execute("SELECT key FROM entries")]
    assert not [key for key in keys if key.startswith(b"default/")]
    assert b"default0/x" in keys


async def test_workers_restart_one_by_one_without_a_failed_request(tmp_path: Path) -> None:
    config = {"inference": {"provider": "scripted"}, "kv_store": {"provider": "sqlite", "path": "responses.db"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    async with running_stack("run.yaml", "--workers", "2", cwd=tmp_path) as (url, pid):
        script = named_block(f"{OPERATING}/upgrade.md", "sh", "STACK_PID")
        restart = asyncio.create_task(output_of(("bash", "-c", script), STACK_PID=str(pid)))
        answers: list[str] = []
        while not restart.done():
            answers.append(await create_response(url))
        await restart
    assert len(answers) > 10


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_streams_pass_through_nginx(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SCRIPTED))
    (tmp_path / "logs").mkdir()
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _):
        server = named_block(f"{OPERATING}/deploy.md", "nginx", "proxy_pass")
        server = server.replace("http://127.0.0.1:8321", url).replace("listen 8080", f"listen unix:{tmp_path}/socket")
        http = f"access_log off; client_body_temp_path {tmp_path}/body; proxy_temp_path {tmp_path}/proxy; {server}"
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/logs/error.log; events {{}} http {{ {http} }}"
        )
        nginx = await asyncio.create_subprocess_exec("nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"))
        try:
            await until((tmp_path / "socket").exists, within_s=20)
            body = '{"model": "scripted", "input": "Hi", "stream": true}'
            request = ("curl", "-sN", "--unix-socket", str(tmp_path / "socket"), "http://127.0.0.1/v1/responses")
            output = await output_of((*request, "-H", "Content-Type: application/json", "-d", body))
        finally:
            nginx.terminate()
            await nginx.wait()
    assert "event: response.completed" in output
    assert output.endswith("data: [DONE]\n\n")


async def test_the_systemd_unit_starts_a_command_that_exists() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.read_string(named_block(f"{OPERATING}/deploy.md", "ini", "ExecStart"))
    program, command, config, *options = unit["Service"]["ExecStart"].split()
    assert (Path(program).name, command) == ("stack", "run")
    assert config.endswith(".yaml")
    usage = await output_of((str(STACK), "run", "--help"))
    assert all(option in usage for option in options if option.startswith("--"))


async def test_the_metrics_that_the_operations_page_names_are_there(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SCRIPTED))
    async with forked_stack("run.yaml", cwd=tmp_path) as (url, _), sdk_client(url) as client:
        async for _event in await client.responses.create(model="scripted", input="Hi", stream=True):
            pass
        metrics = await output_of(("curl", "-s", f"{url}/metrics"))
    names = set(re.findall(r"\b(?:stack|process)_[a-z_]+\b", (ROOT / OPERATING / "metrics.md").read_text()))
    assert len(names) >= 4
    assert [name for name in names if not re.search(rf"^{name}(_bucket)?[ {{]", metrics, re.MULTILINE)] == []


def test_the_page_of_commands_has_a_row_for_each_command() -> None:
    rows = re.findall(r"^\| `stack (\w+)", (ROOT / OPERATING / "commands.md").read_text(), re.MULTILINE)
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    assert sorted(rows) == sorted(command.commands)


def test_the_table_of_settings_names_every_field_of_the_server() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / OPERATING / "settings.md").read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(HttpServerConfig.model_fields)


def test_the_table_of_providers_is_the_registry() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|", (ROOT / "providers/README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((api, name) for api, names in PROVIDERS.items() for name in names)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_named_path_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:configs|distributions|tests|apis|providers|stack)/[\w./-]*)`", text)
    linked: list[str] = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not re.match(r"\w+:", link)]
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [link for link in linked if not leads_somewhere(ROOT / document, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a relative link names a file that is there, and one of its headings if it has a fragment."""
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists() or not fragment:
        return target.exists()
    headings: list[str] = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return fragment in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
