"""The tool `python` in bubblewrap: a notebook that keeps its state, says how it ended, and cleans up after itself."""

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from apis.containers import ContainerListParams
from apis.errors import ConfigError, ToolFailed
from apis.storage.kv_store import KVStore
from apis.tool_runtime import ToolCall, ToolResult
from providers.kv_store.memory import Memory
from providers.skills.kv import StoredSkills
from providers.tool_runtime.python.provider import Python
from tests.conformance.tool_runtime import LAWS, Subject, an_endless_call_ends_in_words
from tests.providers.tool_runtime.python.test_cgroup import find_control_groups
from tests.support.servers.ended_processes import assert_ended, running_children

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ENDLESS = "import time\nprint('begun', flush=True)\ntime.sleep(1000)"


def program(code: str, session: str | None = "session", tenant: str = "tenant") -> ToolCall:
    return ToolCall("call_1", "python", {"code": code}, tenant=tenant, session=session)


def memory() -> KVStore:
    return Memory(Memory.Config())


def build(kv_store: KVStore, **fields: Any) -> Python:
    return Python(Python.Config.model_validate(fields), None, kv_store, StoredSkills(StoredSkills.Config(), kv_store))


@asynccontextmanager
async def started(kv_store: KVStore | None = None, **fields: Any) -> AsyncGenerator[Python]:
    python = build(kv_store or memory(), **fields)
    await python.start()
    try:
        yield python
    finally:
        await python.close()


async def text_of(python: Python, code: str, session: str | None = "session", tenant: str = "tenant") -> str:
    async with asyncio.timeout(20):
        return (await python.call(program(code, session, tenant))).text


async def names(python: Python, tenant: str = "tenant") -> list[str]:
    """The sessions of a tenant, the oldest first."""
    return [each.id for each in (await python.containers().list(ContainerListParams(order="asc"), tenant=tenant)).data]


class SessionLog:
    """An event for each of two words in the log of session servers."""

    def __init__(self, pipe: int) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._read)

    def _read(self) -> None:
        text = os.read(self._pipe, 65536)
        if b"begins" in text:
            self.begun.set()
        if b"ended" in text:
            self.ended.set()


@pytest.fixture
async def session_log(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[SessionLog]:
    """Log of the session servers that are started from here on."""
    log = logging.getLogger("providers.tool_runtime")
    reading, writing = os.pipe()
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, stderr=writing))
    log.setLevel(logging.DEBUG)
    yield SessionLog(reading)
    log.setLevel(logging.NOTSET)
    asyncio.get_running_loop().remove_reader(reading)
    os.close(reading)
    os.close(writing)


@pytest.fixture
async def python(session_log: SessionLog) -> AsyncGenerator[Python]:
    async with started(timeout_s=5) as python:
        yield python


def server_socket(python: Python) -> Path:
    """The socket of the session server that a runtime uses."""
    return python._sessions._client._path  # pyright: ignore[reportPrivateUsage] - no one else needs it


def server_processes() -> list[psutil.Process]:
    """The session servers that this process has started, oldest first."""
    return [child for child in running_children("session_server") if child.ppid() == os.getpid()]


def sandboxes() -> set[psutil.Process]:
    """The outermost process of each sandbox of the session servers that this process has started."""
    return {child for server in server_processes() for child in server.children()}


# An endless program is no failed call here: what it printed until it was ended is a result, and so is why.
@pytest.mark.parametrize(
    "law", [law for law in LAWS if law is not an_endless_call_ends_in_words], ids=lambda law: law.__name__
)
async def test_conforms(session_log: SessionLog, law: Callable[[Subject], Awaitable[None]]) -> None:
    async with started(timeout_s=5) as python:
        endless = program(ENDLESS, "endless")

        class Watched(type(python)):  # the event is of the endless call, not of one before it
            async def call(self, call: ToolCall) -> ToolResult:
                session_log.begun.clear()
                session_log.ended.clear()
                return await super().call(call)

        python.__class__ = Watched
        await law(Subject(python, program("print(6 * 7)", None), endless, session_log.begun, session_log.ended))


async def test_an_endless_program_is_ended_and_its_output_returned() -> None:
    async with started(timeout_s=1) as python:
        result = await python.call(program(ENDLESS))
        assert result.text.startswith("begun\n\n[the Python session was ended: it ran for more than 1 s.")
        assert result.data == {"logs": "begun\n", "exit": "timed_out"}
        assert "NameError" in await text_of(python, "time")


async def test_variables_live_from_call_to_call(python: Python) -> None:
    assert await text_of(python, "x = 1\nprint('one')\nx + 1") == "one\n2"
    assert await text_of(python, "x += 1") == "[no output]"
    assert await text_of(python, "def f(): return x\nf(), _") == "(2, 2)"


async def test_sessions_share_nothing(python: Python) -> None:
    await text_of(python, "x = 1; open('f', 'w').close()")
    for session, tenant in (("other", "tenant"), ("session", "other"), (None, "tenant")):
        assert await text_of(python, "import os; 'x' in globals(), os.listdir()", session, tenant) == "(False, [])"
    assert await text_of(python, "x") == "1"


