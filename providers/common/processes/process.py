"""start_process: a child process without a copy of this one.

The event loop of the server, uvloop, starts a program by a fork, which copies the page tables of the whole process. The
loop stands still meanwhile: with a gigabyte of memory for many milliseconds, and for longer where others use the CPUs.
The standard library starts it by vfork, for which the size of the process does not matter. A file that only the child
is to read is given to it by its descriptor: `open_memory_file`.
"""

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

_starters: Final = ThreadPoolExecutor(2, thread_name_prefix="start-process")
"""Threads in which processes are started: a program begins to run before its start returns."""
PIPE: Final = subprocess.PIPE
DEVNULL: Final = subprocess.DEVNULL
_Start = Callable[..., "subprocess.Popen[bytes]"]
_Started = tuple["subprocess.Popen[bytes]", dict[str, socket.socket]]


class Process:
    """A child process. `stdin`, `stdout` and `stderr` are there where they were asked for as a PIPE."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._connections: list[asyncio.StreamWriter] = []
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
        try:
            await self.wait()
        finally:
            for connection in self._connections:
                connection.close()
        await asyncio.sleep(0)  # in which the event loop closes the pipes

    async def connect(self, ends: Mapping[str, socket.socket], limit: int) -> None:
        """Connect our ends of the pipes to the event loop, and watch for the end of the process."""
        self._watch()
        for name, end in ends.items():
            reader, writer = await asyncio.open_unix_connection(sock=end, limit=limit)
            self._connections.append(writer)
            setattr(self, name, writer if name == "stdin" else reader)

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
    OSError where it cannot be started. A caller that is cancelled leaves no process.
    """
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    start = partial(subprocess.Popen, command, env=env, pass_fds=descriptors, start_new_session=own_session)
    starting = asyncio.create_task(_start(start, streams, limit))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_end_unwanted(starting)))
        raise


async def _start(start: _Start, streams: Mapping[str, int | None], limit: int) -> Process:
    """Not cancelled by a caller that leaves: a pipe that is half connected cannot be closed safely, since uvloop closes
    its descriptor but not its socket."""
    starting = _starters.submit(_start_in_thread, start, streams)
    try:
        child, ends = await asyncio.wrap_future(starting)
    except asyncio.CancelledError:  # the event loop ends
        starting.add_done_callback(_discard)
        raise
    process = Process(child)
    await process.connect(ends, limit)
    return process


async def _end_unwanted(starting: "asyncio.Task[Process]") -> None:
    with suppress(OSError):
        await (await starting).end()


def _discard(starting: "Future[_Started]") -> None:
    with suppress(OSError, CancelledError):
        child, ends = starting.result()
        for end in ends.values():
            end.close()
        child.kill()
        child.wait()


def _start_in_thread(start: _Start, streams: Mapping[str, int | None]) -> "_Started":
    """Return the process and our ends of its pipes, which are sockets, as those of uvloop's own processes."""
    pairs = {name: socket.socketpair() for name, stream in streams.items() if stream == PIPE}
    theirs = {name: pair[1] for name, pair in pairs.items()}
    try:
        child = start(**{**streams, **theirs})
    except BaseException:
        for ours, _ in pairs.values():
            ours.close()
        raise
    finally:
        for end in theirs.values():
            end.close()
    return child, {name: pair[0] for name, pair in pairs.items()}


@contextmanager
def open_memory_file(name: str, data: bytes) -> Generator[int]:
    """Open a file that is in memory only, at its beginning, and close it on exit."""
    descriptor = os.memfd_create(name)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
