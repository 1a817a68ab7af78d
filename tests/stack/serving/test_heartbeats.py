"""Workers whose event loop stands still: how the parent sees it, and what it does."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from stack.serving.heartbeats import Heartbeats
from tests.stack.serving import test_serve
from tests.stack.serving.test_serve import children, launched, pid
from tests.support.waiting import until

IMPATIENT = "import stack.serving.launch as launch\nlaunch._SILENCE_TIMEOUT_S = 1.0\n" + test_serve.SCRIPT


@pytest.fixture
def heartbeats() -> Heartbeats:
    return Heartbeats(multiprocessing.get_context("fork"), 2)


def test_silence_is_counted_from_the_last_beat(heartbeats: Heartbeats) -> None:
    """The parent sees how long a worker has been silent."""
    assert heartbeats.observe(0, 0) == 0
    assert heartbeats.observe(0, 100) == 0  # it has not begun to beat: it is starting
    heartbeats.beat(0)
    assert [heartbeats.observe(0, 100 + seconds / 2) for seconds in range(4)] == [0, 0.5, 1.0, 1.5]
    heartbeats.beat(0)
    assert heartbeats.observe(0, 102) == 0
    assert heartbeats.observe(1, 102) == 0
    heartbeats.observe(0, 103)
    heartbeats.reset(0)
    assert heartbeats.observe(0, 104) == 0


def test_a_parent_that_was_stopped_itself_blames_no_worker(heartbeats: Heartbeats) -> None:
    heartbeats.beat(0)
    heartbeats.observe(0, 0)
    assert heartbeats.observe(0, 3600) == 1


@pytest.mark.long
async def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in SIGSTOP holds connections and serves none; it is killed, and another takes its place."""
    monkeypatch.setattr(test_serve, "SCRIPT", IMPATIENT)
    async with launched(tmp_path, run={"workers": 2}) as running:
        await running.listening()
        await until(lambda: len(children(running)) >= 2, within_s=30)
        stopped = await pid(running.url)
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: stopped not in {child.pid for child in children(running)}, within_s=30)
        assert await pid(running.url) != stopped
        running.signal()
        assert (await running.end())[0] == 0
        assert f"Worker {stopped} did nothing for 1 s, and is killed." in await running.errors()
