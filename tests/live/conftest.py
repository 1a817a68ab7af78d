"""The real vLLM that the tests here share, and a whole stack in front of it."""

import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.live.smollm2 import MODEL, smollm2_folder
from tests.live.vllm_server import OPTIONS, VLLMServer, vllm_python
from tests.support.servers.serving import Served, serving


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest) -> Generator[VLLMServer]:
    """The server, running: what it needs is built the first time, which takes minutes and says so."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(what: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\nlive tests: {what}\n")
            sys.stderr.flush()

    python = vllm_python(say)
    server = VLLMServer(python, smollm2_folder(python, say), MODEL, *OPTIONS)
    say("starting vLLM")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
async def served(vllm: VLLMServer, tmp_path: Path) -> AsyncGenerator[Served]:
    """A stack of its own for each test."""
    inference = {"provider": "vllm", "base_url": f"{vllm.url}/v1"}
    async with serving(inference, kv_store={"provider": "sqlite", "path": str(tmp_path / "responses.db")}) as stack:
        yield stack
