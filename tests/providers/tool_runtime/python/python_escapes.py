"""Programs that try to get out of the Python sandbox, to the host or the kernel.

Each prints `escaped(...)` where it got what it should not have. Before each runs `PRELUDE`, with names of the host.
"""

from typing import Final

MARK: Final = "ESC" + "APED"

PRELUDE: Final = """
import ctypes, errno, os, resource, signal, socket, stat, struct, subprocess, sys, time
HOST = {host!r}
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what):
    os.write(1, ("ESC" + f"APED {{what}}\\n").encode())
def refused(what, action, *arguments, **named):
    try:
        got = action(*arguments, **named)
    except (OSError, ValueError, OverflowError, MemoryError, subprocess.SubprocessError):
        return
    escaped(f"{{what}}: {{got!r}}")
def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(1)
        one.connect(address)
def read(path):
    with open(path, "rb") as file:
        return file.read(100)
"""

ESCAPES: Final[dict[str, str]] = {
    # files of the host
    "reads a file of the host": "refused('read', read, HOST['file'])",
    "reads what every host has": """
for path in ("/etc/shadow", "/etc/passwd", "/proc/1/root/etc/passwd"):
    refused(path, read, path)
for path in ("/root", "/home", "/var", "/run", "/sys", "/boot", "/srv", "/opt"):
    refused(path, os.listdir, path)
""",
    "climbs out by dots and handles": """
refused("dots", read, "../" * 40 + HOST["file"].lstrip("/"))
refused("root of 1", read, "/proc/1/root" + HOST["file"])
refused("cwd of parent", read, f"/proc/{os.getppid()}/cwd/" + HOST["file"])
for fd in os.listdir("/proc/self/fd"):
    refused("openat " + fd, os.open, HOST["file"].lstrip("/"), os.O_RDONLY, dir_fd=int(fd))
refused("handle", call, 304, -100, ctypes.create_string_buffer(128), 0)
""",
    "writes where it may only read": """
for path in ("/x", "/usr/x", "/usr/bin/python3", "/lib/x", "/etc/x", "/dev/x", "/guest.py", "/proc/x"):
    refused(path, open, path, "w")
refused("chmod", os.chmod, "/usr/bin/python3", 0o777)
""",
    "writes to the kernel's switches": """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
             "/proc/sys/vm/drop_caches", "/sys/fs/cgroup/release_agent", "/sys/kernel/uevent_helper",
             "/proc/self/uid_map", "/proc/self/gid_map"):
    def write():
        with open(path, "w") as file:
            file.write("0 0 1")
    refused(path, write)
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    escaped("oom")
except OSError:
    pass
""",
    "reads about the kernel and the machine": """
for name in ("cmdline", "kallsyms", "kcore", "keys", "modules", "iomem", "interrupts", "diskstats", "timer_list"):
    refused(name, read, "/proc/" + name)
""",
    "reads the server's environment": """
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if HOST["secret"].encode() in open(path, "rb").read():
            escaped(path)
    except OSError:
        pass
print(dict(os.environ))
""",
    # other processes
    "looks for processes of the host": """
names = [name for name in os.listdir("/proc") if name.isdigit()]
if len(names) > 2:
    escaped(names)
refused("mem", read, f"/proc/{HOST['pid']}/status")
refused("kill", os.kill, HOST["pid"], 0)
refused("pidfd", os.pidfd_open, HOST["pid"])
""",
    "kills all it can see": """
for pid in (-1, 1, os.getppid(), 0):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
""",
    "stops its supervisor": """
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGHUP):
    os.kill(os.getppid(), number)
    os.kill(1, number)
os.killpg(0, signal.SIGWINCH)
""",
    "traces its supervisor": """
refused("ptrace attach", call, 101, 16, 1, 0, 0)
refused("ptrace seize", call, 101, 0x4206, 1, 0, 0)
refused("ptrace traceme", call, 101, 0, 0, 0, 0)
refused("vm_readv", call, 310, 1, 0, 0, 0, 0, 0)
refused("vm_writev", call, 311, 1, 0, 0, 0, 0, 0)
refused("pidfd_getfd", call, 438, 3, 0, 0)
refused("kcmp", call, 312, 1, 1, 0, 0, 0)
""",
    "overwrites its supervisor's memory": """
try:
    with open("/proc/1/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "x" in line.split()[1] or "w" in line.split()[1]]
    memory = os.open("/proc/1/mem", os.O_RDWR)
    for start, end in spans:
        try:
            os.pwrite(memory, b"\\xcc" * min(4096, int(end, 16) - int(start, 16)), int(start, 16))
        except (OSError, OverflowError):
            pass
except OSError as exc:
    print(exc)
""",
    # network
    "connects to the host": """
for address in (("127.0.0.1", HOST["port"]), ("169.254.169.254", 80), ("192.0.2.1", 443), ("10.0.0.1", 22)):
    refused(address, connect, socket.AF_INET, address)
refused("::1", connect, socket.AF_INET6, ("::1", HOST["port"]))
refused("udp", connect, socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM)
refused("dns", socket.getaddrinfo, "example.com", 80)
""",
    "connects to a socket without a path": "refused('abstract', connect, socket.AF_UNIX, HOST['abstract'])",
    "connects to the session server": """
for root in ("", "/proc/1/root", f"/proc/{os.getppid()}/cwd/../../.."):
    refused("session server", connect, socket.AF_UNIX, root + HOST["session_server"])
""",
    "opens sockets that no namespace empties": """
for family in (16, 17, 38, 40, 44, 29, 31, 4, 9, 21, 30):
    for kind in (1, 2, 3, 5):
        refused(family, socket.socket, family, kind)
for protocol in (1, 255):
    refused("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, protocol)
""",
    "opens sockets of the internet": """
for family in (socket.AF_INET, socket.AF_INET6):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        refused(family, socket.socket, family, kind)
        refused("pair", socket.socketpair, family, kind)
""",
    # namespaces and privileges
    "makes namespaces": """
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000, 0x80):
    refused(hex(flag), call, 272, flag)
    refused("clone " + hex(flag), call, 56, flag | 17, 0, 0, 0, 0)
refused("clone3", call, 435, ctypes.create_string_buffer(struct.pack("=11Q", 0x10000000, *[0] * 10)), 88)
""",
    "enters namespaces": """
for name in os.listdir("/proc/1/ns"):
    fd = os.open("/proc/1/ns/" + name, os.O_RDONLY)
    refused(name, call, 308, fd, 0)
""",
    "mounts": """
refused("mount", call, 165, b"none", b"/mnt/data", b"tmpfs", 0, 0)
refused("remount", call, 165, 0, b"/", 0, 32 | 4096, 0)
refused("umount", call, 166, b"/mnt", 2)
refused("fsopen", call, 430, b"tmpfs", 0)
refused("open_tree", call, 428, -100, b"/", 1)
refused("move_mount", call, 429, -100, b"/mnt", -100, b"/usr", 0)
refused("mount_setattr", call, 442, -100, b"/", 0, ctypes.create_string_buffer(32), 32)
refused("pivot_root", call, 155, b"/mnt", b"/mnt/data")
refused("chroot", os.chroot, "/mnt")
""",
    "becomes root": """
refused("setuid", os.setuid, 0)
refused("setgid", os.setgid, 0)
refused("setgroups", os.setgroups, [0])
head = ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0))
refused("capset", call, 126, head, ctypes.create_string_buffer(b"\\xff" * 24))
refused("ambient", call, 157, 47, 2, 21, 0, 0)
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16):
        escaped(line)
if os.getuid() == 0:
    escaped("uid")
""",
    "runs programs that are set-uid": """
for argv in (["su", "-c", "id"], ["mount"], ["passwd"], ["newgrp"], ["chsh"], ["sudo", "-n", "id"],
             ["bwrap", "--unshare-all", "--uid", "0", "--ro-bind", "/", "/", "id"], ["unshare", "-Ur", "id"]):
    try:
        done = subprocess.run(argv, capture_output=True, timeout=2, text=True)
        if "uid=0" in done.stdout:
            escaped(argv)
    except (OSError, subprocess.TimeoutExpired):
        pass
""",
    "makes a set-uid program of its own": """
import shutil
shutil.copy("/usr/bin/id", "id")
os.chmod("id", 0o6755)
done = subprocess.run(["./id"], capture_output=True, text=True)
if "uid=0" in done.stdout:
    escaped(done.stdout)
refused("chown", os.chown, "id", 0, 0)
refused("xattr", os.setxattr, "id", "security.capability", b"\\x01\\0\\0\\2" + b"\\xff" * 16)
""",
    "makes and opens devices": """
for device in (os.makedev(1, 1), os.makedev(8, 0), os.makedev(254, 0)):
    refused("mknod", os.mknod, "device", 0o666 | stat.S_IFBLK, device)
    refused("mknod", os.mknod, "device", 0o666 | stat.S_IFCHR, device)
for name in ("mem", "kmem", "port", "sda", "vda", "kmsg", "kvm", "fuse", "loop0", "net/tun", "console"):
    refused(name, open, "/dev/" + name, "rb")
""",
    "types into a terminal": """
for fd in (0, 1, 2):
    for request in (0x5412, 0x541C):
        refused("ioctl", call, 16, fd, request, ctypes.create_string_buffer(b"x"))
        refused("ioctl", call, 16, fd, request | 1 << 40, ctypes.create_string_buffer(b"x"))
refused("tty", open, "/dev/tty", "w")
""",
    "calls rarely used parts of the kernel": """
for number in (425, 426, 427, 321, 298, 323, 248, 249, 250, 246, 320, 175, 313, 176, 167, 168, 169, 103, 163, 300, 153,
               227, 164, 170, 171, 29, 64, 68, 240, 319, 447, 135, 154, 172, 173, 304, 303, 212):
    refused(number, call, number, 0, 0, 0, 0, 0, 0)
""",
    "calls parts of the kernel that are newer than the filter": """
for number in (448, 457, 458, 459, 467, 470, 471, 500, 1000):
    try:
        call(number, 0, 0, 0, 0, 0, 0)
        escaped(number)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.ENOSYS):
            escaped(f"{number}: {exc}")
""",
    "calls as another architecture": """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
escaped(f"int 0x80 gave {got}")
""",
    "calls by the numbers of x32": "refused('x32', call, 0x40000000 + 39)",
}
