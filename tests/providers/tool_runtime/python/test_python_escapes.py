"""Programs that try to leave the Python sandbox: none gets out, none harms the server, and nothing is left of them.

Set PYTHON_ESCAPE_RUNS to run each of them that many times.
"""

import asyncio
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import pytest_asyncio

from apis.containers import CreateContainer
from apis.errors import NotFound
from apis.tool_runtime import ToolCall, ToolResult
from providers.kv_store.memory import Memory
from providers.skills.kv import StoredSkills
from providers.tool_runtime.python.provider import Python
from tests.providers.tool_runtime.python.python_abuses import ABUSES
from tests.providers.tool_runtime.python.python_escapes import ESCAPES, MARK, PRELUDE
from tests.providers.tool_runtime.python.test_cgroup import find_control_groups
from tests.providers.tool_runtime.python.test_python import server_processes, server_socket
from tests.support.waiting import until

RUNS = int(os.environ.get("PYTHON_ESCAPE_RUNS", "1"))
PROGRAMS = {**ESCAPES, **ABUSES}
SECRET = "sk-of-the-server-0123456789"
PR_SET_CHILD_SUBREAPER: Final = 36

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
pytestmark = [needs_bubblewrap, pytest.mark.timeout(60 + 30 * RUNS)]


class Host:
    """Targets that a program must not reach: a file, a port, sockets with and without a path, a secret, processes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "canary.txt"
        self.file.write_text(SECRET)
        self.port = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0canary-{os.getpid()}")
        self.abstract.listen()
        self.before = descendants()

    def names(self, python: Python) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "secret": SECRET,
            "pid": os.getpid(),
            "port": self.port.getsockname()[1],
            "abstract": self.abstract.getsockname().decode(),
            "session_server": str(server_socket(python)),
        }

    def assert_untouched(self) -> None:
        assert self.file.read_text() == SECRET
        for listener in (self.port, self.abstract):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def close(self) -> None:
        self.port.close()
        self.abstract.close()


@contextmanager
def adopted_orphans() -> Generator[None]:
    """Let this process become the parent of each descendant whose parents end, instead of the machine's first process:
    nothing that a program starts leaves its tree, and processes of tests that run at the same time are in others."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)


def descendants() -> set[psutil.Process]:
    """Return the living processes that this process and its descendants have started, in whichever namespace."""
    living: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="python-escapes-"))
    folder.chmod(0o755)
    with adopted_orphans(), pytest.MonkeyPatch.context() as environment:
        host = Host(folder)
        environment.setenv("SERVER_SECRET", SECRET)
        yield host
        host.close()
    shutil.rmtree(folder)


@asynccontextmanager
async def started(**fields: Any) -> AsyncGenerator[Python]:
    config = Python.Config.model_validate({"timeout_s": 2, "cpu_s": 1, "memory_mib": 128, **fields})
    store = Memory(Memory.Config())
    python = Python(config, None, store, StoredSkills(StoredSkills.Config(), store))
    await python.start()
    try:
        yield python
    finally:
        await python.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def python(host: Host) -> AsyncGenerator[Python]:
    async with started(scratch_mib=16) as python:
        (server,) = server_processes()
        yield python
    with suppress(TimeoutError):  # a process that was killed ends a moment later on a busy machine
        await until(lambda: descendants() <= host.before)
    assert descendants() <= host.before
    assert not find_control_groups(server.pid)


def run_in(session: str, code: str) -> ToolCall:
    return ToolCall("call_1", "python", {"code": code}, tenant="tenant", session=session)


def assert_harmless(result: ToolResult) -> None:
    text = re.sub(r"\{'file'.*\}", "", result.text)
    assert MARK not in text
    assert SECRET not in text
    assert len(result.text.encode()) < 1024 * 1024
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", result.text) is None
    assert len(result.files) <= 20
    for file in result.files:
        assert not file.name.startswith("/")
        assert ".." not in file.name.split("/")
        assert file.name.isprintable()
        assert SECRET.encode() not in file.data
        assert b"root:" not in file.data


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_that(name: str, python: Python, host: Host) -> None:
    program = PRELUDE.format(host=host.names(python)) + PROGRAMS[name]
    for _ in range(RUNS):
        async with asyncio.timeout(15):
            assert_harmless(await python.call(run_in(name, program)))
            # An interpreter that was broken may break once more; the next one is whole.
            assert_harmless(await python.call(run_in(name, "0")))
            await python.containers().delete(name, tenant="tenant")
            assert (await python.call(run_in("another", "6 * 7"))).text == "42"
        host.assert_untouched()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_program_leaves_a_container_that_has_a_network(host: Host) -> None:
    """The host's own port is closed to containers, also by way of the proxy's socket."""
    policy = {"type": "allowlist", "allowed_domains": ["a.example"]}
    async with started(scratch_mib=16, egress={"allowed_hosts": ["a.example"]}) as python:
        for name in PROGRAMS.keys() - {"opens sockets of the internet"}:  # which lead nowhere, and may be opened
            program = PRELUDE.format(host=host.names(python)) + PROGRAMS[name]
            new = CreateContainer.model_validate({"name": name, "network_policy": policy})
            await python.containers().create(new, tenant="tenant", container_id=name)
            async with asyncio.timeout(20):
                assert_harmless(await python.call(run_in(name, program)))
                with suppress(NotFound):  # its first process has ended
                    await python.containers().delete(name, tenant="tenant")
    host.assert_untouched()


async def test_what_gets_out_would_be_seen(host: Host) -> None:
    """Without a sandbox the programs of the tests do reach the host, so their failures elsewhere prove something."""
    async with started(backend="dangerously_unsandboxed", cpu_s=10) as python:
        for name in ("reads a file of the host", "looks for processes of the host", "connects to the session server"):
            result = await python.call(run_in(name, PRELUDE.format(host=host.names(python)) + PROGRAMS[name]))
            assert MARK in result.text


@pytest.mark.usefixtures("host")
def test_a_process_that_outlives_its_parents_would_be_seen() -> None:
    command = ["sh", "-c", "setsid sleep 100 > /dev/null & echo $!"]
    started_id = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert started_id in {process.pid for process in descendants()}
    finally:
        os.kill(started_id, signal.SIGKILL)
    os.waitpid(started_id, 0)
