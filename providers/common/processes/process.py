"""start_process: a child process without a copy of this one.

The event loop of the server, uvloop, starts a program by a fork, which copies the page tables of the whole process. The
loop stands still meanwhile: with a gigabyte of memory for many milliseconds, and for longer where others use the CPUs.
The standard library starts it by vfork, for which the size of the process does not matter.
"""

import asyncio
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, Final

_starters: Final = ThreadPoolExecutor(2, thread_name_prefix="start-process")
"""Threads in which processes are started: a program begins to run before its start returns."""
PIPE: Final = subprocess.PIPE
DEVNULL: Final = subprocess.DEVNULL


class Process:
    """A child process. `stdin`, `stdout` and `stderr` are there where they were asked for as a PIPE."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._transports: list[asyncio.BaseTransport] = []
        self._unconnected = [pipe for pipe in (child.stdin, child.stdout, child.stderr) if pipe is not None]
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        """The id of the process, which is that of its group where it has a session of its own."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """The status with which the process has ended, negative for a signal; None while it runs."""
        return self._child.poll()

    async def wait(self) -> int:
        """Return the status with which the process ends. What it has written can still be read then."""
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self._child.kill()

    async def end(self) -> None:
        """Kill the process if it runs, wait for its end, and close its pipes. A second call does nothing."""
        self._child.kill()
        await self.wait()
        for transport in self._transports:
            transport.close()
        await asyncio.sleep(0)  # in which the event loop closes the pipes

    async def connect(self, limit: int) -> None:
        """Connect the pipes to the event loop, and watch for the end of the process."""
        self._watch()
        try:
            await self._connect(limit)
        except BaseException:
            self._child.kill()
            for transport in self._transports:
                transport.close()
            for pipe in self._unconnected:
                pipe.close()
            raise

    async def _connect(self, limit: int) -> None:
        child = self._child
        if child.stdin is not None:
            self._unconnected.remove(child.stdin)  # the event loop closes it, also where it fails
            protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
            transport, _ = await self._loop.connect_write_pipe(lambda: protocol, child.stdin)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
            self._transports.append(transport)
        self.stdout = await self._connect_output(child.stdout, limit)
        self.stderr = await self._connect_output(child.stderr, limit)

    async def _connect_output(self, pipe: IO[bytes] | None, limit: int) -> asyncio.StreamReader | None:
        if pipe is None:
            return None
        self._unconnected.remove(pipe)
        reader = asyncio.StreamReader(limit)
        transport, _ = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._transports.append(transport)
        return reader

    def _watch(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system than Linux, or an old one
            threading.Thread(target=self._wait_in_thread, name="child-process", daemon=True).start()
        else:
            self._loop.add_reader(descriptor, self._finish, descriptor)

    def _wait_in_thread(self) -> None:
        self._child.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._exit.set_result(self._child.wait())


async def start_process(  # noqa: PLR0913 - those of subprocess.Popen that are used here
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    own_session: bool = False,
    limit: int = 2**16,
) -> Process:
    """Start a program and return its process; without `env` it has the environment of this one.

    It inherits these `descriptors` and no others. `limit` is the most bytes of a line that is read from it. Raises
    OSError where it cannot be started.
    """
    start = partial(
        subprocess.Popen,
        command,
        bufsize=0,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        pass_fds=descriptors,
        start_new_session=own_session,
    )
    starting = _starters.submit(start)
    try:
        child = await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        if not starting.cancelled():
            await asyncio.shield(asyncio.wrap_future(_starters.submit(_discard, starting)))
        raise
    process = Process(child)
    await process.connect(limit)
    return process


def _discard(starting: "Future[subprocess.Popen[bytes]]") -> None:
    """End a process that is wanted no more."""
    with suppress(OSError):
        child = starting.result()
        child.kill()
        child.communicate()
