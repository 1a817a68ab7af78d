"""Servers of the tests as processes of their own that need no start of an interpreter: `fork_server` forks for them."""

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
from asyncio import StreamReader
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from tests.support.servers.fork_server import ForkRequest

ROOT: Final = Path(__file__).resolve().parents[3]
START_S: Final = 100.0
STACK_PROGRAM: Final = "from stack.cli import main; main()"
"""`python -m stack`."""


class ForkedProcess:
    """A process that the fork server has made, with the methods of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, fate: StreamReader, stdout: StreamReader, stderr: StreamReader | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._exit = asyncio.create_task(self._read_exit_code(fate))

    async def listening(self) -> str:
        """Return the URL of a server when it says that it listens."""
        async with asyncio.timeout(START_S):
            while not (line := (await self.stdout.readline()).decode()).startswith("listening on "):
                assert line, "the server ended before it listened"
        return line.split()[-1]

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        return await asyncio.shield(self._exit)

    def send_signal(self, number: int) -> None:
        """Send the signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def _read_exit_code(self, fate: StreamReader) -> int:
        self.returncode = int(await fate.readline())
        return self.returncode


@asynccontextmanager
async def forked_process(
    program: str, *arguments: str, cwd: Path = ROOT, stderr: int | None = None
) -> AsyncGenerator[ForkedProcess]:
    """Run a Python program, as `python -c` does, in a process that has imported the product already. Its errors go to
    the file descriptor `stderr`, or else to a pipe. It is killed at the end if it still runs."""
    async with AsyncExitStack() as pipes:
        outputs: list[int] = []
        readers: list[StreamReader] = []
        try:
            for _ in range(2 if stderr is not None else 3):
                readable, writable = os.pipe()
                outputs.append(writable)
                readers.append(await pipes.enter_async_context(_reading(readable)))
            request = ForkRequest(program, list(arguments), str(cwd), dict(os.environ))
            descriptors = [*outputs, *([] if stderr is None else [stderr])]
            socket.send_fds(_fork_server(), [msgspec.json.encode(request)], descriptors)
        finally:
            for output in outputs:
                os.close(output)
        fate, stdout, *errors = readers
        process = ForkedProcess(int(await fate.readline()), fate, stdout, errors[0] if errors else None)
        try:
            yield process
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def forked_stack(file: str, cwd: Path) -> AsyncGenerator[tuple[str, int]]:
    """`stack run` on a free port; yields its URL and process id. At the end it gets SIGTERM."""
    async with forked_process(STACK_PROGRAM, "run", file, "--port", "0", cwd=cwd, stderr=2) as process:
        yield await process.listening(), process.pid
        process.terminate()
        async with asyncio.timeout(60):
            await process.wait()


async def forked_output(program: str, *arguments: str, cwd: Path = ROOT) -> str:
    """Return what a Python program prints, which ends without an error."""
    async with asyncio.timeout(START_S), forked_process(program, *arguments, cwd=cwd, stderr=2) as process:
        output = await process.stdout.read()
        assert await process.wait() == 0
    return output.decode()


@asynccontextmanager
async def _reading(descriptor: int) -> AsyncGenerator[StreamReader]:
    reader = StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


@cache
def _fork_server() -> socket.socket:
    """Start the fork server of this test process; return the socket that takes requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", "tests.support.servers.fork_server", str(number)]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[number])

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours
