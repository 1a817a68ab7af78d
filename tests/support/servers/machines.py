"""A deployment of several machines on one: each is a process group of `stack run --workers N`, with nginx in front."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.support.servers.forked_process import ROOT
from tests.support.servers.ports import free_port

START_S: Final = 100.0
STOP_S: Final = 60.0
_CLIENTS: Final = 4
"""Calls of a measurement at once."""
_NGINX: Final = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_rlimit_nofile 20000;
events {{ worker_connections 16000; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; client_max_body_size 64m;
  upstream machines {{ {servers} keepalive 64; }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location / {{
      proxy_pass http://machines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $host;
      proxy_buffering off; proxy_read_timeout 1h;
    }}
  }}
}}
"""


@dataclass
class Machine:
    """One machine: its run config, the folder of the code that it runs, and its port."""

    name: str
    folder: Path
    port: int
    workers: int
    code: Path = ROOT
    process: "asyncio.subprocess.Process | None" = None

    @property
    def url(self) -> str:
        """The address without nginx."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the server, and return when it is ready."""
        assert self.process is None
        arguments = ("run", str(self.folder / "run.yaml"), "--port", str(self.port), "--workers", str(self.workers))
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "stack",
                *arguments,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(self.code)},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while not (line := (await self.process.stdout.readline()).decode()).startswith("listening on "):
                assert line, f"{self.name} ended: {(self.folder / f'{self.name}.log').read_text()[-2000:]}"

    async def stop(self) -> None:
        """End the server in order."""
        if self.process is not None:
            self._send(signal.SIGTERM, is_group=False)
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
            self.process = None

    async def kill(self) -> None:
        """Kill the whole group at once, as the loss of a machine does."""
        if self.process is not None:
            self._send(signal.SIGKILL, is_group=True)
            await self.process.wait()
            self.process = None

    def _send(self, number: int, *, is_group: bool) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            if is_group:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """All processes of the machine."""
        if self.process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        return []


@dataclass
class Deployment:
    """The machines, and the address of nginx without /v1."""

    url: str
    machines: list[Machine] = field(default_factory=list[Machine])

    def cpu_s(self) -> float:
        """Return the CPU time that all processes of the machines have taken, in seconds."""
        return cpu_of(process for machine in self.machines for process in machine.processes())

    def memory_bytes(self) -> int:
        """Return the memory of all processes, what they share counted once in each by its share."""
        return sum(process.memory_full_info().pss for machine in self.machines for process in machine.processes())


def cpu_of(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes in seconds, with that of their children that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


async def measure_calls(
    cpu_s: Callable[[], float], call: Callable[[], Awaitable[Any]], count: int
) -> tuple[float, list[float]]:
    """Return the CPU of a call by the clock `cpu_s`, and the times of the calls, both in milliseconds."""
    times_ms: list[float] = []

    async def repeat() -> None:
        for _ in range(count // _CLIENTS):
            began = time.perf_counter()
            await call()
            times_ms.append((time.perf_counter() - began) * 1000)

    before_s = cpu_s()
    await asyncio.gather(*(repeat() for _ in range(_CLIENTS)))
    return (cpu_s() - before_s) * 1000 / count, times_ms


@asynccontextmanager
async def deployed(
    folder: Path, config: Mapping[str, Any], *, machines: int = 3, workers: int = 2, code: Path = ROOT
) -> AsyncGenerator[Deployment]:
    """Start machines of one run config, with code of this version or that of another checkout, and nginx in front."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(config)))
    fleet = [Machine(f"machine{number}", folder, free_port(), workers, code) for number in range(machines)]
    async with AsyncExitStack() as running:
        for machine in fleet:
            running.push_async_callback(machine.kill)
            running.push_async_callback(machine.stop)
        await asyncio.gather(*(machine.start() for machine in fleet))
        port = free_port()
        servers = " ".join(f"server 127.0.0.1:{machine.port} max_fails=0;" for machine in fleet)
        (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, servers=servers, port=port))
        nginx = await asyncio.create_subprocess_exec(
            "nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(START_S):
                while not await _listens(port):  # noqa: ASYNC110 - nginx sets no event
                    await asyncio.sleep(0.05)
            yield Deployment(f"http://127.0.0.1:{port}", fleet)
        finally:
            with suppress(ProcessLookupError):  # an interrupt ends it, too
                nginx.terminate()
            await nginx.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
