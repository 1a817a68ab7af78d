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

from tests.support.servers.worker_processes import Workers, worker_processes

LIBRARIES: Final = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]
JUMPS: Final = ("+0", "+3600", "-3600", "+86400", "-86400", "+40d", "-40d", "+0")
"""Offsets of a clock, in seconds unless they name another unit."""
PAUSE_S: Final = 1.2
"""Seconds between two jumps; a response takes longer."""
SECTIONS: Final[dict[str, Any]] = {
    "inference": {"provider": "scripted", "turns": [[{"text": ["a "] * 10}, {"wait_s": 1.5}, {"text": ["b "] * 10}]]},
    # much shorter than a jump of a clock, and long enough to be renewed in time on a busy machine
    "responses": {"provider": "loop", "background": {"lease_s": 6, "poll_s": 0.1}},
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
    async with AsyncExitStack() as contexts:
        servers: list[Workers] = []
        for clock in clocks:
            clock.write_text("+0\n")
            monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
            workers = worker_processes(tmp_path, shared_store, workers=1, more=SECTIONS)
            servers.append(await contexts.enter_async_context(workers))
        created: list[str] = []
        for jump, clock in itertools.product(JUMPS, clocks):
            clock.write_text(f"{jump}\n")
            for server in servers:
                response_id = await server.begin("hi", tools=[])
                assert response_id is not None
                created.append(response_id)
            await asyncio.sleep(PAUSE_S)
        for response_id, server in zip(created, itertools.cycle(reversed(servers))):
            response = await server.ended(response_id, 60)
            assert response["status"] == "completed", response["error"]
            (message,) = response["output"]
            assert "".join(part["text"] for part in message["content"]) == "a " * 10 + "b " * 10
