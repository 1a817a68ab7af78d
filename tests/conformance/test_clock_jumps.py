"""Servers whose clocks jump while background responses run: each response completes once.

Servers on SQLite are on one machine, with one clock; others have one each.

Run `python -m pytest -m long tests/conformance/test_clock_jumps.py` where libfaketime is installed (apt: faketime).
"""

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from tests.support.servers.worker_processes import worker_processes

LIBRARIES: Final = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]
JUMPS: Final = ("+0", "+3600", "-3600", "+86400", "-86400", "+40d", "-40d", "+0")
"""Offsets of a clock, in seconds unless they name another unit."""
PAUSE_S: Final = 1.2
"""Seconds between two jumps; a response takes longer."""
SECTIONS: Final[dict[str, Any]] = {
    "inference": {"provider": "scripted", "turns": [[{"text": ["a "] * 10}, {"wait_s": 1.5}, {"text": ["b "] * 10}]]},
}
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed"),
]


async def test_responses_complete_once_while_clocks_jump(
    shared_store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARIES[0]))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    for name in ("FAKETIME_DONT_FAKE_MONOTONIC", "DONT_FAKE_MONOTONIC"):  # of its older and newer releases
        monkeypatch.setenv(name, "1")
    clocks = [tmp_path / "clock0", tmp_path / "clock1"]
    if shared_store["provider"] == "sqlite":
        clocks[1].symlink_to(clocks[0])
    async with AsyncExitStack() as servers:
        clients: list[AsyncOpenAI] = []
        for clock in clocks:
            clock.write_text("+0\n")
            monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
            workers = await servers.enter_async_context(
                worker_processes(tmp_path, shared_store, workers=1, more=SECTIONS)
            )
            client = AsyncOpenAI(base_url=f"{workers.url}/v1", api_key="none")
            clients.append(await servers.enter_async_context(client))
        created: list[str] = []
        for jump, clock in itertools.product(JUMPS, clocks):
            clock.write_text(f"{jump}\n")
            for client in clients:
                response = await client.responses.create(model="scripted", input="hi", background=True)
                created.append(response.id)
            await asyncio.sleep(PAUSE_S)
        for response_id, client in zip(created, itertools.cycle(reversed(clients))):
            response = await client.responses.retrieve(response_id)
            async with asyncio.timeout(60):
                while response.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.1)
                    response = await client.responses.retrieve(response_id)
            assert response.status == "completed", response.error
            assert response.output_text == "a " * 10 + "b " * 10
            assert len(response.output) == 1
