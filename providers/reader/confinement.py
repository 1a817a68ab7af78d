"""Confinement of the reader's program: bubblewrap where it works, else what the program can do to itself."""

import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from apis.confinement.bubblewrap import (
    UNPRIVILEGED_UID,
    BubblewrapUnavailable,
    build_isolation_command,
    find_closed_folder,
    open_data_pipe,
)
from apis.confinement.seccomp import parser_filter, sandbox_filter
from providers.common.processes import limits as limits_module
from providers.common.processes.child import build_command, build_environment

PROGRAM: Final = Path(__file__).with_name("extract.py")
_SYSTEM_PATHS: Final = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_PROBE_TIMEOUT_S: Final = 20
_PROBE_LIMITS: Final = {"max_chars": 0, "max_cpu_s": 10, "max_memory_bytes": 256 * 2**20, "size": 0}


@dataclass(frozen=True, slots=True)
class ReaderConfinement:
    """Way of starting the program. `description` is for the operator; `task` has the fields of the program's task by
    which it confines itself."""

    description: str
    command: Sequence[str] = ()
    seccomp_filter: bytes = b""
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @contextmanager
    def launch(self) -> Generator[tuple[Sequence[str], Sequence[int]]]:
        """Return the program's command and the descriptors that it needs, which are closed on exit."""
        program = build_command(PROGRAM)
        if not self.command:
            yield program, ()
            return
        with open_data_pipe(self.seccomp_filter) as seccomp:
            yield (*self.command, "--seccomp", str(seccomp), "--", *program), (seccomp,)


@cache
def choose_confinement() -> ReaderConfinement:
    """Return the strongest confinement that works on this machine, by trying it. Blocks for 0.1 s, once."""
    readable = _find_readable_paths()
    reason = ""
    try:
        candidate = _build_bubblewrap(readable)
        layers, faults = _probe(candidate)
        if layers is not None and not faults:
            return candidate
        reason = _find_bubblewrap_fault(readable, faults)
    except BubblewrapUnavailable as exc:
        reason = str(exc)
    except LookupError:
        reason = "it knows x86_64 and aarch64 machines only"
    candidate = _build_self_confinement(readable)
    if candidate is not None:
        layers, faults = _probe(candidate)
        if layers is not None and not faults:
            return _describe_layers(candidate, layers, reason)
    return ReaderConfinement("files are parsed in a child process that only limits of time and memory hold")


def _find_bubblewrap_fault(readable_paths: Sequence[str], faults: Sequence[str]) -> str:
    """Return why bubblewrap does not hold the program here."""
    if faults:
        return f"these are possible in it: {', '.join(faults)}"
    closed = next(filter(None, (find_closed_folder(Path(path)) for path in readable_paths)), None)
    if os.geteuid() == 0 and closed is not None:
        return (
            f"its user {UNPRIVILEGED_UID} must not enter {closed}, where this Python is: install the server where all "
            "users may read, such as below /opt"
        )
    return "it needs unprivileged user namespaces"


def _build_bubblewrap(readable_paths: Sequence[str]) -> ReaderConfinement:
    """Raise BubblewrapUnavailable, or LookupError for an unknown machine."""
    command = build_isolation_command(build_environment(), readable_paths)
    filter_ = sandbox_filter()
    command += ["--remount-ro", "/", "--chdir", "/"]
    return ReaderConfinement("files are parsed in bubblewrap with seccomp", command, filter_)


def _build_self_confinement(readable_paths: Sequence[str]) -> ReaderConfinement | None:
    if sys.platform != "linux":
        return None
    try:
        filter_ = b64encode(parser_filter()).decode()
    except LookupError:
        filter_ = ""
    paths = [*readable_paths, *_SYSTEM_PATHS]
    return ReaderConfinement("", task={"confinement": {"seccomp": filter_, "readable_paths": paths}})


def _describe_layers(confinement: ReaderConfinement, layers: Sequence[str], reason: str) -> ReaderConfinement:
    held_by = " and ".join(layers)
    description = f"files are parsed in a child process with {held_by}, not in bubblewrap: {reason}"
    return ReaderConfinement(description, task=confinement.task)


def _find_readable_paths() -> list[str]:
    """Return what the program reads: the interpreter, its packages, this folder, and the limits that it sets."""
    package, limits = PROGRAM.parent, Path(limits_module.__file__)
    packages = [folder / "__init__.py" for folder in (package.parent, limits.parents[1])]
    paths = [sys.prefix, sys.base_prefix, *map(str, (package, limits.parent, *packages))]
    return list(dict.fromkeys(paths))


def _probe(confinement: ReaderConfinement) -> tuple[Sequence[str] | None, Sequence[str]]:
    """Return by which layers the program confined itself, None where it does not run, and what is possible in it."""
    task = {"kind": "probe", "parent_pid": os.getpid(), **_PROBE_LIMITS, **confinement.task}
    try:
        with confinement.launch() as (command, descriptors):
            output = subprocess.run(  # noqa: S603 - this Python and a program of ours
                command,
                input=json.dumps(task).encode() + b"\n",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=build_environment(),
                pass_fds=descriptors,
                timeout=_PROBE_TIMEOUT_S,
                check=True,
            ).stdout
        header = json.loads(output.partition(b"\n")[0])
        return header["layers"], header["faults"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None, ()
