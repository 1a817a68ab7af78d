"""The machine as the local engine sees it: cores, memory, and the devices that can hold a model."""

import asyncio
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

_CHILD_SCRIPT: Final = Path(__file__).with_name("device_child.py")
_PROBE_TIMEOUT_S: Final = 30.0
_GB: Final = 1e9
_CGROUP: Final = Path("/sys/fs/cgroup")
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")
_WAIT_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and usage of a container's memory, by the two versions of control groups."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Device with memory of its own, except for Metal, which shares the machine's."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """`cores` are those of `usable_cores`. `free_bytes` of `total_bytes` of memory are available to new processes, also
    within a container's limit."""

    cores: int
    free_bytes: int
    total_bytes: int
    accelerators: tuple[Accelerator, ...] = ()

    @property
    def model_bytes(self) -> int:
        """Bytes that models may take: nine tenths of what is free, on devices with their own memory and here."""
        return round(0.9 * (self.free_bytes + self._device_bytes))

    @property
    def is_cpu_only(self) -> bool:
        return not self.accelerators

    @property
    def _device_bytes(self) -> int:
        return 0 if _shares_memory() else sum(device.free_bytes for device in self.accelerators)

    def __str__(self) -> str:
        memory = f"{self.free_bytes / _GB:.1f} of {self.total_bytes / _GB:.1f} GB of memory free"
        devices = ", ".join(
            f"{device.name} with {device.free_bytes / _GB:.1f} of {device.total_bytes / _GB:.1f} GB free"
            for device in self.accelerators
        )
        return f"{self.cores} cores, {memory}, {devices or 'CPU only'}"


async def inspect_machine() -> LocalMachine:
    """Return the machine with its devices, which a child process looks up: their drivers never load in the server."""
    memory, cores, devices = await asyncio.gather(
        asyncio.to_thread(read_memory), asyncio.to_thread(usable_cores), _list_devices()
    )
    free_bytes, total_bytes = memory
    return LocalMachine(cores, free_bytes, total_bytes, devices)


def usable_cores() -> int:
    """Return the number of threads that can compute at once: the cores of this process, within a container's quota of
    CPU time and OpenMP's own variables."""
    # Windows and macOS bind no process to cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [int(text) for name in _THREAD_VARIABLES if (text := os.environ.get(name, "").strip()).isdecimal()]
    if (quota := _read_cpu_quota(_CGROUP)) is not None:
        limits.append(int(quota))
    return max(1, min([cores, *limits]))


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that computes with so many threads.

    OpenMP's threads spin while they wait for each other. Where they take all cores, a thread that spins keeps the one
    that it waits for from running as soon as anything else runs: 1 token per second instead of 11 to 90 was measured.
    There they sleep, unless the operator's own variables say how they wait.
    """
    if threads < usable_cores() or any(name in os.environ for name in _WAIT_VARIABLES):
        return dict(os.environ)
    return {**os.environ, "OMP_WAIT_POLICY": "passive"}


def _read_cpu_quota(folder: Path) -> float | None:
    """Return the cores' worth of CPU time that a container may use, None without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        numbers = [_read_number(folder / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = ("max" if number is None or number <= 0 else str(number) for number in numbers)
    return float(quota) / float(period) if "max" not in (quota, period) else None


def read_memory() -> tuple[int, int]:
    """Return the free and the total bytes of memory, the container's where it has a limit."""
    memory = psutil.virtual_memory()
    free_bytes, total_bytes = int(memory.available), int(memory.total)
    for limit_name, usage_name in _CGROUP_FILES:
        limit, usage = _read_number(_CGROUP / limit_name), _read_number(_CGROUP / usage_name)
        if limit is not None and usage is not None and limit < total_bytes:
            # The page cache counts as usage, and the kernel takes it back when it is needed.
            cached = _read_inactive_file_bytes()
            total_bytes, free_bytes = limit, min(free_bytes, max(0, limit - usage + cached))
    return free_bytes, total_bytes


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_inactive_file_bytes() -> int:
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _shares_memory() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


async def _list_devices() -> tuple[Accelerator, ...]:
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(_CHILD_SCRIPT)), stdin=null, stdout=pipe, stderr=null
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            rows: list[dict[str, Any]] = json.loads(await process.stdout.readline() or b"[]")
    except (TimeoutError, ValueError):
        rows = []
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return tuple(Accelerator(**row) for row in rows)
