"""Limits that a child process sets for itself, on systems that have them."""

import signal
import sys


def limit_process(max_memory_bytes: int, max_cpu_s: int | None = None) -> None:
    """Limit the address space of this process, and the processor time of its whole life. It can write no file and
    leaves no core dump. Systems without rlimits (Windows) have the parent's time limit only."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not there on every system

        if max_cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_task(cpu_s: float) -> None:
    """End this process after so much more processor time; 0 takes the limit away."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def limit_wait(wait_s: int) -> None:
    """End this process after so many seconds; 0 takes the limit away."""
    if sys.platform != "win32":
        signal.alarm(wait_s)
