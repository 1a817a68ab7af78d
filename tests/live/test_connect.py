"""Codex, Claude Code, opencode, Continue and aider, where they are installed, with nothing but the files that `stack
connect` writes: each is started as the command says and does one task, and then the files are taken back.

    npm install -g @openai/codex @anthropic-ai/claude-code opencode-ai @continuedev/cli
    pip install aider-chat
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from apis.chat import ChatRequest
from providers.inference.scripted import Scripted
from tests.live.programs import needs, run_program
from tests.support.models.described_model import DESCRIBED
from tests.support.sdk.answer_shapes import Script, call
from tests.support.servers.serving import Served, serving

KEY = "sk-right"
KEYS: dict[str, Any] = {"api_keys": [{"key": KEY, "tenant": "one"}]}
MODEL = "openai/gpt-oss-20b"
pytestmark = [pytest.mark.live, pytest.mark.timeout(240, func_only=True)]


def described(*turns: Script, **fields: Any) -> dict[str, Any]:
    return {"provider": DESCRIBED, "model": MODEL, "turns": list(turns), **fields}


async def run(home: Path, command: str) -> str:
    """Run the shell command in the folder `work` of a home of its own, and return its output. Keys and servers in the
    environment must have no effect."""
    work = home.parent / "work"
    work.mkdir(exist_ok=True)
    environment = {
        "STACK_KEY": KEY,
        "ANTHROPIC_API_KEY": "sk-of-anthropic",
        "ANTHROPIC_MODEL": "claude-opus-4-1",
        "CLAUDE_CODE_USE_BEDROCK": "1",
        "OPENAI_API_KEY": "sk-of-openai",
        "DISABLE_AUTOUPDATER": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return await run_program("sh", "-c", command, folder=work, home=home, environment=environment)


OWN_FILES = (
    *(".codex/stack.config.toml", ".claude/stack.settings.json", ".config/opencode/stack.json"),
    *(".continue/models/stack.yaml", ".aider.stack.conf.yml"),
)
"""The first file that `stack connect` writes for each client. Here the user has one of that name already."""


async def write(served: Served, home: Path, client: str) -> str:
    """Let the command write its files; returns the command line that it says starts the client."""
    for name in OWN_FILES:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"the user's own {name}\n")
    stack = shlex.join([sys.executable, "-m", "stack", "connect", client, "--url", f"{served.url}/v1"])
    output = await run(home, f"PYTHONPATH={Path(__file__).parents[2]} {stack} --key STACK_KEY --write")
    return output.partition("Start it: ")[2].partition("\n")[0]


async def restore(home: Path, client: str) -> None:
    """Take the files back, and check that those of the user are as they were, and that none of the stack is left."""
    record = json.loads((home / f".local/state/responses-stack/connect/{client}.json").read_text())
    paths = [Path(file["path"]) for file in record["files"]]
    await run(home, f"PYTHONPATH={Path(__file__).parents[2]} {sys.executable} -m stack connect {client} --restore")
    assert all((home / name).read_text() == f"the user's own {name}\n" for name in OWN_FILES)
    assert {path for path in paths if path.exists()} <= {home / name for name in OWN_FILES}
    assert not (home / ".local/state/responses-stack").exists()


def played(served: Served) -> list[ChatRequest]:
    """The requests that reached the model."""
    provider = served.stack.inference
    assert isinstance(provider, Scripted)
    return list(provider.requests)


@needs("codex")
@pytest.mark.parametrize("window", [131_072, None])
async def test_codex_patches_a_file(tmp_path: Path, window: int | None) -> None:
    patch = "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch\n"
    turns: list[Script] = [[call("apply_patch", patch, custom=True, id="call_1")], [{"text": "All done."}]]
    home = tmp_path / "home"
    async with serving(described(*turns, context_tokens=window), server=KEYS) as served:
        start = await write(served, home, "codex")
        arguments = "exec -s danger-full-access --skip-git-repo-check 'Go on.'"
        output = await run(home, f"{start} {arguments}")
        assert "All done." in output
        assert "metadata" not in output
        assert (tmp_path / "work" / "new.txt").read_text() == "hello\n"
        first, last = played(served)
        assert {"exec_command", "apply_patch"} <= {tool.name for tool in first.tools or ()}
        assert first.reasoning_effort == "medium"
        assert last.messages[-1].role == "tool"
    await restore(home, "codex")


@needs("claude")
async def test_claude_code_reads_a_file(tmp_path: Path) -> None:
    home, word = tmp_path / "home", tmp_path / "work" / "word.txt"
    word.parent.mkdir()
    word.write_text("the secret word is plover\n")
    read: Any = {"call": "Read", "arguments": json.dumps({"file_path": str(word)})}
    async with serving(described([read], [{"text": "It is plover."}]), server=KEYS) as served:
        start = await write(served, home, "claude")
        output = await run(home, f"{start} -p 'Which word?' --allowedTools Read --output-format json")
        result = json.loads(output.splitlines()[-1])
        assert (result["is_error"], result["result"], result["num_turns"]) == (False, "It is plover.", 2)
        assert "plover" in str(played(served)[-1].messages[-1].content)
    await restore(home, "claude")


@needs("opencode")
async def test_opencode_runs_a_command(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = {"command": "echo 42 > made.txt", "description": "Make a file"}
    turns: list[Script] = [[call("bash", json.dumps(command), id="call_1")], [{"text": "All done."}]]
    async with serving(described(*turns, title="A title"), server=KEYS) as served:
        start = await write(served, home, "opencode")
        output = await run(home, f"{start} run 'Go on.'")
        assert "All done." in output
        assert (tmp_path / "work" / "made.txt").read_text() == "42\n"
    await restore(home, "opencode")


@needs("cn")
async def test_continue_reads_a_file(tmp_path: Path) -> None:
    home, word = tmp_path / "home", tmp_path / "work" / "word.txt"
    word.parent.mkdir()
    word.write_text("the secret word is plover\n")
    turns: list[Script] = [[call("Read", json.dumps({"filepath": str(word)}), id="call_1")], [{"text": "All done."}]]
    async with serving(described(*turns), server=KEYS) as served:
        start = await write(served, home, "continue")
        assert "All done." in await run(home, f"{start} -p 'Go on.'")
        assert "plover" in str(played(served)[-1].messages[-1].content)
    await restore(home, "continue")


@needs("aider")
async def test_aider_writes_a_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with serving(described([{"text": "new.txt\n```\nhello\n```\n"}]), server=KEYS) as served:
        start = await write(served, home, "aider")
        options = "--yes-always --no-git --no-analytics --edit-format whole --message 'Go on.'"
        output = await run(home, f"{start} {options}")
        assert (tmp_path / "work" / "new.txt").read_text() == "hello\n"
        assert "Warning for" not in output  # it knows the window
    await restore(home, "aider")
