"""A served stack as its clients, its operator and its supervisor see it: real processes, real signals."""

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import httpx
import psutil
import pytest
import uvicorn
import yaml
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from apis.errors import ConfigError
from stack.server_config import HttpServerConfig
from stack.serving.connection import HttpServerConnection
from stack.serving.launch import find_python_files
from stack.serving.listener import bind_listener, listener_url
from tests.support.sdk.client import TLS
from tests.support.servers.forked_process import ForkedProcess, forked_process
from tests.support.waiting import until

BOUND_S = 60.0
# Far more than it takes and far less than the default grace period, on however busy a machine.
SOON_S = 10.0
# On a machine so busy that a cut-off takes a second, the watchdog comes first.
ENDED = (0, 1)
SCRIPT = """
import signal, sys
from stack.serving.exit_codes import exit_on_error
from stack.serving.launch import LaunchOptions, run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where `nohup` runs the tests
with exit_on_error():
    sys.exit(run(LaunchOptions(sys.argv[1], {"port": 0}, "tests.stack.tiny:create_app"), **eval(sys.argv[2])))
"""


@dataclass
class Running:
    """A served tiny app: its process, its run config, where it listens, and all it has said so far."""

    process: ForkedProcess
    file: Path
    said: list[str] = field(default_factory=list[str])
    url: str = ""

    async def listening(self) -> None:
        """Wait until it says that it listens; each call waits for the next time."""
        async for line in self.process.stdout:
            self.said.append(line.decode().rstrip())
            if self.said[-1].startswith("listening on "):
                self.url = self.said[-1].removeprefix("listening on ")
                return
        pytest.fail(f"It ended: {await self.errors()}")

    async def end(self) -> tuple[int, float]:
        """The exit code, and the seconds until it came."""
        started = time.monotonic()
        code = await self.process.wait()
        return code, time.monotonic() - started

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def launched(
    tmp_path: Path, *, server: object = None, run: object = None, **inference: object
) -> AsyncGenerator[Running]:
    file = tmp_path / "run.yaml"
    sections = {"inference": {"provider": "tests.stack.tiny:Silent", **inference}, "server": server or {}}
    file.write_text(yaml.safe_dump({**sections, "kv_store": {"provider": "tests.stack.tiny:Bare"}}))
    async with (
        forked_process(SCRIPT, str(file), repr(run or {}), cwd=tmp_path) as process,
        asyncio.timeout(BOUND_S),
    ):
        yield Running(process, file)


@asynccontextmanager
async def serving(
    tmp_path: Path, *, server: object = None, run: object = None, **inference: object
) -> AsyncGenerator[Running]:
    async with launched(tmp_path, server=server, run=run, **inference) as running:
        await running.listening()
        yield running


