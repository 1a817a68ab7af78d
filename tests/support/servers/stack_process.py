"""`stack run` as a user starts it: a process of its own."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

STACK: Final = Path(sys.executable).with_name("stack")
START_TIMEOUT_S: Final = 300
"""The first start of all downloads the model."""


@asynccontextmanager
async def running_stack(
    *arguments: str, cwd: Path, port: int = 0, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[tuple[str, int]]:
    """`stack run` as a user starts it; yields its URL and process id."""
    process = await asyncio.create_subprocess_exec(
        str(STACK),
        "run",
        *arguments,
        "--port",
        str(port),
        cwd=cwd,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("listening on "):
                assert line, "the server ended before it listened"
        yield line.split()[-1], process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(60):
            await process.wait()
