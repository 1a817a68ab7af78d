"""Commands that start a Python process for untrusted programs: in bubblewrap, or (never by default) unsandboxed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from providers.tool_runtime.python.seccomp import seccomp_filter

INSTALL_HINT: Final = "install it with `apt-get install bubblewrap`, or choose another tool runtime"
MIB: Final = 1024 * 1024

# Far above what the work folder needs, far below what would fill the kernel's memory with empty files.
MAX_INODES: Final = 20_000

_GUEST_PROGRAM: Final = Path(__file__).with_name("guest.py").read_bytes()
_NOBODY_UID: Final = 65534
WORK_FOLDER: Final = "/mnt/data"
_PROBE_TIMEOUT_S: Final = 10

# The server's own environment never enters. Threads are few: each counts as a process and costs address space.
ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/mnt/tmp",
    "TMPDIR": "/mnt/tmp",
    "USER": "python",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "Agg",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "2",
}


class SandboxUnavailable(Exception):
    """The sandbox cannot be used on this machine. The text is for the operator and names the remedy."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one session. `wall_s`, `cpu_s` and `output_bytes` are per call, the others for the whole session."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    processes: int
    scratch_bytes: int
    output_bytes: int

    def rlimits(self) -> dict[str, int]:
        """Return the limits that the kernel enforces for each process. The address space is wider than the memory,
        because libraries reserve much that they never touch."""
        return {
            "RLIMIT_DATA": self.memory_bytes,
            "RLIMIT_AS": 3 * self.memory_bytes,
            "RLIMIT_FSIZE": self.scratch_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 512,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 256,
        }


@dataclass(frozen=True, slots=True)
class GuestLaunch:
    """Command to start one guest, and its first message: its work folder, and the limits that it sets on itself."""

    argv: Sequence[str]
    pass_fds: Sequence[int]
    folder: str
    rlimits: dict[str, int]


class Sandbox(Protocol):
    """Way of starting guests. The work folder of one that is not isolated is for the session to remove."""

    is_isolated: bool

    def launch(self, channel_fd: int, limits: SandboxLimits) -> AbstractContextManager[GuestLaunch]:
        """Open what a guest needs that communicates on the descriptor `channel_fd`, and close it on exit."""
        ...


class Bubblewrap:
    """Sandbox with namespaces of its own, no capabilities, no network, a read-only /usr, and one small tmpfs.

    The interpreter is `python`, or else one below /usr: bound are only /usr, the linker's cache and, for a `python`
    elsewhere, its prefixes. A server that runs as root starts the sandbox as uid 65534, since root is exempt from
    the limit on processes. Construction raises SandboxUnavailable when something it needs is missing.
    """

    is_isolated = True

    def __init__(self, python: Path | None) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable(f"tool_runtime: the program `bwrap` of bubblewrap was not found; {INSTALL_HINT}")
        try:
            self._seccomp_filter = seccomp_filter()
        except LookupError:
            raise SandboxUnavailable(
                "tool_runtime: the Python sandbox knows x86_64 and aarch64 machines only"
            ) from None
        self._python = str(python or _find_system_python())
        prefixes = _find_prefixes(python) if python else []
        self._command_prefix = [
            *_build_setpriv_command(),
            bwrap,
            *_build_isolation_options(),
            *_build_system_folder_options(),
            *_build_bind_options(prefixes),
        ]

    @contextmanager
    def launch(self, channel_fd: int, limits: SandboxLimits) -> Generator[GuestLaunch]:
        """See Sandbox."""
        with _open_data_pipe(self._seccomp_filter) as seccomp, _open_data_pipe(_GUEST_PROGRAM) as guest:
            argv = [
                *self._command_prefix,
                *_build_scratch_options(limits),
                *("--seccomp", str(seccomp), "--ro-bind-data", str(guest), "/guest.py"),
                *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_FOLDER),
                *("--", self._python, "-I", "/guest.py", str(channel_fd)),
            ]
            yield GuestLaunch(argv, (channel_fd, seccomp, guest), WORK_FOLDER, limits.rlimits())


