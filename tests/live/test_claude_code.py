"""Claude Code itself, where it is installed (`npm install -g @anthropic-ai/claude-code`), over a scripted model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.programs import needs, run_program
from tests.support.servers.serving import scripted, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(240, func_only=True), needs("claude")]
NAMES = ("claude-sonnet-5-5", "claude-haiku-4-5")


async def run_claude(url: str, folder: Path, *arguments: str) -> Any:
    """Return the result that the program prints, at the end of its own session."""
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": NAMES[0],
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAMES[1],
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = ("claude", "-p", *arguments, "--output-format", "json", "--model", NAMES[0])
    output = await run_program(*command, folder=folder, home=folder, environment=environment)
    return json.loads(output.splitlines()[-1])


async def test_claude_code_reads_a_file_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "word.txt"
    file.write_text("the secret word is plover\n")
    read: Any = {"call": "Read", "arguments": json.dumps({"file_path": str(file)})}
    model = scripted([{"reasoning": "I read."}, read], [{"text": "It is plover."}], model="mine")
    router: Any = {"provider": "router", "providers": {"one": model}, "aliases": dict.fromkeys(NAMES, "mine")}
    async with serving(router) as served:
        result = await run_claude(served.url, tmp_path, "Which word is in word.txt?", "--allowedTools", "Read")
        provider: Any = served.stack.providers_by_path["inference.providers.one"]
        last = provider.requests[-1].messages
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, "It is plover.", 2)
    assert [message.role for message in last[-2:]] == ["assistant", "tool"]
    assert (last[-2].reasoning, "plover" in str(last[-1].content)) == ("I read.", True)
