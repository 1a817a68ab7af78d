"""Processes that other processes have started: those that run, and their end."""

import asyncio
import time
from contextlib import suppress

import psutil


def running_children(part: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the descendants of a process, of this one by default, that have `part` in their command, oldest first. One
    that ends meanwhile does not count."""
    running: list[psutil.Process] = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too: it has ended
            if part in " ".join(child.cmdline()):
                running.append(child)
    return sorted(running, key=psutil.Process.create_time)


async def assert_ended(processes: list[psutil.Process], within_s: float = 20) -> None:
    """Wait until each process has ended, and raise AssertionError for those that have not. One that has not been waited
    for yet counts as ended: where the first process of the machine is slow to do so, that takes long."""
    running, end = processes, time.monotonic() + within_s
    while running and time.monotonic() < end:
        _, alive = await asyncio.to_thread(psutil.wait_procs, running, 0.1)
        running = [process for process in alive if not _is_zombie(process)]
    assert running == []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return True
