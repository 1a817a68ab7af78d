"""Child program: has imported the product, and forks for every server that a test starts.

The imports are most of what a short-lived server costs. Input: messages of the socket whose number is the argument, a
`ForkRequest` each, with the file descriptors of a pipe for its fate, of its output and of its errors. Output: the pipe
gets the process id in a line, and the exit code in another when the process has ended.
"""

import gc
import os
import select
import socket
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple

import msgspec

MODULES: Final = (
    "stack.cli",
    "stack.serving.launch",
    "stack.http.app",
    "providers.inference.scripted",
    "providers.responses.loop",
    "providers.kv_store.memory",
    "providers.kv_store.sqlite",
    "providers.kv_store.redis",
    "providers.kv_store.postgres",
    "providers.accounts.config",
    "providers.fetcher.safe",
    "providers.reader.child",
    "providers.traces.kv",
)
"""Modules that are imported once; a server imports all others itself."""
LOADER_VARIABLES: Final = ("LD_PRELOAD", "PYTHONPATH")
"""Variables that only a new interpreter reads: where a test sets one, the new process begins one."""
MAX_REQUEST_BYTES: Final = 128 * 1024


class ForkRequest(msgspec.Struct):
    """A Python program with its arguments, working directory and environment."""

    program: str
    arguments: list[str]
    cwd: str
    environment: dict[str, str]


class _Fate(NamedTuple):
    """A child process that runs, and the pipe that is to get its exit code."""

    pid: int
    pipe: int


def serve(control: socket.socket) -> ForkRequest | None:
    """Fork for each request: return it in the new process. Return None in this one when the test process has ended."""
    running: dict[int, _Fate] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                _report(running.pop(ready))
                os.close(ready)
                continue
            message, (*descriptors,), _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                control.detach()
                return _become(msgspec.json.decode(message, type=ForkRequest), *descriptors)
            pipe, *outputs = descriptors
            for output in outputs:
                os.close(output)
            os.write(pipe, b"%d\n" % pid)
            ended = os.pidfd_open(pid)
            running[ended] = _Fate(pid, pipe)
            poll.register(ended, select.POLLIN)


def _report(fate: _Fate) -> None:
    _, status = os.waitpid(fate.pid, 0)
    with suppress(BrokenPipeError):  # the test has ended without waiting for it
        os.write(fate.pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
    os.close(fate.pipe)


def _become(request: ForkRequest, _pipe: int, output: int, errors: int) -> ForkRequest:
    """Be as `python -c` would begin, and return the request."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.chdir(request.cwd)
    if any(request.environment.get(name) != os.environ.get(name) for name in LOADER_VARIABLES):
        command = [sys.executable, "-c", request.program, *request.arguments]
        os.execve(sys.executable, command, request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[0] = ""
    sys.argv = ["-c", *request.arguments]
    return request


def main() -> None:
    """Serve, and in each new process run its program, which the interpreter then ends as it ends every program."""
    for module in MODULES:
        import_module(module)
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(request.program, "<string>", "exec"), vars(program))


if __name__ == "__main__":
    main()
