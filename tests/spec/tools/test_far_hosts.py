"""Browsing over a network with several hosts, public and private: real addresses, real redirects between them."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.far_hosts import CANARIES, FIRST, HOSTS, OPENED, SECOND, STACK, THIRD

ROOT = Path(__file__).parents[3]
BOUND_S = 100


async def ip(*words: str) -> bool:
    process = await asyncio.create_subprocess_exec(
        "ip", *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0


@asynccontextmanager
async def network() -> AsyncGenerator[tuple[str, str]]:
    """Two namespaces that see nothing but each other: one for the stack, one for the hosts."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the program `ip` of iproute2")
    here, there = (f"{side}-{os.getpid()}" for side in ("stack", "hosts"))
    try:
        if not (await ip("netns", "add", here) and await ip("netns", "add", there)):
            pytest.skip("network namespaces cannot be made here")
        for words in (
            f"link add here netns {here} type veth peer name there netns {there}",
            *(f"-n {here} addr add {STACK}/24 dev here", f"-n {here} link set here up", f"-n {here} link set lo up"),
            *(f"-n {there} addr add {address}/24 dev there" for address in HOSTS),
            *(f"-n {there} addr add {address}/32 dev there" for address in CANARIES),
            *(f"-n {there} link set there up", f"-n {there} link set lo up"),
            *(f"-n {here} route add {address}/32 via {HOSTS[0]}" for address in CANARIES),
        ):
            if not await ip(*words.split()):
                pytest.skip(f"this network cannot be made here: ip {words}")
        yield here, there
    finally:
        for namespace in (here, there):
            await ip("netns", "del", namespace)


@asynccontextmanager
async def running(namespace: str, role: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """One of the two programs, in a namespace."""
    process = await asyncio.create_subprocess_exec(
        "ip",
        "netns",
        "exec",
        namespace,
        sys.executable,
        "-m",
        "tests.support.servers.far_hosts",
        role,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_pages_of_public_hosts_are_read_along_redirects_and_private_ones_are_never_connected_to() -> None:
    async with asyncio.timeout(BOUND_S), network() as (here, there), running(there, "host") as hosts:
        assert hosts.stdout is not None
        assert await hosts.stdout.readline() == b"ready\n"
        async with running(here, "browse") as stack:
            said, _ = await stack.communicate()
        received, _ = await hosts.communicate(b"")
    outcome: Any = json.loads(said)
    came: Any = json.loads(received)
    search, *opened, message = outcome["output"]
    assert (search["status"], len(opened)) == ("completed", len(OPENED))
    assert [item["status"] for item in opened] == ["completed"] * 2 + ["failed"] * 4
    assert [item["action"]["url"] for item in opened] == [f"{FIRST}/start", f"{THIRD}/end", *OPENED[2:]]
    start, far, *refused = outcome["told"][1:]
    assert f"On {HOSTS[0]} more[#1]." in start
    assert f"[#1] {SECOND}/far" in start
    assert f"On {HOSTS[2]} more" in far
    assert not any("secret" in text and "On " in text for text in refused)
    (cited,) = message["content"][0]["annotations"]
    assert cited["url"] == f"{THIRD}/end"
    assert came["requests"] == [
        *(f"{FIRST}/start", f"{FIRST}/far", f"{SECOND}/far", f"{THIRD}/end"),
        *(f"{FIRST}/trap", f"{SECOND}/trap", f"{THIRD}/trap"),
    ]
    # each canary is reached once: by the program itself, which shows that the stack could have been there too
    assert came["canaries"] == len(CANARIES)
