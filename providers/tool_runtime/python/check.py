"""Check that a sandbox isolates, by the kernel's own account and by attempts from inside, before any program runs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from providers.tool_runtime.python.processes import process_tree
from providers.tool_runtime.python.sandbox import ENVIRONMENT
from providers.tool_runtime.python.session import PythonSession

_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_EXPECTED_STATUS: Final = {
    "CapEff": "0000000000000000",
    "CapBnd": "0000000000000000",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}

# Each line of output names something that should not have worked.
_PROBE_PROGRAM: Final = """
import ctypes, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def denied(what, action):
    try:
        action()
    except OSError:
        return
    print(what)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
for folder in ("/", "/usr", "/dev", "/proc/sys/kernel"):
    denied("writing below " + folder, lambda: open(folder + "/written", "w"))
denied("reaching the network", lambda: socket.create_connection(("192.0.2.1", 9), 1))
denied("reaching a hypervisor", lambda: socket.socket(40, socket.SOCK_STREAM))
if not ALLOW_LOOPBACK:
    denied("opening a socket of the internet", lambda: socket.socket(socket.AF_INET))
    denied("opening a socket of the internet (IPv6)", lambda: socket.socket(socket.AF_INET6))
pair = socket.socketpair()
denied("enlarging the buffers of sockets", lambda: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20))
denied("reading the kernel's command line", lambda: open("/proc/cmdline").read())
denied("making a user namespace", lambda: call("unshare", 0x10000000))
denied("mounting", lambda: call("mount", b"none", b"/mnt/data", b"tmpfs", 0, None))
# PTRACE_SEIZE: unlike PTRACE_ATTACH it does not stop the process, which is the one that waits for this program
denied("tracing a process", lambda: call("ptrace", 0x4206, os.getppid(), 0, 0))
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 2:
    print("seeing other processes")
if set(os.environ) - set(ENVIRONMENT):
    print("reading the server's environment")
if resource.getrlimit(resource.RLIMIT_NPROC)[1] > 1024:
    print("starting any number of processes")
if resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 128:
    print("opening any number of sockets")
if resource.getrlimit(resource.RLIMIT_AS)[1] < 0:
    print("reserving any amount of memory")
if {line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]} - {"lo"}:
    print("seeing the network's interfaces")
written = open("written", "w").write("x")
"""


async def find_isolation_faults(
    session: PythonSession, variables: Iterable[str] = (), *, allow_loopback: bool = False
) -> list[str]:
    """Return the isolation faults of a new session in a sandbox, whose environment has further `variables`; none when
    it is isolated."""
    faults = _find_outside_faults(process_tree(session.pid))
    names = json.dumps(dict.fromkeys([*ENVIRONMENT, *variables, "PWD", "LC_CTYPE", "OLDPWD"]))
    facts = f"ENVIRONMENT = {names.replace('null', 'None')}\nALLOW_LOOPBACK = {allow_loopback}\n"
    outcome = await session.run(facts + _PROBE_PROGRAM)
    faults += outcome.output.splitlines()
    if outcome.exit_status != "ok" or [name for name, _ in outcome.files] != ["written"]:
        faults.append(f"running a program ({outcome.reason or outcome.exit_status})")
    return faults


def _find_outside_faults(pids: Sequence[int]) -> list[str]:
    if len(pids) != 3:
        return ["finding its processes"]
    faults: list[str] = []
    for pid in pids[1:]:
        faults += [
            f"sharing the server's {name} namespace"
            for name in _NAMESPACES
            if Path(f"/proc/{pid}/ns/{name}").readlink() == Path(f"/proc/self/ns/{name}").readlink()
        ]
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        faults += [
            f"{name} {fields[name]}" for name, value in _EXPECTED_STATUS.items() if fields[name].strip() != value
        ]
    return faults
