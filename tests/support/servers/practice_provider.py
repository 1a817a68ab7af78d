"""A real identity provider in a process of its own: oidc-provider-mock, with people and their claims."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = Path(sys.executable).with_name("oidc-provider-mock")


@asynccontextmanager
async def practice_provider(*people: Mapping[str, Any]) -> AsyncGenerator[str]:
    """The URL of a provider that knows these people by their claims; anyone may sign in as any of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [word for claims in people for word in ("--user-claims", json.dumps(claims))]
    process = await asyncio.create_subprocess_exec(
        *(str(PROGRAM), "--port", str(port), *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
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
