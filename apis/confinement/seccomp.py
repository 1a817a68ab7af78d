"""Filters of system calls as classic BPF, for `bwrap --seccomp` and for a process that confines itself.

`sandbox_filter` denies the calls that a program in namespaces of its own could still use against the kernel or past the
limits, and allows all others, so that CPython and its libraries run. `parser_filter` is for a process without
namespaces, and denies also what would reach another process or change a file. They are assembled here in forty lines,
instead of by a binding to a C library that would have to be installed.
"""

import platform
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

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
_ARGUMENT_OFFSETS: Final = (16, 24, 32)

_NAMESPACE_FLAGS: Final = 0x7E020080
"""Every CLONE_NEW* flag that clone takes: cgroup, ipc, net, mount, pid, time, user, uts."""
_UNIX_FAMILY: Final = 1
_INTERNET_FAMILIES: Final = (2, 10)
"""AF_INET and AF_INET6. Their network namespace is empty, but the buffers of connections over its loopback count
towards the host's `tcp_mem`, and with cgroup v1 towards no limit."""
_SOCKET_LEVEL: Final = 1
_BUFFER_SIZE_OPTIONS: Final = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants: every socket has the default size, so that memory follows from their
number."""
_WRITING_OPEN_FLAGS: Final = 0o1 | 0o2 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
_FIRST_UNREVIEWED_SYSCALL: Final = 457
"""Number from which on calls do not exist for a program, on every architecture: statmount, listmount, open_tree_attr,
listns and those that kernels after this list will bring."""
_TERMINAL_INPUT_IOCTLS: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the terminal from which the server was started."""

# name -> (x86_64, aarch64); None where an architecture has no such call.
_DENIED_SYSCALLS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
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
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
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
# What a parser never needs: its input is in memory. It shares its user with the server, and has no namespaces.
_DENIED_PARSER_SYSCALLS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    # programs and other processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    # sockets
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "sendmsg": (46, 211),
    # files; open and openat for writing are denied by their flags
    "openat2": (437, 437),
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}


class _CheckedNumbers(NamedTuple):
    """Numbers of the calls that are decided by their arguments."""

    clone: int
    clone3: int
    socket: int
    socketpair: int
    setsockopt: int
    ioctl: int
    open: int | None
    openat: int


_ARGUMENT_CHECKED_SYSCALLS: Final[Mapping[str, _CheckedNumbers]] = {
    "x86_64": _CheckedNumbers(56, 435, 41, 53, 54, 16, 2, 257),
    "aarch64": _CheckedNumbers(220, 435, 198, 199, 208, 29, None, 56),
}
_AUDIT_ARCHITECTURES: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_Instruction = tuple[int, int, int, int]
"""Operation, steps to skip where it holds, steps to skip where it does not, operand."""


def sandbox_filter(machine: str | None = None, *, allow_loopback: bool = False) -> bytes:
    """Return the filter for programs in bubblewrap as an array of `struct sock_filter`, for this machine's
    architecture or `machine`.

    Sockets are of AF_UNIX, with `allow_loopback` also of AF_INET and AF_INET6: the namespace does not empty other
    families, of which AF_VSOCK reaches a hypervisor. A denied call fails with EPERM; a call of another architecture
    ends the process. Raise LookupError for a machine whose system calls are not listed here.
    """
    numbers = _ARGUMENT_CHECKED_SYSCALLS[platform.machine() if machine is None else machine]
    families = (_UNIX_FAMILY, *(_INTERNET_FAMILIES if allow_loopback else ()))
    steps = _build_branch((_EQUAL, numbers.clone), _deny_if(0, _ANY_BIT, [_NAMESPACE_FLAGS]))
    for number in (numbers.socket, numbers.socketpair):
        steps += _build_branch((_EQUAL, number), _allow_only(0, families))
    is_buffer_size = _build_branch((_EQUAL, _SOCKET_LEVEL), _deny_if(2, _EQUAL, _BUFFER_SIZE_OPTIONS))
    by_level: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENT_OFFSETS[1]), *is_buffer_size, (_RETURN, 0, 0, _ALLOW)]
    steps += _build_branch((_EQUAL, numbers.setsockopt), by_level)
    return _assemble_filter(machine, steps, _DENIED_SYSCALLS)


def parser_filter(machine: str | None = None) -> bytes:
    """Return the filter for a parser that confines itself, as `sandbox_filter` does.

    It can read its open descriptors and, where nothing else forbids it, files; it cannot start a program or a process,
    signal or change another one, open a socket, or write, rename or remove a file.
    """
    numbers = _ARGUMENT_CHECKED_SYSCALLS[platform.machine() if machine is None else machine]
    steps: list[_Instruction] = []
    for number, flags_argument in ((numbers.open, 1), (numbers.openat, 2)):
        if number is not None:
            steps += _build_branch((_EQUAL, number), _deny_if(flags_argument, _ANY_BIT, [_WRITING_OPEN_FLAGS]))
    return _assemble_filter(machine, steps, {**_DENIED_SYSCALLS, **_DENIED_PARSER_SYSCALLS})


def _assemble_filter(
    machine: str | None, steps: Sequence[_Instruction], denied: Mapping[str, tuple[int | None, int | None]]
) -> bytes:
    machine = platform.machine() if machine is None else machine
    numbers = _ARGUMENT_CHECKED_SYSCALLS[machine]
    column = list(_ARGUMENT_CHECKED_SYSCALLS).index(machine)
    all_steps: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        # With the numbers of x32, which begin at 0x40000000.
        *_build_branch((_AT_LEAST, _FIRST_UNREVIEWED_SYSCALL), [(_RETURN, 0, 0, _ENOSYS)]),
        # The flags of clone3 lie in memory, where a filter cannot look; without it the C library takes clone.
        *_build_branch((_EQUAL, numbers.clone3), [(_RETURN, 0, 0, _ENOSYS)]),
        *steps,
        *_build_branch((_EQUAL, numbers.ioctl), _deny_if(1, _EQUAL, _TERMINAL_INPUT_IOCTLS)),
    ]
    for architecture_numbers in denied.values():
        number = architecture_numbers[column]
        if number is not None:
            all_steps += _build_branch((_EQUAL, number), [(_RETURN, 0, 0, _EPERM)])
    all_steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in all_steps)


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
