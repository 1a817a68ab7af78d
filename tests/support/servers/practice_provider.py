"""A real identity provider in a process of its own: oidc-provider-mock, with people and their claims."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.servers.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def practice_provider(program: str) -> AsyncGenerator[str]:
    """The URL of the provider that a program of the documents starts on OIDC_PORT; anyone may sign in as any of its
    people."""
    port = free_port()
    async with _running(sys.executable, "-W", "ignore", "-c", program, port=port) as url:
        yield url


@asynccontextmanager
async def pages_provider(
    *people: Mapping[str, Any],
    life_s: float = 3600,
    refreshes: bool = False,
    denial: Mapping[str, str] | None = None,
    access_audience: str = "",
) -> AsyncGenerator[str]:
    """The URL of a provider at which pages may sign these people in (`pages_provider.py`). `denial` are fields of its
    answer where a person says no. With `access_audience` it sends no ID token, and an access token that is a JWT."""
    port = free_port()
    fields = {
        "port": port,
        "people": people,
        "life_s": life_s,
        "refreshes": refreshes,
        "denial": denial or {},
        "access_audience": access_audience,
    }
    program = (sys.executable, "-W", "ignore", "-m", "tests.support.servers.pages_provider", json.dumps(fields))
    async with _running(*program, port=port) as url:
        yield url


@asynccontextmanager
async def _running(*program: str, port: int) -> AsyncGenerator[str]:
    process = await asyncio.create_subprocess_exec(
        *program,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "OIDC_PORT": str(port)},
    )
    try:
        async with asyncio.timeout(30):
            while not await _listens(port):
                assert process.returncode is None, "the identity provider ended"
                await asyncio.sleep(0.05)
        yield f"http://localhost:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("localhost", port)
    except OSError:
        return False
    writer.close()
    return True


def browser_of(person: str) -> str:
    """The value of BROWSER for a browser in which this person signs in without being asked."""
    return f"curl -s -L -o /dev/null --data sub={person} %s &"
