"""`stack connect`: settings of clients, printed, written to files of their own, and taken back byte for byte."""

import asyncio
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from stack.cli import ClientName, app
from stack.connect.clients import SETUPS
from stack.connect.written_files import WrittenFiles
from tests.support.models.described_model import DESCRIBED
from tests.support.servers.constant_server import answering
from tests.support.servers.serving import Served, serving

TWO: dict[str, Any] = {
    "provider": "router",
    "providers": {"a": {"provider": DESCRIBED, "model": "openai/one"}, "b": {"provider": "scripted", "model": "two"}},
}
KEYS: dict[str, Any] = {"api_keys": [{"key": "sk-right", "tenant": "one"}]}
Tree = dict[str, tuple[bytes | None, int]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        *("CODEX_HOME", "CLAUDE_CONFIG_DIR", "CONTINUE_GLOBAL_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
        *("OPENAI_API_KEY", "OPENAI_BASE_URL"),
    ):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def read_tree(home: Path) -> Tree:
    """The bytes and the mode of everything in a folder."""
    return {
        str(path.relative_to(home)): (path.read_bytes() if path.is_file() else None, path.stat().st_mode)
        for path in sorted(home.rglob("*"))
    }


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["connect", *arguments])
    return result.exit_code, result.stdout, result.stderr


async def run(*arguments: str) -> tuple[int, str, str]:
    return await asyncio.to_thread(invoke, *arguments)


async def connect(served: Served, *arguments: str) -> tuple[int, str, str]:
    return await run(*arguments, "--url", f"{served.url}/v1")


def test_the_command_line_names_every_client() -> None:
    assert list(ClientName) == list(SETUPS)


@pytest.mark.parametrize("client", list(ClientName))
async def test_what_is_written_can_be_undone_byte_for_byte(client: str, home: Path) -> None:
    async with serving(TWO) as served:
        _, printed, _ = await connect(served, client)
        assert read_tree(home) == {}
        code, output, errors = await connect(served, client, "--write")
        assert (code, errors) == (0, "")
        written = read_tree(home)
        files = [home / name for name, (content, _) in written.items() if content and not name.startswith(".local")]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        for file in files:
            assert f"Wrote {file}" in output
            assert f"~/{file.relative_to(home)}" in printed
        before = {home / "own.txt": b"mine\r\n", **dict.fromkeys(files, b'{"mine": \xff')}
        assert (await connect(served, client, "--restore"))[0] == 0
        assert read_tree(home) == {}
        for file, content in before.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(0o640)
        tree = read_tree(home)
        for model in ("openai/one", "two", "two"):
            code, output, errors = await connect(served, client, "--write", "--model", model)
            assert (code, errors) == (0, "")
            assert model in (output + "".join(file.read_text() for file in files))
    assert read_tree(home) != tree
    assert (await run(client, "--restore"))[0] == 0
    assert read_tree(home) == tree
    code, _, errors = await run(client, "--restore")
    assert (code, errors.partition(":")[0]) == (1, "Nothing to restore")


