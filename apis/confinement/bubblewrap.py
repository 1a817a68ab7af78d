"""Commands that start a program in bubblewrap: namespaces of its own, no capabilities, no network, a read-only /usr."""

import os
import shutil
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

INSTALL_HINT: Final = "install it with `apt-get install bubblewrap`"
UNPRIVILEGED_UID: Final = 65534
"""User and group that programs of a server run by root start as: root is exempt from the limit on processes."""

# Facts about the host's hardware, kernel and commands, which no program needs. What a host lacks is left out.
_MASKED_PROC_FILES: Final = (
    *("cmdline", "config.gz", "diskstats", "interrupts", "iomem", "ioports", "kallsyms", "kcore", "key-users", "keys"),
    *("kmsg", "kpagecgroup", "kpagecount", "kpageflags", "modules", "pagetypeinfo", "partitions", "sched_debug"),
    *("slabinfo", "timer_list", "vmallocinfo"),
)


class BubblewrapUnavailable(Exception):
    """Bubblewrap cannot be used on this machine. The text is for the operator and names the remedy."""


def build_isolation_command(environment: Mapping[str, str], readable_paths: Sequence[str]) -> list[str]:
    """Return the beginning of a bubblewrap command; options and a program follow it.

    The program sees /usr, the linker's cache and `readable_paths`, all read-only, and has this environment alone.
    Raise BubblewrapUnavailable when a program that it needs is missing.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise BubblewrapUnavailable(f"the program `bwrap` of bubblewrap was not found; {INSTALL_HINT}")
    return [
        *_build_unprivileged_command(),
        bwrap,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--clearenv"),
        *("--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--hostname", "python"),
        *(item for name, value in environment.items() for item in ("--setenv", name, value)),
        *_build_system_folder_options(),
        *(item for path in readable_paths if not is_below_usr(path) for item in ("--ro-bind", path, path)),
    ]


def build_proc_options() -> list[str]:
    """Return the options that mount /proc without the files that describe the host."""
    files = [f"/proc/{name}" for name in _MASKED_PROC_FILES if Path("/proc", name).exists()]
    return ["--proc", "/proc", *(item for file in files for item in ("--ro-bind", "/dev/null", file))]


def is_below_usr(path: str) -> bool:
    """Return whether the path leads into /usr."""
    return Path(path).resolve().is_relative_to("/usr")


def find_closed_folder(path: Path) -> Path | None:
    """Return the first folder on the way to a path that other users must not enter."""
    for folder in reversed(path.absolute().parents):
        with suppress(OSError):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


@contextmanager
def open_data_pipe(data: bytes) -> Generator[int]:
    """Open a descriptor from which `data` can be read; it must fit into a pipe: 64 KiB."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as stream:
            stream.write(data)
        yield reading
    finally:
        os.close(reading)


def _build_unprivileged_command() -> list[str]:
    """Return the beginning of a command that runs another as `UNPRIVILEGED_UID`; empty unless this process is root's.

    Raise BubblewrapUnavailable when `setpriv` is missing.
    """
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise BubblewrapUnavailable("a server run by root needs `setpriv`: `apt-get install util-linux`")
    user = str(UNPRIVILEGED_UID)
    return [setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs", "--"]


def _build_system_folder_options() -> list[str]:
    """Return the options for /usr and the system's folders next to it, which are links into it or folders."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib32", "lib64", "bin", "sbin"):
        folder = Path("/", name)
        if folder.is_symlink():
            options += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            options += ["--ro-bind", str(folder), str(folder)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/fonts"):
        options += ["--ro-bind-try", name, name]
    return options
