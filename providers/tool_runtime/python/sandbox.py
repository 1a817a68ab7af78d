"""Commands that start a Python process for untrusted programs: in bubblewrap, or (never by default) unsandboxed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from apis.confinement.bubblewrap import (
    INSTALL_HINT,
    UNPRIVILEGED_UID,
    BubblewrapUnavailable,
    build_isolation_command,
    build_proc_options,
    find_closed_folder,
    is_below_usr,
    open_data_pipe,
)
from apis.confinement.seccomp import sandbox_filter
from apis.skills.bundle import SkillFile
from providers.common.processes.process import open_memory_file
from providers.tool_runtime.python.egress.environment import CERTIFICATES_FILE, NetworkAccess
from providers.tool_runtime.python.skill_files import Mount, open_skill_files

REMEDY: Final = f"{INSTALL_HINT}, or choose another tool runtime"
MIB: Final = 1024 * 1024

# Far above what the work folder needs, far below what would fill the kernel's memory with empty files.
MAX_INODES: Final = 20_000

_GUEST_PROGRAM: Final = Path(__file__).with_name("guest.py").read_bytes()
WORK_FOLDER: Final = "/mnt/data"
WORKSPACE_FOLDER: Final = "/workspace"
"""Work folder of a workspace, with all that programs may write in it: home and temporary files, too."""
_WORKSPACE_HOME: Final = f"{WORKSPACE_FOLDER}/.managed-agents/tmp"
_PROBE_TIMEOUT_S: Final = 10
_RESERVED_ADDRESS_BYTES: Final = 512 * MIB
"""Address space in addition to the memory: libraries and threads reserve much that they never touch."""
_OPEN_FILES: Final = 128
"""Descriptors of a process: each socket may hold some 300 KiB of the kernel's memory, which no rlimit counts."""
_OWN_MOUNTS: Final = ("/dev", "/mnt", "/proc", "/tmp", WORKSPACE_FOLDER)  # noqa: S108 - the sandbox's own
"""Folders that every sandbox has of its own, so that nothing of the host can be seen below them."""

# The server's own environment never enters. Threads are few: each counts as a process and costs address space.
ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/mnt/tmp/packages/bin:/mnt/tmp/npm/node_modules/.bin",
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
        """Return the limits that the kernel enforces for each process."""
        return {
            "RLIMIT_DATA": self.memory_bytes,
            "RLIMIT_AS": self.memory_bytes + _RESERVED_ADDRESS_BYTES,
            "RLIMIT_FSIZE": self.scratch_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": _OPEN_FILES,
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

    def launch(
        self,
        channel_fd: int,
        limits: SandboxLimits,
        skill_files: Sequence[SkillFile] = (),
        network: NetworkAccess | None = None,
        *,
        is_workspace: bool = False,
    ) -> AbstractContextManager[GuestLaunch]:
        """Open what a guest needs that communicates on the descriptor `channel_fd`, and close it on exit. The skills'
        files are below SKILLS_FOLDER where the guest is isolated. The work folder of a workspace is
        WORKSPACE_FOLDER."""
        ...


class Bubblewrap:
    """Sandbox with namespaces of its own, no capabilities, no network, a read-only /usr, and one small tmpfs.

    The interpreter is `python`, or else one below /usr: bound are only /usr, the linker's cache and, for a `python`
    elsewhere, its prefixes. A server that runs as root starts the sandbox as uid 65534, since root is exempt from
    the limit on processes. With `allow_loopback` programs may connect to servers of their own, as they may where they
    have access to a proxy. Construction raises SandboxUnavailable when something it needs is missing.
    """

    is_isolated = True

    def __init__(self, python: Path | None, *, allow_loopback: bool = False) -> None:
        self.allow_loopback = allow_loopback
        try:
            self._seccomp_filter = sandbox_filter(allow_loopback=allow_loopback)
            self._network_filter = sandbox_filter(allow_loopback=True)
            self._python = str(python or _find_system_python())
            self._command_prefix = build_isolation_command(ENVIRONMENT, _find_prefixes(python) if python else [])
        except LookupError:
            raise SandboxUnavailable(
                "tool_runtime: the Python sandbox knows x86_64 and aarch64 machines only"
            ) from None
        except BubblewrapUnavailable as exc:
            raise SandboxUnavailable(f"tool_runtime: {exc}, or choose another tool runtime") from None

    @contextmanager
    def launch(
        self,
        channel_fd: int,
        limits: SandboxLimits,
        skill_files: Sequence[SkillFile] = (),
        network: NetworkAccess | None = None,
        *,
        is_workspace: bool = False,
    ) -> Generator[GuestLaunch]:
        """See Sandbox."""
        folder = WORKSPACE_FOLDER if is_workspace else WORK_FOLDER
        with (
            open_data_pipe(self._seccomp_filter if network is None else self._network_filter) as seccomp,
            open_data_pipe(_GUEST_PROGRAM) as guest,
            open_skill_files(skill_files) as skills,
            _open_certificates(network) as certificates,
        ):
            argv = [
                *self._command_prefix,
                "--as-pid-1",
                *_build_scratch_options(limits, is_workspace=is_workspace),
                *skills.options,
                *certificates.options,
                *("--seccomp", str(seccomp), "--ro-bind-data", str(guest), "/guest.py"),
                *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder),
                *("--", self._python, "-I", "/guest.py", str(channel_fd)),
            ]
            descriptors = (channel_fd, seccomp, guest, *skills.descriptors, *certificates.descriptors)
            yield GuestLaunch(argv, descriptors, folder, limits.rlimits())


