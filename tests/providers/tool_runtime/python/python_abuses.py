"""Programs that try to get past the limits of the Python sandbox, or at those who read their results.

See python_escapes.py for the names they use.
"""

from typing import Final

ABUSES: Final[dict[str, str]] = {
    # limits
    "is a fork bomb": """
made = 0
while made < 1000:
    try:
        if os.fork() == 0:
            time.sleep(100)
        made += 1
    except OSError:
        break
if made > 64:
    escaped(made)
""",
    "is a fork bomb of forks": """
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
""",
    "starts threads without end": """
import threading
made = 0
try:
    while made < 1000:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
if made > 64:
    escaped(made)
""",
    "takes all memory": """
kept = []
try:
    while True:
        kept.append(bytearray(b"x" * 10_000_000))
        if len(kept) > 40:
            escaped(len(kept))
            break
except MemoryError:
    pass
""",
    "takes all memory in many processes": """
for _ in range(30):
    if os.fork() == 0:
        kept = bytearray(b"x" * 60_000_000)
        time.sleep(100)
time.sleep(100)
escaped("still here")
""",
    "takes all memory through shared maps": """
import mmap
kept = []
try:
    while len(kept) < 60:
        kept.append(mmap.mmap(-1, 10_000_000))
        kept[-1].write(b"x" * 10_000_000)
    time.sleep(5)
    escaped(len(kept))
except (OSError, MemoryError):
    pass
""",
    "keeps shared maps in two processes": """
import mmap
os.fork()
kept = []
try:
    while len(kept) < 20:
        kept.append(mmap.mmap(-1, 10_000_000))
        kept[-1].write(b"x" * 10_000_000)
except (OSError, MemoryError):
    pass
time.sleep(0.7)
escaped(len(kept))
""",
    "fills the buffers of sockets": """
report, told = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        held, kept = 0, []
        try:
            while held < 40_000_000:
                kept += socket.socketpair()
                for one in kept[-2:]:
                    one.setblocking(False)
                    try:
                        while True:
                            held += one.send(b"x" * 65536)
                    except BlockingIOError:
                        pass
        except OSError:
            pass
        os.write(told, held.to_bytes(8, "big"))
        time.sleep(100)
held = 0
for _ in range(6):
    held += int.from_bytes(os.read(report, 8), "big")
time.sleep(0.3)
if held > 140_000_000:
    escaped(held)
""",
    "enlarges the buffers of sockets": """
one, other = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    refused(option, one.setsockopt, socket.SOL_SOCKET, option, 4_000_000)
one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
""",
    "keeps pages in pipes": """
reading, writing = os.pipe()
page = ctypes.create_string_buffer(4096)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
refused("vmsplice", call, 278, writing, ctypes.byref(vector), 1, 0)
os.write(writing, b"x")
refused("tee", call, 276, reading, writing, 1, 0)
refused("splice", call, 275, reading, 0, writing, 0, 1, 0)
""",
    "fills the scratch folders": """
written = 0
for folder in ("/mnt/data", "/tmp", "/dev/shm", "/mnt"):
    try:
        for number in range(100):
            with open(f"{folder}/fill{number}", "wb") as file:
                while True:
                    if file.tell() > 4_000_000:
                        break
                    written += file.write(b"x" * 100_000)
    except OSError:
        pass
if written > 30_000_000:
    escaped(written)
""",
    "makes a million files": """
for number in range(1_000_000):
    os.close(os.open(f"/mnt/tmp/{number}", os.O_CREAT | os.O_WRONLY))
escaped("a million files")
""",
    "raises its own limits": """
for name in ("AS", "DATA", "NPROC", "FSIZE", "CORE", "MEMLOCK", "NOFILE", "MSGQUEUE"):
    refused(name, resource.setrlimit, getattr(resource, "RLIMIT_" + name), (1 << 40, 1 << 40))
refused("nice", os.setpriority, os.PRIO_PROCESS, 0, -10)
refused("realtime", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
refused("mlock", call, 149, id(libc), 1 << 24)
""",
    "computes for ever": "while True: pass",
    "sleeps for ever, deaf to signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    time.sleep(1000)
""",
    "leaves processes behind": """
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        while True:
            pass
print("left")
""",
    # what is given back
    "returns links to files of the host": """
for number, path in enumerate((HOST["file"], "/etc/passwd", "/proc/1/environ", "/usr/bin/id", "/dev/zero")):
    os.symlink(path, f"link{number}.txt")
os.symlink("/", "folder")
os.symlink(".", "loop")
os.link("/guest.py", "hard.txt") if os.access("/guest.py", os.W_OK) else None
""",
    "returns what is no file": """
os.mkfifo("fifo.txt")
bound = socket.socket(socket.AF_UNIX)
bound.bind("socket.txt")
os.mkdir("folder.txt")
with open("sparse.bin", "wb") as file:
    file.truncate(15_000_000)
open("true.txt", "w").write("true")
""",
    "returns names that lead elsewhere": """
for name in (b"a\\nb", b"\\xff\\xfe", b"c\\\\d", b"e\\x1b[31m", ("\\u202e" * 60).encode(), b"x" * 255, b"..f",
             b"\\xed\\xa0\\x80"):
    try:
        open(name, "w").write("x")
    except OSError as exc:
        print(exc.errno)
deep = "d"
for _ in range(60):
    os.mkdir(deep); os.chdir(deep)
open("deep.txt", "w").write("x")
""",
    "changes files while they are read": """
import threading
def swap():
    while True:
        try:
            open("swap.txt", "w").write("x" * 1000)
            os.unlink("swap.txt")
            os.symlink("/etc/passwd", "swap.txt")
            os.unlink("swap.txt")
        except OSError:
            pass
threading.Thread(target=swap, daemon=True).start()
""",
    # the channel
    "forges a reply": """
import json
fake = json.dumps({"token": "0" * 16, "size": 0, "exit": "ok", "files": [{"name": "../../x", "size": 5}]}).encode()
for fd in range(3, 64):
    try:
        os.write(fd, len(fake).to_bytes(4, "big") + fake)
    except OSError:
        pass
""",
    "forges a reply with the right token": """
import json
frame = sys._getframe()
while "request" not in frame.f_locals:
    frame = frame.f_back
token = frame.f_locals["request"]["token"]
names = ["../../" + HOST["file"], HOST["file"], "/etc/passwd", "a/../../b", "", ".", "\\x00", "x" * 9999, 5, None, {}]
files = [{"name": name, "size": 4} for name in names]
files += [{"name": "neg", "size": -9}, {"name": "big", "size": 10**12}, 7]
fake = json.dumps({"token": token, "size": 3, "exit": ["?"], "files": files, "skipped": {"a": 1}}).encode()
for fd in range(3, 64):
    try:
        os.write(fd, len(fake).to_bytes(4, "big") + fake + b"abc")
    except OSError:
        pass
""",
    "announces four gigabytes": """
for fd in range(3, 64):
    try:
        os.write(fd, b"\\xff\\xff\\xff\\xff" + b"{" * 1000)
    except OSError:
        pass
""",
    "floods the channel": """
for fd in range(3, 64):
    try:
        os.fstat(fd)
        os.write(fd, b"\\x00\\x0f\\xff\\xff")
        while True:
            os.write(fd, b"[" * 65536)
    except OSError:
        pass
""",
    "sends open files over the channel": """
import array
for fd in range(3, 64):
    try:
        with socket.socket(fileno=os.dup(fd)) as channel:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))
            channel.sendmsg([b"\\x00"], [rights])
    except OSError:
        pass
""",
    "closes everything it holds": "os.closerange(0, 1000)",
    "breaks the interpreter around it": """
import builtins, io, json, threading
json.dumps = json.loads = None
sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
builtins.len = builtins.print = None
os.scandir = os.getpid = None
""",
    "raises what cannot be shown": """
class Nasty(BaseException):
    def __str__(self): raise Nasty
    def __repr__(self): raise Nasty
    @property
    def __class__(self): raise Nasty
raise Nasty
""",
    # output
    "prints a gigabyte": """
block = b"y" * 1_000_000
for _ in range(1000):
    os.write(1, block)
""",
    "writes a million times": """
for _ in range(1_000_000):
    os.write(1, b".")
""",
    "prints what is no text": """
os.write(1, b"\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x00\\x01\\x02 \\xff\\xfe\\xc3( \\r\\n a\\rb\\x1b[2J")
os.write(1, b" \\xed\\xa0\\x80 \\x9b31m \\x1b" + b"\\x1b[" * 5000)
""",
    "crashes": "ctypes.string_at(0)",
    "recurses in C": "import sys; sys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(10**6): x = (x,)\nrepr(x)",
}