@dataclass
class Stream:
    """A request to /stream whose body is still open, and so is its answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def finish(self) -> str:
        self.writer.write(b"0\r\n\r\n")
        return await self.rest()

    async def rest(self) -> str:
        return (await self.reader.read()).decode()


@asynccontextmanager
async def streaming(at: str) -> AsyncGenerator[Stream]:
    where = httpx.URL(at)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        writer.write(b"POST /stream HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await reader.readuntil(b"begun")
        yield Stream(reader, writer)
    finally:
        writer.close()


async def status(at: str) -> int:
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
        return (await client.get(at)).status_code


async def until_draining(at: str) -> float:
    """Seconds until the readiness probe says no."""
    started = time.monotonic()
    with suppress(httpx.ConnectError):  # it has closed the port already
        while await status(f"{at}/readyz") != 503:
            pass
    return time.monotonic() - started


async def pid(at: str) -> int:
    async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
        return int((await client.get(f"{at}/pid")).text)


# --- one process -----------------------------------------------------------------------------------------------------


async def test_it_says_what_is_wired_and_then_where_it_listens(tmp_path: Path) -> None:
    async with serving(tmp_path, model="m") as running:
        assert [line.split() for line in running.said[:-1]] == [
            ["inference", "tests.stack.tiny:Silent", "model=m"],
            ["responses", "loop"],
            ["agents", "kv"],
            ["kv_store", "tests.stack.tiny:Bare"],
            *(["traces", "kv"], ["accounts", "config"], ["webhooks", "kv"]),
            ["fetcher", "safe"],
            ["reader", "child"],
        ]
        assert await status(f"{running.url}/readyz") == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_ends_at_once_and_well(tmp_path: Path, number: int) -> None:
    async with serving(tmp_path) as running:
        running.signal(number)
        code, seconds = await running.end()
        assert (code, await running.errors()) == (0, "")
        assert seconds < SOON_S


async def refuses_connections(at: str) -> bool:
    where = httpx.URL(at)
    try:
        _, writer = await asyncio.open_connection(where.host, where.port)
    except (ConnectionRefusedError, ConnectionResetError):  # reset: the port was closed while this one waited
        return True
    writer.close()
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_draining_server_finishes_its_streams_and_then_refuses_connections(tmp_path: Path, number: int) -> None:
    """A proxy chooses another server when the port is closed; SIGHUP drains, too; the log says it."""
    async with serving(tmp_path) as running, streaming(running.url) as stream:
        running.signal(number)
        assert await until_draining(running.url) < SOON_S
        async with httpx.AsyncClient(trust_env=False, verify=TLS) as client:
            late = await client.get(f"{running.url}/pid")
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        await until(lambda: refuses_connections(running.url))
        assert "ended" in await stream.finish()
        code, seconds = await running.end()
        [line] = (await running.errors()).splitlines()
        assert re.search(
            r"Finishing (1 request|\d requests) for at most 30 s. Ctrl-C or a second signal ends now", line
        )
        assert code == 0
        assert seconds < SOON_S


async def test_after_the_grace_period_what_still_runs_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path, server={"grace_period_s": 0.5}) as running, streaming(running.url) as stream:
        running.signal()
        code, seconds = await running.end()
        assert "ended" not in await stream.rest()
        errors = await running.errors()
        assert code in ENDED
        assert 0.4 < seconds < SOON_S
        assert "1 request still ran when the grace period of 0.5 s was over and was ended with an error." in errors
        assert len(errors.splitlines()) == 2


async def test_a_second_signal_ends_it_within_a_second(tmp_path: Path) -> None:
    async with serving(tmp_path) as running, streaming(running.url):
        running.signal()
        await until_draining(running.url)
        running.signal()
        code, seconds = await running.end()
        assert "1 request still ran at the second signal and was ended" in await running.errors()
        assert code in ENDED
        assert seconds < SOON_S


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path, server={"grace_period_s": 0.5}) as running:
        where = httpx.URL(running.url)
        with socket.create_connection((where.host, where.port)) as deaf:
            deaf.sendall(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
            deaf.recv(1)
            running.signal()
            code, seconds = await running.end()
        assert code in ENDED
        assert seconds < SOON_S


async def test_a_close_that_hangs_is_ended_with_the_tracebacks_that_show_where(tmp_path: Path) -> None:
    async with serving(tmp_path, server={"grace_period_s": 0.2}, close="hang") as running:
        running.signal()
        code, seconds = await running.end()
        assert code == 1
        assert seconds < SOON_S
        assert "in close" in await running.errors()


@pytest.mark.parametrize(("start", "code"), [("config_error", 78), ("unavailable", 1)])
async def test_a_start_that_fails_is_one_message_and_an_exit_code(tmp_path: Path, start: str, code: int) -> None:
    async with launched(tmp_path, start=start) as running:
        assert (await running.end())[0] == code
        messages = {78: "there is no such model. Name another.\n", 1: "Nobody answers there.\n"}
        assert await running.errors() == messages[code]


async def test_a_port_in_use_is_an_error_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind_listener(HttpServerConfig(port=port))
    assert str(caught.value) == (
        f"server: cannot listen on 127.0.0.1 port {port}: Address already in use. Choose another with server.host and "
        "server.port, or --host and --port."
    )


@pytest.mark.parametrize(("host", "begins"), [("localhost", "http://"), ("::1", "http://[::1]:")])
def test_names_and_both_families_can_be_bound(host: str, begins: str) -> None:
    with bind_listener(HttpServerConfig(host=host, port=0)) as listener:
        assert listener_url(listener).startswith(begins)


# --- several ---------------------------------------------------------------------------------------------------------


def children(running: Running) -> list[psutil.Process]:
    every = psutil.process_iter(["ppid", "status"])  # without those that end while it looks
    return [one for one in every if one.info["ppid"] == running.process.pid and one.info["status"] != "zombie"]


async def test_a_worker_that_dies_is_replaced_and_all_drain_together(tmp_path: Path) -> None:
    async with serving(tmp_path, run={"workers": 2}) as running:
        first = await pid(running.url)
        os.kill(first, signal.SIGKILL)
        while len({child.pid for child in children(running)} - {first}) < 2:
            await asyncio.to_thread(psutil.wait_procs, [psutil.Process()], timeout=0.05)
        assert await pid(running.url) != first
        async with streaming(running.url) as stream:
            running.signal()
            await until_draining(running.url)
            assert "ended" in await stream.finish()
        assert (await running.end())[0] == 0


async def test_workers_do_not_outlive_their_parent(tmp_path: Path) -> None:
    async with serving(tmp_path, run={"workers": 2}) as running:
        while len(workers := children(running)) < 2:  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.05)
        running.signal(signal.SIGKILL)
        gone, _ = await asyncio.to_thread(psutil.wait_procs, workers, timeout=BOUND_S)
        assert len(gone) == 2


async def test_when_no_worker_can_start_the_whole_ends_with_its_message(tmp_path: Path) -> None:
    async with launched(tmp_path, run={"workers": 2}, start="config_error") as running:
        assert (await running.end())[0] == 78
        assert set((await running.errors()).splitlines()) == {"there is no such model. Name another."}


async def test_a_changed_run_config_is_loaded_again(tmp_path: Path) -> None:
    async with serving(tmp_path, run={"reload": True}) as running:
        before = await pid(running.url)
        text = running.file.read_text()
        while running.process.returncode is None:
            running.file.write_text(text)
            os.utime(running.file)
            try:
                async with asyncio.timeout(15):
                    await running.listening()
                break
            except TimeoutError:
                continue
        assert await pid(running.url) != before
        running.signal()
        assert (await running.end())[0] == 0


def test_reloading_leaves_out_hidden_folders_and_virtual_environments(tmp_path: Path) -> None:
    for name in (
        "app.py",
        "part/tool.py",
        ".git/hook.py",
        "env/lib/package.py",
        "part/.venv/lib/package.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env/pyvenv.cfg").write_text("")
    assert set(find_python_files(tmp_path)) == {tmp_path / "app.py", tmp_path / "part/tool.py"}


# --- slow and large senders ------------------------------------------------------------------------------------------


class Hasty(HttpServerConnection):
    silent_s: ClassVar[float] = 0.3
    head_s: ClassVar[float] = 0.3
    body_s: ClassVar[float] = 0.3
    max_head_bytes: ClassVar[int] = 1024


class Slower(Hasty):
    body_s: ClassVar[float] = 1.0
    """A machine with other work stands still for less."""


@asynccontextmanager
async def connected(
    protocol: type[HttpServerConnection] = Hasty,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", interface="asgi3", access_log=False)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: protocol(config, ServerState(), {}, loop), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(BOUND_S):
            yield reader, writer
    finally:
        writer.close()
        server.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab"],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_slow_body_is_waited_for_while_it_keeps_its_pace() -> None:
    async with connected(Slower) as (reader, writer):
        size = 4 * int(Slower.body_s * Slower.body_bytes_per_s)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        loop = asyncio.get_running_loop()
        for _ in range(4):
            writer.write(b"x" * (size // 4))
            turn = loop.create_future()
            loop.call_later(Slower.body_s / 2, turn.set_result, None)
            await turn
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_connection_may_be_used_again_after_its_first_request() -> None:
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" in await reader.readuntil(b"ok")
        writer.write(b"GET / HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_head_without_end_is_refused() -> None:
    async with connected() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"x" * (300 * 1024))
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
