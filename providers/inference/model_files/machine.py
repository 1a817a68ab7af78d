"""The machine as models see it: cores, memory, and the devices that can hold one."""

import asyncio
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from providers.common.machine import read_memory, usable_cores
from providers.common.processes.child import build_compute_environment
from providers.common.processes.process import DEVNULL, PIPE, start_process

_CHILD_SCRIPT: Final = Path(__file__).with_name("device_child.py")
_PROBE_TIMEOUT_S: Final = 30.0
_GB: Final = 1e9


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
    return LocalMachine(cores, memory.free_bytes, memory.total_bytes, devices)


def _shares_memory() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


async def _list_devices() -> tuple[Accelerator, ...]:
    process = await start_process(
        (sys.executable, "-P", str(_CHILD_SCRIPT)),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=DEVNULL,
        env=build_compute_environment(),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            rows: list[dict[str, Any]] = json.loads(await process.stdout.readline() or b"[]")
    except (TimeoutError, ValueError):
        rows = []
    finally:
        await process.end()
    return tuple(Accelerator(**row) for row in rows)
