"""CPU and memory of the server under load: of its processes where they run here, otherwise from its /metrics."""

import asyncio
import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import psutil

from stack.bench.connection import LoadClient
from stack.bench.figures import RequestFailed

_SAMPLE_S: Final = 1.0
_METRICS_TIMEOUT_S: Final = 10.0
_FIGURE: Final = re.compile(
    r"^(process_cpu_seconds_total|process_resident_memory_bytes)(?:\{[^}]*\})? (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class LoadSample:
    cpu_s: float
    memory_bytes: int
    process_count: int


class ServerLoad:
    """Samples of one server between `start` and `stop`; both are None where neither source can be read."""

    def __init__(self, url: str, metrics_key: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._processes: list[psutil.Process] = []
        self._http = LoadClient(f"{parts.scheme}://{parts.netloc}", metrics_key, _METRICS_TIMEOUT_S)
        self.first: LoadSample | None = None
        self.last: LoadSample | None = None
        self.peak_memory_bytes = 0

    @property
    def source(self) -> str:
        return "processes" if self._processes else "/metrics"

    async def start(self) -> None:
        self._processes = await asyncio.to_thread(_find_processes, *self._address)
        self.first = await self._sample()

    async def watch(self) -> None:
        """Note the highest memory once a second, where that costs the server nothing; runs until it is cancelled."""
        while self._processes:
            await asyncio.sleep(_SAMPLE_S)
            await self._sample()

    async def stop(self) -> None:
        self.last = await self._sample()
        await self._http.close()

    async def _sample(self) -> LoadSample | None:
        listening = self._processes
        sample = await (asyncio.to_thread(_sample_processes, listening) if listening else self._scrape())
        if sample is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes, sample.memory_bytes)
        return sample

    async def _scrape(self) -> LoadSample | None:
        parts: list[bytes] = []
        try:
            await self._http.send("GET", "/metrics", b"", parts.append)
        except RequestFailed:
            return None
        figures = _FIGURE.findall(b"".join(parts).decode(errors="replace"))
        cpu_s = [float(number) for name, number in figures if name == "process_cpu_seconds_total"]
        memory_bytes = [float(number) for name, number in figures if name != "process_cpu_seconds_total"]
        return LoadSample(sum(cpu_s), int(sum(memory_bytes)), len(cpu_s)) if cpu_s else None


def _find_processes(host: str, port: int) -> list[psutil.Process]:
    """Return the processes of a Python server that listens on a port of this machine; without rights to see them, or
    if a proxy or this process itself listens there, none."""
    try:
        if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
            return []
        connections = psutil.net_connections("tcp")
    except (ValueError, psutil.Error):
        return []
    listening = {each.pid for each in connections if each.status == psutil.CONN_LISTEN and tuple(each.laddr)[1] == port}
    processes: list[psutil.Process] = []
    for pid in sorted(pid for pid in listening if pid):
        try:
            process = _climb_to_parent(psutil.Process(pid))
            if process.pid == os.getpid() or not any(word in process.name() for word in ("python", "stack")):
                return []
            if process not in processes:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def _climb_to_parent(process: psutil.Process) -> psutil.Process:
    """Return the process of `stack run` for one of its workers: of all who share a socket psutil names one. A forked
    worker has the command line of its parent."""
    parent, arguments = process.parent(), process.cmdline()
    if parent is None:
        return process
    is_worker = any("multiprocessing" in argument for argument in arguments) or arguments == parent.cmdline()
    return parent if is_worker else process


def _sample_processes(listening: list[psutil.Process]) -> LoadSample | None:
    """Return the sums over the processes and all their descendants."""
    tree: dict[int, psutil.Process] = {}
    for process in listening:
        try:
            tree |= {each.pid: each for each in (process, *process.children(recursive=True))}
        except psutil.Error:
            continue
    cpu_s, memory_bytes = 0.0, 0
    for process in tree.values():
        try:
            with process.oneshot():
                times = process.cpu_times()
                cpu_s += times.user + times.system
                memory_bytes += process.memory_info().rss
        except psutil.Error:
            continue
    return LoadSample(cpu_s, memory_bytes, len(tree)) if tree else None
