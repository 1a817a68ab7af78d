"""start_process on the event loops of asyncio and of the server: output, ends, signals, and what it costs the loop."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import psutil
import pytest
import uvloop

from providers.common.processes.process import DEVNULL, PIPE, Process, start_process
from tests.support.laws.source_trees import ROOT, python_files

ECHO = "import sys; [print(line.upper(), end='', flush=True) for line in sys.stdin]"
LOOPS: dict[str, Any] = {"asyncio": None, "uvloop": uvloop.new_event_loop}


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on an event loop of its own."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(work, 30))

    return run


def test_lines_go_in_and_come_out_until_the_input_ends(run: Any) -> None:
    async def talk() -> tuple[list[bytes], int]:
        process = await start_process(program(ECHO), stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        lines: list[bytes] = []
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            await process.stdin.drain()
            lines.append(await process.stdout.readline())
        process.stdin.close()
        status = await process.wait()
        await process.end()
        return lines, status

    assert run(talk()) == ([b"ONE\n", b"TWO\n"], 0)


def test_the_output_of_a_process_that_has_ended_can_still_be_read(run: Any) -> None:
    async def read() -> tuple[int, int, bytes]:
        text = "import sys; print('x' * 5000); print('no', file=sys.stderr); sys.exit(7)"
        process = await start_process(program(text), stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        status = await process.wait()
        assert process.stdout is not None
        assert process.stderr is not None
        size, errors = len(await process.stdout.read()), await process.stderr.read()
        assert process.returncode == status
        await process.end()
        return status, size, errors

    assert run(read()) == (7, 5001, b"no\n")


def test_a_process_that_does_not_end_is_killed_together_with_its_pipes(run: Any) -> None:
    async def kill() -> tuple[int | None, int]:
        process = await start_process(program("import time; print(1, flush=True); time.sleep(600)"), stdout=PIPE)
        assert process.stdout is not None
        await process.stdout.readline()
        running = process.returncode
        await process.end()
        await process.end()
        return running, await process.wait()

    assert run(kill()) == (None, -signal.SIGKILL)


def test_a_missing_program_is_an_error(run: Any) -> None:
    with pytest.raises(FileNotFoundError):
        run(start_process(("/no/such/program",)))


def test_descriptors_and_a_session_are_those_that_were_asked_for(run: Any) -> None:
    read_end, write_end = os.pipe()

    async def look() -> bytes:
        text = f"import os; os.write({write_end}, b'here'); print(os.getsid(0) == os.getpid())"
        process = await start_process(program(text), stdout=PIPE, descriptors=(write_end,), own_session=True)
        assert process.stdout is not None
        await process.wait()
        line = (await process.stdout.read()).strip()
        await process.end()
        return line

    try:
        assert run(look()) == b"True"
        assert os.read(read_end, 10) == b"here"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_where_the_system_has_no_descriptors_of_processes_a_thread_waits(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)

    async def wait() -> int:
        process = await start_process(program("raise SystemExit(3)"))
        return await process.wait()

    assert run(wait()) == 3


def test_many_processes_at_once_all_report_their_ends(run: Any) -> None:
    async def wait_for_all() -> list[int]:
        started: list[Process] = [await start_process(("/bin/sh", "-c", f"exit {number}")) for number in range(40)]
        return [*await asyncio.gather(*(process.wait() for process in started))]

    assert run(wait_for_all()) == [*range(40)]


def open_descriptors() -> int:
    return psutil.Process().num_fds()


def sleepers() -> list[str]:
    """The children of this process that sleep, also those that have ended and were not waited for."""
    names: list[str] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            names.append(child.name())
    return [name for name in names if name == "sleep"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_start_or_an_end_that_is_cancelled_leaves_neither_a_process_nor_a_pipe(run: Any, times: int) -> None:
    """However far it has come, and also where the caller is cancelled again while the process ends."""

    async def use() -> None:
        process = await start_process(("sleep", "600"), stdin=PIPE, stdout=PIPE, stderr=PIPE)
        await process.end()

    async def leave() -> None:
        await use()  # the event loop has opened its own descriptors
        descriptors = open_descriptors()
        for turns in range(30):
            using = asyncio.create_task(use())
            for _ in range(times):
                for _ in range(turns):
                    await asyncio.sleep(0.0002)
                using.cancel()
            with suppress(asyncio.CancelledError):
                await using
        for _ in range(1000):
            if not sleepers() and open_descriptors() == descriptors:
                break
            await asyncio.sleep(0.01)
        assert (sleepers(), open_descriptors()) == ([], descriptors)
        gc.collect()  # an unclosed pipe would warn, which is an error

    run(leave())


def test_no_other_place_starts_a_process_from_the_event_loop() -> None:
    """A fork of a large server stops all its requests. The programs of a sandbox are started by a small process."""
    users = [
        path.relative_to(ROOT).as_posix()
        for path in python_files("providers", "stack", "apis")
        if "create_subprocess" in path.read_text()
    ]
    assert users == ["providers/tool_runtime/python/session.py"]