async def test_a_call_without_a_session_keeps_nothing(python: Python) -> None:
    assert await text_of(python, "x = 1", None) == "[no output]"
    assert "NameError" in await text_of(python, "x", None)
    assert await names(python) == []


async def test_an_exception_is_text_with_the_programs_own_lines(python: Python) -> None:
    result = await python.call(program("def f():\n    return 1 / 0\nf()"))
    assert result.text == (
        'Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    f()\n'
        '  File "<cell 1>", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero'
    )
    assert result.data["exit"] == "exception"
    assert "SyntaxError" in await text_of(python, "1 +")
    assert "ValueError" in await text_of(python, "a\0b")
    assert "SystemExit: 3" in await text_of(python, "raise SystemExit(3)")


async def test_standard_output_and_errors_stay_in_their_order(python: Python) -> None:
    code = (
        "import sys, os\nprint('a')\nprint('b', file=sys.stderr)\nos.system('echo c')\nprint('d', end='')\nprint('é')"
    )
    assert await text_of(python, code) == "a\nb\nc\ndé"


async def test_what_a_notebook_can(python: Python) -> None:
    assert await text_of(python, "import asyncio\nawait asyncio.sleep(0, 'waited')") == "'waited'"
    assert "EOFError" in await text_of(python, "input()")
    assert await text_of(python, "open('own.py', 'w').write('y = 7')\nimport own\nown.y") == "7\n\n[files: own.py]"
    shared = "import multiprocessing as m\ndef f(x): return x * x\nwith m.Pool(2) as pool: print(pool.map(f, range(4)))"
    assert await text_of(python, shared) == "[0, 1, 4, 9]"


async def test_new_and_changed_files_come_back(python: Python) -> None:
    first = await python.call(
        program("import os\nos.mkdir('d')\nfor n in ('a.csv', 'd/b.png', '.hidden'):\n    open(n, 'w').write(n)")
    )
    assert [(file.name, file.media_type, file.data) for file in first.files] == [
        ("a.csv", "text/csv", b"a.csv"),
        ("d/b.png", "image/png", b"d/b.png"),
    ]
    assert first.text == "[no output]\n[files: a.csv, d/b.png]"
    assert (await python.call(program("1"))).files == []
    changed = await python.call(program("open('a.csv', 'a').write('!')"))
    assert [file.data for file in changed.files] == [b"a.csv!"]


async def test_too_many_and_too_large_files_stay_inside(python: Python) -> None:
    many = await python.call(program("for n in range(30): open(f'{n:02}', 'w').close()"))
    assert len(many.files) == 20
    assert "[too many or too large to be given to the user: 20, 21," in many.text
    large = await python.call(program("f = open('large', 'wb'); f.truncate(17 << 20); f.close()"))
    assert large.files == []
    assert "large" in large.text


ENDS: list[tuple[str, str, str]] = [
    ("import os; os._exit(3)", "it exited with status 3", "crashed"),
    ("import ctypes; ctypes.string_at(0)", "it was ended by SIGSEGV", "crashed"),
    ("import os; os.abort()", "it was ended by SIGABRT", "crashed"),
    ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL", "crashed"),
    ("while True: pass", "it used more than 0.5 s of processor time", "cpu_limit"),
    (
        "import os, time\nfor _ in range(20):\n    if not os.fork():\n        x = b'x' * (20 << 20)\n"
        "        time.sleep(100)\ntime.sleep(100)",
        "it used more than 64 MiB of memory",
        "memory_limit",
    ),
]


async def test_a_session_that_ends_says_why_and_the_next_is_new() -> None:
    async with started(cpu_s=0.5, memory_mib=64) as python:
        for code, reason, how in ENDS:
            await text_of(python, "x = 1", how + reason)
            result = await python.call(program(f"print('before', flush=True)\n{code}", how + reason))
            assert result.text == (
                f"before\n\n[the Python session was ended: {reason}. Its variables are gone; its files are kept, "
                "and the next call begins a new session]"
            )
            assert result.data == {"logs": "before\n", "exit": how}
            assert "NameError" in await text_of(python, "x", how + reason)


async def test_memory_that_cannot_be_had_is_an_exception(python: Python) -> None:
    assert (await text_of(python, "bytearray(600 << 20)")).endswith("MemoryError")


async def test_a_cancelled_call_ends_its_session(python: Python, session_log: SessionLog) -> None:
    call = asyncio.ensure_future(python.call(program("x = 1\nimport time; time.sleep(100)")))
    async with asyncio.timeout(10):
        await session_log.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await session_log.ended.wait()
    assert "NameError" in await text_of(python, "x")


