"""Confinement of the process that runs it: no capabilities, no new privileges, Landlock and a filter of system calls.

For machines without bubblewrap, and for servers whose interpreter no other user may read. It holds for good, and needs
the standard library alone.
"""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

_SET_NO_NEW_PRIVS: Final = 38
_SET_SECCOMP: Final = 22
_FILTER_MODE: Final = 2
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522
# Landlock (https://docs.kernel.org/userspace-api/landlock.html); its calls have one number on all architectures.
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_GET_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_READ_FILE: Final = 1 << 2
_READ_FOLDER: Final = 1 << 3
_FILE_RIGHT_COUNTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights to files, each a bit, by the version of the interface; 16 in all later ones."""
_NETWORK_RIGHTS: Final = 0b11
_NETWORK_VERSION: Final = 4
_SCOPES: Final = 0b11
"""Abstract sockets and signals of processes outside."""
_SCOPE_VERSION: Final = 6


def confine(readable_paths: Sequence[str], seccomp_filter: bytes) -> list[str]:
    """Confine this process and return the layers that hold: `Landlock` and `seccomp`, where the kernel has them.

    From then on it reads only its open descriptors and files below `readable_paths`.
    """
    kernel = _Kernel()
    layers: list[str] = []
    kernel.drop_capabilities()
    with suppress(OSError):
        kernel.prctl(_SET_NO_NEW_PRIVS, 1)
        with suppress(OSError):
            kernel.restrict_files(readable_paths)
            layers.append("Landlock")
        if seccomp_filter:
            kernel.set_filter(seccomp_filter)
            layers.append("seccomp")
    return layers


class _Kernel:
    """Calls of the kernel that Python has no functions for. All raise OSError where the kernel refuses."""

    def __init__(self) -> None:
        import ctypes  # noqa: PLC0415 - 2 ms, which a child in bubblewrap does not need

        self._ctypes: Any = ctypes
        self._libc: Any = ctypes.CDLL(None, use_errno=True)

    def prctl(self, option: int, *arguments: Any) -> None:
        self._check(self._libc.prctl(option, *arguments, *[0] * (4 - len(arguments))))

    def drop_capabilities(self) -> None:
        number = _CAPSET.get(os.uname().machine)
        if number is not None:
            header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
            self._libc.syscall(number, self._buffer(header), self._buffer(bytes(24)))

    def set_filter(self, seccomp_filter: bytes) -> None:
        instructions = self._buffer(seccomp_filter)
        program = struct.pack("@HP", len(seccomp_filter) // 8, self._ctypes.addressof(instructions))
        self.prctl(_SET_SECCOMP, _FILTER_MODE, self._buffer(program))

    def restrict_files(self, readable_paths: Sequence[str]) -> None:
        version = self._check(self._libc.syscall(_CREATE_RULESET, None, 0, _GET_VERSION))
        files = (1 << _FILE_RIGHT_COUNTS.get(version, 16)) - 1
        network = _NETWORK_RIGHTS if version >= _NETWORK_VERSION else 0
        scopes = _SCOPES if version >= _SCOPE_VERSION else 0
        rules = struct.pack("=QQQ", files, network, scopes)
        ruleset = self._check(self._libc.syscall(_CREATE_RULESET, self._buffer(rules), len(rules), 0))
        try:
            for path in readable_paths:
                with suppress(FileNotFoundError):
                    self._allow_reading(ruleset, path)
            self._check(self._libc.syscall(_RESTRICT_SELF, ruleset, 0))
        finally:
            os.close(ruleset)

    def _allow_reading(self, ruleset: int, path: str) -> None:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
            rule = self._buffer(struct.pack("=Qi", rights, folder))
            self._check(self._libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        finally:
            os.close(folder)

    def _buffer(self, data: bytes) -> Any:
        return self._ctypes.create_string_buffer(data, len(data))

    def _check(self, result: int) -> int:
        if result < 0:
            raise OSError(self._ctypes.get_errno(), os.strerror(self._ctypes.get_errno()))
        return result
