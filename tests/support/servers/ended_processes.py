"""Waits for the end of processes that other processes have started."""

import asyncio
import time

import psutil


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