class DangerouslyUnsandboxed:
    """Child process with the server's own rights and network, in a temporary folder. Nothing is contained."""

    is_isolated = False

    def __init__(self, python: Path | None) -> None:
        self._python = str(python or sys.executable)

    @contextmanager
    def launch(self, channel_fd: int, limits: SandboxLimits) -> Generator[GuestLaunch]:
        """See Sandbox."""
        # NPROC counts all processes of the user, the server's own threads among them.
        rlimits = {name: value for name, value in limits.rlimits().items() if name != "RLIMIT_NPROC"}
        folder = tempfile.mkdtemp(prefix="python-tool-")
        yield GuestLaunch(
            [self._python, "-I", "-c", _GUEST_PROGRAM.decode(), str(channel_fd)], (channel_fd,), folder, rlimits
        )


@contextmanager
def _open_data_pipe(data: bytes) -> Generator[int]:
    """Open a descriptor from which `data` can be read; it must fit into a pipe: 64 KiB."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as stream:
            stream.write(data)
        yield reading
    finally:
        os.close(reading)


def _build_setpriv_command() -> list[str]:
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxUnavailable("tool_runtime: a server run by root needs `setpriv`: `apt-get install util-linux`")
    return [setpriv, "--reuid", str(_NOBODY_UID), "--regid", str(_NOBODY_UID), "--clear-groups", "--no-new-privs", "--"]


def _build_isolation_options() -> list[str]:
    settings = [item for name, value in ENVIRONMENT.items() for item in ("--setenv", name, value)]
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--clearenv"),
        *("--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--hostname", "python"),
        *settings,
    ]


def _build_system_folder_options() -> list[str]:
    """Bind /usr and the system's folders next to it, which are links into it or folders of their own."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib32", "lib64", "bin", "sbin"):
        folder = Path("/", name)
        if folder.is_symlink():
            options += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            options += ["--ro-bind", str(folder), str(folder)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        options += ["--ro-bind-try", name, name]
    return options


def _build_scratch_options(limits: SandboxLimits) -> list[str]:
    """Mount all that can be written: one tmpfs for files, and one of a fourth of its size for shared memory."""
    return [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(limits.scratch_bytes // 4), "--tmpfs", "/dev/shm"),  # noqa: S108 - the sandbox's own
        *("--size", str(limits.scratch_bytes), "--tmpfs", "/mnt", "--dir", WORK_FOLDER, "--dir", "/mnt/tmp"),
        *("--symlink", "mnt/tmp", "/tmp"),  # noqa: S108 - the sandbox's own
    ]


def _build_bind_options(prefixes: Sequence[str]) -> list[str]:
    return [item for prefix in prefixes if not _is_below_usr(prefix) for item in ("--ro-bind", prefix, prefix)]


def _is_below_usr(path: str) -> bool:
    return Path(path).resolve().is_relative_to("/usr")


def _find_system_python() -> Path:
    for path in (f"{sys.base_prefix}/bin/python3", "/usr/bin/python3", "/usr/local/bin/python3"):
        if _is_below_usr(path) and os.access(path, os.X_OK):
            return Path(path)
    raise SandboxUnavailable(
        "tool_runtime: no Python below /usr for the sandbox; install one with `apt-get install python3`, "
        "or name one with `python`"
    )


def _find_prefixes(python: Path) -> list[str]:
    """Return the prefixes of an interpreter: that of its virtual environment, and that of the Python below it."""
    program = "import sys; print(sys.prefix); print(sys.base_prefix)"
    try:
        output = subprocess.run(  # noqa: S603 - the operator's own choice of interpreter, from the run config
            [python, "-I", "-c", program], capture_output=True, check=True, env={}, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise SandboxUnavailable(f"tool_runtime.python: {python} does not run: {exc}") from exc
    return list(dict.fromkeys(output.stdout.split("\n")[:2]))
