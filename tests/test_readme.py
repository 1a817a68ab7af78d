"""The README is run, not believed."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from providers import PROVIDERS
from stack.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
STACK = Path(sys.executable).with_name("stack")
START_S = 300
"""The first start of all fetches the model."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@asynccontextmanager
async def stack_run(*arguments: str, cwd: Path) -> AsyncGenerator[str]:
    """`stack run` as a user starts it; yields its URL."""
    process = await asyncio.create_subprocess_exec(
        str(STACK), "run", *arguments, "--port", "0", cwd=cwd, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("listening on "):
                assert line, "the server ended before it listened"
        yield line.split()[-1]
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(60):
            await process.wait()


async def output_of(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(100):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


def test_the_first_two_shell_blocks_are_one_line_each() -> None:
    run, test = blocks("sh")[:2]
    assert run.count("\n") == 1
    assert "stack run configs/local.yaml" in run
    assert test == "bash tests/run.sh\n"
    assert test.strip() in (ROOT / ".ci/run").read_text()


async def test_the_client_program_streams_an_answer_of_the_embedded_model(tmp_path: Path) -> None:
    program = blocks("python")[0]
    async with stack_run(str(ROOT / "configs/local.yaml"), cwd=tmp_path) as url:
        assert "http://127.0.0.1:8321" in program
        said = await output_of((sys.executable, "-c", program.replace("http://127.0.0.1:8321", url)))
    assert "Paris" in said


@pytest.mark.parametrize(("name", "model", "said"), [("hello", "next-token", "Hello!"), ("shout", "shout", "HI!!")])
async def test_the_provider_of_the_example_runs(name: str, model: str, said: str, tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if block.startswith(f"# {name}.py"))
    (config,) = (block for block in blocks("yaml") if f"{name}:" in block or f"{name}.py:" in block)
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "run.yaml").write_text(config)
    ask = f"""
from openai import OpenAI
print(OpenAI(base_url="URL/v1", api_key="none").responses.create(model="{model}", input="Hi").output_text)
"""
    async with stack_run("run.yaml", cwd=tmp_path) as url:
        assert await output_of((sys.executable, "-c", ask.replace("URL", url))) == f"{said}\n"


def test_the_config_of_the_example_loads(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(blocks("yaml")[0])
    assert load_config(str(path), env={}).inference.fields["base_url"] == "http://127.0.0.1:8000/v1"


def test_the_table_of_providers_is_the_registry() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted((api, name) for api, names in PROVIDERS.items() for name in names)


def test_every_named_path_exists() -> None:
    named = re.findall(r"`((?:configs|distributions|tests|apis|providers|stack)/[\w./-]*)`", README)
    assert named
    assert [path for path in named if not os.path.exists(ROOT / path)] == []
