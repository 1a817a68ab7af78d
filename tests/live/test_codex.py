"""The real Codex CLI with a stack as its server: it works, patches, compacts and goes on. `codex` must be on the PATH
(`npm install -g @openai/codex`)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.live.programs import needs, run_program
from tests.spec.responses.test_gpt_oss_llama_cpp import section as llama_section
from tests.support.models.harmony_conversations import MODEL
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import chat_requests
from tests.support.servers.serving import Served, scripted, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(240, func_only=True), needs("codex")]
CONFIG = """
model = "{model}"
model_provider = "stack"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
{more}
[analytics]
enabled = false
[model_providers.stack]
name = "{name}"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "STACK_API_KEY"
supports_websockets = {websockets}
"""
MAKE: Script = [{"reasoning": "I look."}, call("exec_command", '{"cmd": "echo 42 > made.txt"}', id="call_1")]
CODE: Script = [call("exec", "text((await tools.exec_command({cmd: 'echo 42 > made.txt'})).output)", custom=True)]
PATCH: Script = [
    call("apply_patch", "*** Begin Patch\n*** Add File: new.txt\n+hello\n*** End Patch\n", custom=True, id="call_2")
]
DONE: Script = [{"text": "All done."}]


async def codex(served: Served, folder: Path, *arguments: str, **config: Any) -> str:
    """Run Codex to its end in `folder`, and return its output."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    fields = {"model": "scripted", "name": "stack", "websockets": "false", "more": "", **config}
    (home / "config.toml").write_text(CONFIG.format(url=served.url, **fields))
    command = ("codex", "exec", *arguments, "--skip-git-repo-check", "Go on.")
    environment = {"CODEX_HOME": str(home), "STACK_API_KEY": "none"}
    text = await run_program(*command, folder=folder, home=folder, environment=environment)
    assert "ERROR" not in text
    return text


def roles(served: Served) -> Sequence[str]:
    return [message.role for message in chat_requests(served)[-1].messages]


@pytest.mark.parametrize("websockets", ["false", "true"])
async def test_it_runs_commands_and_gets_their_output(websockets: str, tmp_path: Path) -> None:
    async with serving(scripted(MAKE, DONE)) as served:
        assert "All done." in await codex(served, tmp_path, websockets=websockets)
        assert (tmp_path / "made.txt").read_text() == "42\n"
        assert roles(served)[-2:] == ["assistant", "tool"]
        assert chat_requests(served)[-1].messages[-2].reasoning == "I look."


async def test_a_session_goes_on_and_patches(tmp_path: Path) -> None:
    async with serving(scripted(MAKE, DONE, PATCH, DONE, model="gpt-5.5")) as served:
        await codex(served, tmp_path, model="gpt-5.5")
        await codex(served, tmp_path, "resume", "--last", model="gpt-5.5")
        assert (tmp_path / "new.txt").read_text() == "hello\n"
        assert roles(served).count("tool") == 2


async def test_its_tools_may_come_in_the_input(tmp_path: Path) -> None:
    async with serving(scripted(CODE, DONE, model="gpt-5.6-sol")) as served:
        await codex(served, tmp_path, model="gpt-5.6-sol")
        assert (tmp_path / "made.txt").read_text() == "42\n"
        assert "exec" in [tool.name for tool in chat_requests(served)[0].tools or ()]


@pytest.mark.parametrize("name", ["stack", "OpenAI"])
async def test_it_compacts_by_itself_and_here(name: str, tmp_path: Path) -> None:
    """Codex leaves it to the server where the provider's name is OpenAI."""
    async with serving(scripted(MAKE, [{"text": "The summary."}], DONE)) as served:
        limit = "model_auto_compact_token_limit = 2000\nmodel_context_window = 100000"
        assert "All done." in await codex(served, tmp_path, name=name, more=limit)
        last = str(chat_requests(served)[-1].messages[-1].content)
        assert last.endswith("The summary.")
        assert "tool" not in roles(served)


async def test_it_runs_on_gpt_oss_in_llama_cpp(tmp_path: Path) -> None:
    """A real model: what it says of Codex's 7,000 tokens means nothing, but the turn is whole."""
    section = await asyncio.to_thread(llama_section)
    async with serving({**section, "models": [], "context_tokens": 65536}) as served:
        assert "tokens used" in await codex(served, tmp_path, model=MODEL)