class DangerouslyUnsandboxed:
    """Child process with the server's own rights and network, in a temporary folder. Nothing is contained."""

    is_isolated = False

    def __init__(self, python: Path | None) -> None:
        self._python = str(python or sys.executable)

    @contextmanager
    def launch(
        self,
        channel_fd: int,
        limits: SandboxLimits,
        skill_files: Sequence[SkillFile] = (),
        network: NetworkAccess | None = None,
        *,
        is_workspace: bool = False,
    ) -> Generator[GuestLaunch]:
        """See Sandbox."""
        assert not is_workspace, "refused when the workspace is created"
        assert not skill_files, "refused when the container is created"
        assert network is None, "refused when the container is created"
        # NPROC counts all processes of the user, the server's own threads among them.
        rlimits = {name: value for name, value in limits.rlimits().items() if name != "RLIMIT_NPROC"}
        folder = tempfile.mkdtemp(prefix="python-tool-")
        yield GuestLaunch(
            [self._python, "-I", "-c", _GUEST_PROGRAM.decode(), str(channel_fd)], (channel_fd,), folder, rlimits
        )


@contextmanager
def _open_certificates(network: NetworkAccess | None) -> Generator[Mount]:
    """Open the file of the certificates, and the descriptor by which the guest hands its socket out."""
    if network is None:
        yield Mount()
        return
    with open_memory_file("certificates", network.certificates) as file:
        yield Mount(["--ro-bind-data", str(file), CERTIFICATES_FILE], [file, network.descriptor])


def _build_scratch_options(limits: SandboxLimits, *, is_workspace: bool) -> list[str]:
    """Mount all that can be written: one tmpfs for files, and one of a fourth of its size for shared memory."""
    scratch = ["--tmpfs", "/mnt", "--dir", WORK_FOLDER, "--dir", "/mnt/tmp"]
    if is_workspace:
        home = ["--dir", _WORKSPACE_HOME, "--dir", "/mnt", "--symlink", f"..{_WORKSPACE_HOME}", "/mnt/tmp"]
        scratch = ["--tmpfs", WORKSPACE_FOLDER, "--dir", f"{WORKSPACE_FOLDER}/outputs", *home]
    return [
        *build_proc_options(),
        *("--dev", "/dev"),
        *("--size", str(limits.scratch_bytes // 4), "--tmpfs", "/dev/shm"),  # noqa: S108 - the sandbox's own
        *("--size", str(limits.scratch_bytes), *scratch),
        *("--symlink", "mnt/tmp", "/tmp"),  # noqa: S108 - the sandbox's own
    ]


def _find_system_python() -> Path:
    for path in (f"{sys.base_prefix}/bin/python3", "/usr/bin/python3", "/usr/local/bin/python3"):
        if is_below_usr(path) and os.access(path, os.X_OK):
            return Path(path)
    raise SandboxUnavailable(
        "tool_runtime: no Python below /usr for the sandbox; install one with `apt-get install python3`, "
        "or name one with `python`"
    )


def _find_prefixes(python: Path) -> list[str]:
    """Return the prefixes of an interpreter, that of its virtual environment and that of the Python below it.

    Raise SandboxUnavailable, naming the path that stands in the way, unless programs in the sandbox can run it.
    """
    program = "import sys; print(sys.prefix); print(sys.base_prefix)"
    user = UNPRIVILEGED_UID if os.geteuid() == 0 else None
    try:
        output = subprocess.run(  # noqa: S603 - the operator's own choice of interpreter, from the run config
            [python, "-I", "-c", program],
            capture_output=True,
            check=True,
            env={},
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except subprocess.CalledProcessError as exc:
        raise _interpreter_error(python, [str(python)], f"it does not run: {exc.stderr.strip()[-300:]}") from exc
    except (OSError, subprocess.SubprocessError) as exc:
        raise _interpreter_error(python, [str(python)], f"it does not run: {exc}") from exc
    prefixes = list(dict.fromkeys(output.stdout.split("\n")[:2]))
    for prefix in prefixes:
        if not is_below_usr(prefix) and (os.geteuid() == 0 and find_closed_folder(Path(prefix, "lib"))):
            raise _interpreter_error(python, [prefix], "it cannot be read")
        if any(Path(path).is_relative_to(own) for path in (prefix, Path(prefix).resolve()) for own in _OWN_MOUNTS):
            raise SandboxUnavailable(
                f"tool_runtime.python: {python} needs {prefix}, which the sandbox cannot show, since its programs have "
                f"{', '.join(_OWN_MOUNTS)} of their own. Put the environment elsewhere, such as below /opt"
            )
    return prefixes


def _interpreter_error(python: Path, paths: Sequence[str], fault: str) -> SandboxUnavailable:
    """Return the error for an interpreter, with the folder that is closed to the sandbox's user where there is one."""
    closed = next(filter(None, map(find_closed_folder, (*map(Path, paths), python.resolve()))), None)
    if os.geteuid() != 0 or closed is None:
        return SandboxUnavailable(f"tool_runtime.python: {python}: {fault}")
    return SandboxUnavailable(
        f"tool_runtime.python: {python} cannot be used: the sandbox of a server run by root has the user "
        f"{UNPRIVILEGED_UID}, who must not enter {closed}. Make the environment where all users may read, such as "
        "below /opt, with a Python that is there as well"
    )