async def test_processes_rest_between_calls(python: Python) -> None:
    busy = "import os\npid = os.fork()\nif not pid:\n    while True: pass\n"
    clock = "sum(float(x) for x in open(f'/proc/{pid}/stat').read().split()[13:15])"
    before = sandboxes()
    await text_of(python, busy)
    (session,) = sandboxes() - before
    inner = session.children(recursive=True)
    assert [process.status() for process in inner] == [psutil.STATUS_STOPPED] * 3
    assert float(await text_of(python, clock)) >= 0
    assert await text_of(python, "os.kill(pid, 9); os.waitpid(pid, 0)[0] == pid") == "True"


async def test_an_idle_session_is_ended_and_the_next_call_says_so(session_log: SessionLog) -> None:
    async with started(idle_timeout_s=0.3) as python:
        await text_of(python, "x = 1")
        async with asyncio.timeout(10):
            await session_log.ended.wait()
        assert await names(python) == []
        text = await text_of(python, "1")
        assert re.fullmatch(
            r"\[this is a new Python session, the earlier one is gone: it was not used for .* minutes\]\n1", text
        )


async def test_the_session_unused_for_longest_makes_room() -> None:
    async with started(max_sessions=3) as python:
        for name in ("a", "b", "c", "a"):
            await text_of(python, "x = 1", name)
        await text_of(python, "x = 1", "d", "other")
        assert await names(python) == ["a", "c"]
        assert await text_of(python, "x", "a") == "1"
        assert "its place was needed for others" in await text_of(python, "x", "b")


async def test_no_session_in_use_is_taken_away(session_log: SessionLog) -> None:
    async with started(max_sessions=1) as python:
        call = asyncio.ensure_future(python.call(program(ENDLESS)))
        async with asyncio.timeout(10):
            await session_log.begun.wait()
        with pytest.raises(ToolFailed, match="in use"):
            await python.call(program("1", "other"))
        call.cancel()
        await asyncio.wait([call])


async def test_all_ends_with_the_server() -> None:
    server = f"""
import asyncio
from tests.providers.tool_runtime.python.test_python import program, started
async def serve():
    async with started() as python:
        await python.call(program("1", "idle"))
        await python.call(program("1", "busy"))
        busy = asyncio.ensure_future(python.call(program({ENDLESS!r}, "busy")))
        await python.call(program("1", "idle"))
        print("up", flush=True)
        await busy
asyncio.run(serve())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", server, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"up\n"
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 7
            session_server = children[0].pid
    finally:
        process.kill()
        await process.wait()
    await assert_ended(children)
    async with started():
        assert not find_control_groups(session_server)


async def test_without_bubblewrap_it_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        await build(memory()).start()


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ("--seccomp", "Seccomp 0"),
        ("--seccomp", "tracing a process"),
        ("--unshare-all", "sharing the server's net namespace"),
        ("--clearenv", "reading the server's environment"),
        ("--remount-ro", "writing below /"),
    ],
)
async def test_a_sandbox_that_does_not_hold_is_refused(
    left_out: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bwrap in the way that leaves an option out, as an old or a patched one might."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        fake = Path(folder, "bwrap")
        width = 2 if left_out in ("--seccomp", "--remount-ro") else 1
        instead = ["--unshare-pid", "--unshare-ipc", "--unshare-uts"] if left_out == "--unshare-all" else []
        fake.write_text(
            f"#!/usr/bin/python3\nimport os, sys\nargv = sys.argv[1:]\nwhile {left_out!r} in argv:\n"
            f"    at = argv.index({left_out!r})\n    argv[at : at + {width}] = {instead!r}\n"
            f"os.environ['LEFT_OVER'] = '1'\nos.execv({shutil.which('bwrap')!r}, ['bwrap', *argv])\n"
        )
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(ConfigError, match=re.escape(fault)):
            await build(memory()).start()
    assert [child for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"] == []


async def test_another_interpreter_can_be_named(tmp_path: Path) -> None:
    async with started(python="/usr/bin/python3") as python:
        assert await text_of(python, "import sys; sys.executable") == "'/usr/bin/python3'"
    with pytest.raises(ConfigError, match=r"tool_runtime\.python"):
        await build(memory(), python=tmp_path / "none").start()


async def test_the_unsafe_backend_must_be_named_and_is_the_same_notebook() -> None:
    before = set(psutil.Process().children(recursive=True))
    async with started(backend="dangerously_unsandboxed", timeout_s=2) as python:
        await text_of(python, "x = 1")
        assert await text_of(python, "x") == "1"
        folder = (await text_of(python, "import os; os.getcwd()")).strip("'")
        await text_of(python, "open('kept', 'w').close()")
        assert "timed_out" in str((await python.call(program(ENDLESS))).data)
        assert Path(folder, "kept").exists()
    assert not Path(folder).exists()
    more = set(psutil.Process().children(recursive=True)) - before
    assert await asyncio.to_thread(psutil.wait_procs, more, 10) == ([*more], [])


def test_nothing_is_asked_of_the_host_for_a_wrong_config() -> None:
    for wrong in ({"backend": "plain"}, {"memory_mib": 1}, {"max_sessions": 0}, {"max_output_bytes": 1 << 30}):
        with pytest.raises(ValueError, match="validation error"):
            Python.Config.model_validate(wrong)
