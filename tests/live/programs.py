"""Programs of others over a stack: started in a folder with an environment of their own, bounded, and ended whole."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.vllm_server import cache_dir, run, sole_builder

LIMIT_S: Final = 180.0
INSTALL_S: Final = 600.0


def needs(program: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where a program is not on the PATH."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


async def run_program(
    *command: str, folder: Path, home: Path, environment: Mapping[str, str], limit_s: float = LIMIT_S
) -> str:
    """Return what a program prints, which ends without an error. Of this process's environment it has the PATH alone.
    At its end, or after `limit_s`, all processes that it has started end, too."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    return text


async def python_output(python: str, script: str, folder: Path, url: str) -> Any:
    """Return the JSON that a script of this Python prints last; `URL` is the address of its server."""
    arguments = ("-W", "ignore", "-c", script)
    output = await run_program(python, *arguments, folder=folder, home=folder, environment={"URL": url})
    return json.loads(output.splitlines()[-1])


def npm_folder(packages: Mapping[str, str]) -> Path:
    """Return the folder of an npm project with these packages, by name and version, which is made once and kept."""
    versions = [f"{name}@{version}" for name, version in packages.items()]
    folder = cache_dir() / "npm" / "_".join(versions).replace("/", "-").replace("@", "")
    complete = folder / "complete"
    with sole_builder(folder.parent / f"{folder.name}.lock"):
        if not complete.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            options = ("--no-audit", "--no-fund", "--no-save", "--loglevel=error")
            install = ("npm", "install", "--prefix", folder, *options, *versions)
            run(f"installing {', '.join(versions)}", *install, timeout_s=INSTALL_S)
            complete.touch()
    return folder
