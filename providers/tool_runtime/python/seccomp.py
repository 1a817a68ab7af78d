"""Filter of system calls for sandboxed programs, as classic BPF for `bwrap --seccomp`.

It denies the calls that a program in namespaces of its own could still use against the kernel or past the limits, and
allows all others, so that CPython and its libraries run. It is assembled here in forty lines, instead of by a binding
to a C library that would have to be installed.
"""

import platform
import struct
from collections.abc import Mapping, Sequence
from typing import Final

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_EPERM: Final = 0x00050001
_ENOSYS: Final = 0x00050026

# Offsets into struct seccomp_data; for an argument, that of its low half.
_NUMBER_OFFSET: Final = 0
_ARCHITECTURE_OFFSET: Final = 4
_ARGUMENT_OFFSETS: Final = (16, 24)

_X32: Final = 0x40000000
_NAMESPACE_FLAGS: Final = 0x7E020080
"""Every CLONE_NEW* flag that clone takes: cgroup, ipc, net, mount, pid, time, user, uts."""
_SOCKET_FAMILIES: Final = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: the network namespace empties these, and not AF_VSOCK, which reaches a hypervisor."""
_TERMINAL_INPUT_IOCTLS: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the terminal from which the server was started."""

# name -> (x86_64, aarch64); None where an architecture has no such call.
_DENIED_SYSCALLS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # large and rarely used parts of the kernel; io_uring makes calls that no filter sees
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "sysfs": (139, None),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
# clone, clone3, socket, socketpair, ioctl: decided by their arguments.
_ARGUMENT_CHECKED_SYSCALLS: Final[Mapping[str, tuple[int, int, int, int, int]]] = {
    "x86_64": (56, 435, 41, 53, 16),
    "aarch64": (220, 435, 198, 199, 29),
}
_AUDIT_ARCHITECTURES: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_Instruction = tuple[int, int, int, int]
"""Operation, steps to skip where it holds, steps to skip where it does not, operand."""


def seccomp_filter(machine: str | None = None) -> bytes:
    """Return the filter for this machine's architecture (or `machine`) as an array of `struct sock_filter`.

    A denied call fails with EPERM; a call of another architecture ends the process. Raise LookupError for a machine
    whose system calls are not listed here.
    """
    machine = platform.machine() if machine is None else machine
    clone, clone3, socket, socketpair, ioctl = _ARGUMENT_CHECKED_SYSCALLS[machine]
    column = list(_ARGUMENT_CHECKED_SYSCALLS).index(machine)
    steps: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        steps += _build_branch((_AT_LEAST, _X32), [(_RETURN, 0, 0, _ENOSYS)])
    # The flags of clone3 lie in memory, where a filter cannot look; without it the C library takes clone.
    steps += _build_branch((_EQUAL, clone3), [(_RETURN, 0, 0, _ENOSYS)])
    steps += _build_branch((_EQUAL, clone), _deny_if(0, _ANY_BIT, [_NAMESPACE_FLAGS]))
    for number in (socket, socketpair):
        steps += _build_branch((_EQUAL, number), _allow_only(0, _SOCKET_FAMILIES))
    steps += _build_branch((_EQUAL, ioctl), _deny_if(1, _EQUAL, _TERMINAL_INPUT_IOCTLS))
    for numbers in _DENIED_SYSCALLS.values():
        number = numbers[column]
        if number is not None:
            steps += _build_branch((_EQUAL, number), [(_RETURN, 0, 0, _EPERM)])
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _build_branch(test: tuple[int, int], instructions: Sequence[_Instruction]) -> list[_Instruction]:
    return [(test[0], 0, len(instructions), test[1]), *instructions]


def _deny_if(argument: int, test: int, operands: Sequence[int]) -> list[_Instruction]:
    steps: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENT_OFFSETS[argument])]
    for operand in operands:
        steps += _build_branch((test, operand), [(_RETURN, 0, 0, _EPERM)])
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def _allow_only(argument: int, operands: Sequence[int]) -> list[_Instruction]:
    steps: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENT_OFFSETS[argument])]
    for operand in operands:
        steps += _build_branch((_EQUAL, operand), [(_RETURN, 0, 0, _ALLOW)])
    return [*steps, (_RETURN, 0, 0, _EPERM)]