@pytest.mark.parametrize("client", list(ClientName))
async def test_a_key_is_written_nowhere(client: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_KEY", "sk-right")
    async with serving(TWO, server=KEYS) as served:
        code, output, errors = await connect(served, client, "--write", "--key", "STACK_KEY")
        assert (code, errors) == (0, "")
        _, printed, _ = await connect(served, client, "--key", "STACK_KEY")
    everything = output + printed + "".join(path.read_text() for path in home.rglob("*") if path.is_file())
    assert "sk-right" not in everything
    assert "STACK_KEY" in everything


async def test_codex_gets_a_profile_and_a_catalog_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    async with serving(TWO, server=KEYS) as served:
        _, output, _ = await connect(served, "codex", "--write", "--model", "openai/one")
    profile = tomllib.loads((home / ".codex" / "stack.config.toml").read_text())
    catalog = json.loads(Path(profile["model_catalog_json"]).read_text())
    assert (profile["model"], profile["model_provider"]) == ("openai/one", "stack")
    assert profile["model_providers"]["stack"] == {
        "name": "stack",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "supports_websockets": True,
        "env_key": "OPENAI_API_KEY",
    }
    assert {model["slug"]: model["context_window"] for model in catalog["models"]} == {
        "openai/one": 131_072,
        "two": None,
    }
    assert "Start it: codex --profile stack\n" in output


async def test_claude_code_sends_the_key_of_the_stack_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_KEY", "sk-right")
    async with serving(TWO, server=KEYS) as served:
        _, output, _ = await connect(served, "claude", "--write", "--key", "STACK_KEY", "--model", "openai/one")
    path = home / ".claude" / "stack.settings.json"
    settings = json.loads(path.read_text())
    assert settings["apiKeyHelper"] == 'printf %s "$STACK_KEY"'
    environment = settings["env"]
    assert environment["ANTHROPIC_BASE_URL"] == served.url
    assert (environment["ANTHROPIC_API_KEY"], environment["ANTHROPIC_AUTH_TOKEN"]) == ("", "")
    assert environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == settings["model"] == "openai/one"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert f"claude --settings {path}" in output


async def test_the_other_clients_get_the_windows_of_all_models(home: Path) -> None:
    async with serving(TWO) as served:
        for client in ("opencode", "continue", "aider", "goose"):
            assert (await connect(served, client, "--write"))[0] == 0
    config = home / ".config"
    opencode = json.loads((config / "opencode" / "stack.json").read_text())
    assert opencode["model"] == "stack/openai/one"
    assert opencode["provider"]["stack"]["models"]["openai/one"]["limit"] == {"context": 131_072, "output": 32_000}
    blocks = yaml.safe_load((home / ".continue" / "models" / "stack.yaml").read_text())
    assert [model["defaultCompletionOptions"]["contextLength"] for model in blocks["models"]] == [131_072, 32_768]
    metadata = json.loads((home / ".aider.stack.metadata.json").read_text())
    assert metadata["openai/openai/one"]["max_input_tokens"] == 131_072
    goose = json.loads((config / "goose" / "custom_providers" / "stack.json").read_text())
    assert goose["models"][0] == {"name": "openai/one", "context_limit": 131_072}


async def test_the_script_of_variables_is_a_shell_script(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_KEY", "sk-right")
    async with serving({"provider": "scripted", "model": "it's $one"}, server=KEYS) as served:
        assert (await connect(served, "env", "--write", "--key", "STACK_KEY"))[0] == 0
        command = f'. {home}/.config/responses-stack/env.sh; echo "$OPENAI_API_KEY $OPENAI_MODEL $ANTHROPIC_BASE_URL"'
        process = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    assert output.decode() == f"sk-right it's $one {served.url}\n"


async def test_an_address_without_a_path_has_its_api_at_v1(home: Path) -> None:
    async with serving(TWO) as served:
        _, output, _ = await run("env", "--url", f"{served.url}/", "--print")
    assert f"OPENAI_BASE_URL={served.url}/v1\n" in output


async def test_a_file_that_was_edited_is_left_to_its_owner(home: Path) -> None:
    profile = home / ".codex" / "stack.config.toml"
    async with serving(TWO) as served:
        await connect(served, "codex", "--write")
        profile.write_text(profile.read_text() + "# mine\n")
        tree = read_tree(home)
        for action in ("--write", "--restore"):
            code, _, errors = await connect(served, "codex", action)
            assert code == 1
            assert f"{profile}: edited after" in errors
            assert f"mv {profile} {profile}.mine" in errors
            assert read_tree(home) == tree
    profile.rename(home / "mine.toml")
    assert (await run("codex", "--restore"))[0] == 0
    assert set(read_tree(home)) == {"mine.toml"}


async def test_a_write_that_was_cut_off_can_be_undone(home: Path) -> None:
    """The record comes before the files, so a file may be as it was before, or absent."""
    codex = home / ".codex"
    codex.mkdir()
    (codex / "stack.models.json").write_text("old")
    tree = read_tree(home)
    async with serving(TWO) as served:
        await connect(served, "codex", "--write")
    (codex / "stack.config.toml").unlink()
    (codex / "stack.models.json").write_text("old")
    (codex / "stack.models.json").chmod(tree[".codex/stack.models.json"][1])
    assert (await run("codex", "--restore"))[0] == 0
    assert read_tree(home) == tree


async def test_commands_at_the_same_time_keep_the_file_that_was_there(home: Path) -> None:
    file = home / "settings"
    file.write_text("mine")
    texts = [f"text {number}" for number in range(20)]
    writes = (asyncio.to_thread(WrittenFiles("codex").write, {file: text}) for text in texts)
    await asyncio.gather(*writes)
    assert file.read_text() in texts
    await asyncio.to_thread(WrittenFiles("codex").restore)
    assert file.read_text() == "mine"


async def test_clients_are_taken_back_in_any_order(home: Path) -> None:
    (home / ".local" / "state").mkdir(parents=True)
    tree = read_tree(home)
    async with serving(TWO) as served:
        for client in ("codex", "aider", "env"):
            await connect(served, client, "--write")
    for client in ("aider", "codex", "env"):
        assert (await run(client, "--restore"))[0] == 0
    assert read_tree(home) == tree


@pytest.mark.parametrize(
    ("client", "name", "text"),
    [
        ("codex", ".codex/config.toml", "model = "),
        ("codex", ".codex/config.toml", 'model = "\\ud800"'),
        ("claude", ".claude/settings.json", '{"env": }'),
    ],
)
async def test_broken_settings_of_the_client_are_named(client: str, name: str, text: str, home: Path) -> None:
    path = home / name
    path.parent.mkdir()
    path.write_text(text)
    tree = read_tree(home)
    async with serving(TWO) as served:
        code, _, errors = await connect(served, client, "--write")
    assert (code, read_tree(home)) == (1, tree)
    assert errors.startswith(f"{path}: C")
    assert "Repair it first" in errors


@pytest.mark.parametrize("text", ['profile = "stack"\n', '[profiles.stack]\nmodel = "x"\n'])
async def test_codex_starts_no_profile_with_a_legacy_one_of_its_name(text: str, home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text(text)
    async with serving(TWO) as served:
        code, _, errors = await connect(served, "codex", "--write")
    assert (code, "Remove them, then run this again." in errors) == (1, True)
    assert errors.startswith(str(path))


async def test_the_window_of_other_models_does_not_hold_for_those_of_the_stack(home: Path) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    path.write_text("model_context_window = 400000\nmodel_auto_compact_token_limit = 300000\n")
    async with serving(TWO) as served:
        await connect(served, "codex", "--write")
    profile = tomllib.loads((home / ".codex" / "stack.config.toml").read_text())
    assert (profile["model_context_window"], profile["model_auto_compact_token_limit"]) == (131_072, 117_964)


async def test_a_folder_that_cannot_be_written_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    tree = read_tree(home)
    async with serving(TWO) as served:
        for folder in (f"{home}/file/codex", "/proc/codex"):
            monkeypatch.setenv("CODEX_HOME", folder)
            code, _, errors = await connect(served, "codex", "--write")
            assert code == 1
            assert errors.startswith(f"{folder}")
            assert "Make it writable for you" in errors
            await run("codex", "--restore")
            assert read_tree(home) == tree


async def test_a_record_that_is_damaged_says_where_the_copies_are(home: Path) -> None:
    async with serving(TWO) as served:
        await connect(served, "aider", "--write")
    record = home / ".local" / "state" / "responses-stack" / "connect" / "aider.json"
    record.write_text("{")
    code, _, errors = await run("aider", "--restore")
    assert code == 1
    assert errors.startswith(f"{record} cannot be read")


async def test_mistakes_have_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(TWO, server=KEYS) as served:
        _, _, errors = await connect(served, "codex")
        assert errors == "The environment variable OPENAI_API_KEY has no key. Set it: export OPENAI_API_KEY=YOUR_KEY\n"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
        _, _, errors = await connect(served, "codex")
        assert "refuses the key in OPENAI_API_KEY" in errors
        assert "sk-wrong" not in errors
        _, _, errors = await connect(served, "codex", "--key", "sk-right")
        assert errors == "--key is the name of an environment variable, not the key itself.\n"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
        code, _, errors = await connect(served, "codex", "--model", "three")
        assert (code, "Choose with --model: openai/one, two." in errors) == (1, True)
        code, _, errors = await run("codex", "--url", f"{served.url}/v2")
        assert (code, "The URL ends with /v1." in errors) == (1, True)
    code, _, errors = await connect(served, "codex")
    assert (code, errors) == (1, f"No server answers at {served.url}/v1. Start one: stack run local\n")
    assert (await run("codex", "--write", "--restore"))[0] == 2
    assert (await run("cursor"))[0] == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"object": "list", "data": [{"id": "one"}]}',
        b'{"models": [{"slug": "one\\n[evil]"}]}',
        b'{"models": [{"slug": "one", "context_window": "many"}]}',
        b"<html>",
        b"[]",
        b"\xff",
    ],
)
def test_a_server_without_a_catalog_is_named(body: bytes, home: Path) -> None:
    with answering(body) as url:
        code, _, errors = invoke("codex", "--url", url, "--write")
    assert (code, read_tree(home)) == (1, {})
    assert errors.startswith(url)
    assert "Traceback" not in errors


def test_a_server_with_no_model_for_chats_is_named() -> None:
    with answering(b'{"models": []}') as url:
        code, _, errors = invoke("codex", "--url", url)
    assert (code, "lists no model that answers chats" in errors) == (1, True)
    assert os.environ.get("OPENAI_API_KEY") is None
