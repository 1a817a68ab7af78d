"""Threads of a local model: how many there are, and how they wait for each other."""

from typing import Final

import psutil

from providers.common.machine import usable_cores
from providers.common.processes.child import build_compute_environment

_WAIT_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def default_threads() -> int:
    """Return the number of threads of a model: one for each physical core, and one core less than this process may use,
    which serves the requests."""
    cores = usable_cores()
    return max(min(psutil.cpu_count(logical=False) or cores, cores - 1), 1)


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that computes with so many threads.

    OpenMP's threads spin while they wait for each other. Where they take all cores, a thread that spins keeps the one
    that it waits for from running as soon as anything else runs: 1 token per second instead of 11 to 90 was measured.
    There they sleep, unless the operator's own variables say how they wait.
    """
    environment = build_compute_environment()
    if threads < usable_cores() or any(name in environment for name in _WAIT_VARIABLES):
        return environment
    return {**environment, "OMP_WAIT_POLICY": "passive"}
