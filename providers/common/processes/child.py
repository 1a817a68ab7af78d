"""Programs of ours in child processes, for work that may crash, hang or exhaust memory.

A child gets the environment variables that it needs and no others, since they may hold secrets. What bounds its work is
`limits`, which it sets itself, and the parent's limits on time and output.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from providers.common.processes.process import DEVNULL, PIPE, start_process

_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_SYSTEM_VARIABLES: Final = ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP", "TZ", "LD_PRELOAD", "GLIBC_TUNABLES")
_COMPUTE_PREFIXES: Final = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "RAYON_", "TOKENIZERS_"),
    *("GGML_", "LLAMA_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "GPU_", "SYCL_", "ONEAPI_", "ZE_"),
    *("VK_", "MTL_", "METAL_", "MESA_", "XDG_", "PYTHON", "MALLOC_"),
)
_SECRET_ENDINGS: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS", "AUTH")
_READ_BYTES: Final = 2**16
_IDLE_STATUS: Final = -getattr(signal, "SIGALRM", 0)


def build_environment(names: Sequence[str] = (), prefixes: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a child: what every program needs, and the variables of these names and prefixes, but
    for those by prefix whose names say that they are secret."""
    needed, beginnings = {*_ENVIRONMENT, *names}, tuple(prefixes)
    return {
        name: value
        for name, value in os.environ.items()
        if name in needed or (name.startswith(beginnings) and not name.endswith(_SECRET_ENDINGS))
    }


def build_compute_environment() -> dict[str, str]:
    """Return the environment of a child that runs a model: also the settings of the libraries that compute."""
    return build_environment(_SYSTEM_VARIABLES, _COMPUTE_PREFIXES)


def build_command(program: Path) -> tuple[str, ...]:
    """Return the command of a program of ours, which has to find its own imports: `-I` adds no folder to the path."""
    return (sys.executable, "-I", str(program))


async def run_program(
    command: Sequence[str], task: Sequence[bytes], *, descriptors: Sequence[int], max_output_bytes: int
) -> bytes:
    """Return the whole output of a program that reads the task and ends, empty when it died or wrote too much. A caller
    that is cancelled ends the program."""
    process = await start_process(
        command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=build_environment(), descriptors=descriptors
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = bytearray()
    try:
        with suppress(ConnectionError):
            for data in task:
                process.stdin.write(data)
            await process.stdin.drain()
            process.stdin.close()
        while len(output) <= max_output_bytes and (chunk := await process.stdout.read(_READ_BYTES)):
            output += chunk
        is_complete = len(output) <= max_output_bytes and await process.wait() == 0
        return bytes(output) if is_complete else b""
    finally:
        await process.end()


class TaskDied(Exception):
    """The task ended its process, or took too long. `is_timeout` says that the time on the clock was over, which may
    be the machine's fault."""

    def __init__(self, *, is_timeout: bool) -> None:
        super().__init__()
        self.is_timeout = is_timeout


class TaskChild:
    """A process that does one task after the other, so that none has to wait for its start.

    It is started by the first task, and again by the next one after it has died. A program reads a line of JSON for
    each task, writes one for its result, and may end by SIGALRM when it has had no task for some time. Used by one
    thread at a time.
    """

    def __init__(self, program: Path, *, timeout_s: float, max_result_bytes: int) -> None:
        self._command = build_command(program)
        self._timeout_s = timeout_s
        self._max_result_bytes = max_result_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: Mapping[str, Any]) -> Any:
        """Return the result of the task. Raises TaskDied, and OSError if no process can be started."""
        line = json.dumps(task).encode() + b"\n"
        if self._process is not None and self._process.poll() is not None:  # it has died, and not of this task
            self.close()
        was_started = self._process is not None
        result, status = self._exchange(line)
        if was_started and status == _IDLE_STATUS:
            result, status = self._exchange(line)
        if status is not None:
            raise TaskDied(is_timeout=status == -signal.SIGKILL)
        return result

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, line: bytes) -> tuple[Any, int | None]:
        """Return the result; without one, the status with which the process ended."""
        process = self._process
        if process is None:
            process = self._process = subprocess.Popen(  # noqa: S603 - this Python and a program of ours
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=build_environment(),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._timeout_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with suppress(OSError):
                process.stdin.write(line)
                process.stdin.flush()
            written = process.stdout.readline(self._max_result_bytes)
            if written.endswith(b"\n"):
                return json.loads(written), None
            process.kill()
            return None, process.wait()
        finally:
            timer.cancel()
            if process.poll() is not None:
                self._process = None
                with suppress(OSError):
                    process.communicate()
