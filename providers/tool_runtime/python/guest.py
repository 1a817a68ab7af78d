"""First process inside the sandbox: reads requests from a socket, keeps the files, and starts what runs code.

Code runs in an interpreter process of its own, as a notebook does, and shell commands in theirs: however these end, the
files stay. In a sandbox the first process has the number 1 of its namespace, so that no program in it can end it.

It needs only the standard library of Python 3.9 or later. The other side must not trust its messages, since programs
have the same user.

A message is four bytes of length, that many bytes of a JSON object, and then `size` bytes of payload. While shell
commands run, messages with `part` come before the reply.
"""

import ast
import codecs
import io
import json
import linecache
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any

MAX_SCANNED_FILES = 2000
_CO_COROUTINE = 0x80
_PIPE_BYTES = 64 * 1024
_MIN_PART_INTERVAL_S = 0.05
_MAX_PARTS = 400
"""Parts of the output of one command that are sent while it runs, per stream."""
_MAX_HELD_CHARS = 4096
"""Length from which an unfinished line is sent in pieces, even one that a terminal would overwrite."""
_KILL_TIMEOUT_S = 2
_POLL_MS = 20
"""Milliseconds after which ended processes are looked for."""
_TOKEN_BYTES = 8
_PART_BYTES = 4 * 1024 * 1024
_END_WAIT_S = 0.1
"""Seconds that the end of a command waits for more output: a process in the background may hold its pipes open."""

GuestMessage = dict[str, Any]
FileStamps = dict[str, tuple[int, int, int]]


class WorkFolder:
    """Regular files in the work folder, without hidden ones."""

    def __init__(self, path: str) -> None:
        self.path = path

    def scan(self, folder: str = "") -> FileStamps:
        """Return a stamp that changes with the file, by name, for the first 2,000 files of a folder and those below."""
        stamps: FileStamps = {}
        folders = [folder]
        while folders and len(stamps) < MAX_SCANNED_FILES:
            inner = folders.pop()
            try:
                entries = sorted(os.scandir(os.path.join(self.path, inner)), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries[:MAX_SCANNED_FILES]:
                name = os.path.join(inner, entry.name)
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    stamps[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return dict(list(stamps.items())[:MAX_SCANNED_FILES])

    def read_changed(
        self, previous_stamps: FileStamps, max_files: int, max_bytes: int
    ) -> "tuple[list[GuestMessage], list[str], bytes]":
        """Return the new and changed files, the names of those that are too many or too large, and the data."""
        files: list[GuestMessage] = []
        skipped: list[str] = []
        data = b""
        for name, stamp in self.scan().items():
            if previous_stamps.get(name) == stamp:
                continue
            if len(files) == max_files or stamp[0] > max_bytes - len(data):
                skipped.append(name)
                continue
            content = self.read(name, max_bytes - len(data))
            files.append({"name": name, "size": len(content)})
            data += content
        return files, skipped[:max_files], data

    def read(self, name: str, max_bytes: int) -> bytes:
        with self._open(os.path.join(self.path, name)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError("no regular file")
            if status.st_size > max_bytes:
                raise OSError("too large")
            return file.read(max_bytes)

    def write(self, name: str, data: bytes) -> None:
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags, 0o644), "wb") as file:
            file.write(data)

    def delete(self, name: str) -> None:
        os.unlink(os.path.join(self.path, name))

    def pack(self, max_bytes: int) -> bytes:
        """Return a compressed archive of all that is in the folder; what cannot be read is left out."""
        import tarfile  # noqa: PLC0415 - for workspaces alone

        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
            for inner, folders, names in os.walk(self.path):
                for name in [*folders, *names]:
                    path = os.path.join(inner, name)
                    with suppress(OSError):
                        self._add(tar, path)
                    if archive.tell() > max_bytes:
                        raise OSError("too large")
        return archive.getvalue()

    def _add(self, tar: Any, path: str) -> None:
        """Add a file or folder as it is now: commands may run, and write it meanwhile."""
        info = tar.gettarinfo(path, os.path.relpath(path, self.path))
        if info is None:
            return
        if not info.isreg():
            tar.addfile(info)
            return
        with self._open(path) as file:
            tar.addfile(info, WholeFile(file))

    def _open(self, path: str) -> io.BufferedReader:
        """Open a file, which may have become something else that is not waited for."""
        return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")

    def unpack(self, data: bytes) -> None:
        import tarfile  # noqa: PLC0415 - for workspaces alone
        import zlib  # noqa: PLC0415 - for workspaces alone

        trusted: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
                tar.extractall(self.path, **trusted)  # noqa: S202 - it comes from here, and this sandbox holds
        except (tarfile.TarError, zlib.error, EOFError) as exc:
            raise OSError("damaged") from exc


class WholeFile:
    """A file that has as many bytes as it is asked for: one that has become shorter ends with zeros."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError:
            data = b""
        return data.ljust(size, b"\0")


class Notebook:
    """Namespace in which cells run one after the other."""

    def __init__(self) -> None:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.namespace = main.__dict__
        self.cell_number = 0

    def run(self, code: str) -> str:
        """Run a cell; return `ok`, or `exception` when one was printed."""
        self.cell_number += 1
        file = f"<cell {self.cell_number}>"
        linecache.cache[file] = (len(code), None, [f"{line}\n" for line in code.splitlines()], file)
        pid = os.getpid()
        try:
            self._run_cell(code, file)
            self._show_figures()
            exit_status = "ok"
        except BaseException as exc:  # noqa: BLE001 - an exception of a program is its output, which the model reads
            self._print_exception(exc, file)
            exit_status = "exception"
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        if os.getpid() != pid:
            os._exit(0)
        return exit_status

    def _run_cell(self, code: str, file: str) -> None:
        parsed = ast.parse(code, file)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        self._evaluate(parsed, file, "exec")
        if isinstance(last, ast.Expr):
            value = self._evaluate(ast.Expression(last.value), file, "eval")
            if value is not None:
                self.namespace["_"] = value
                print(repr(value))  # noqa: T201 - a notebook shows the value of the last expression

    def _evaluate(self, tree: "ast.Module | ast.Expression", file: str, mode: str) -> Any:
        compiled = compile(tree, file, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(compiled, self.namespace)  # noqa: S307 - to run programs is what the sandbox around this is for
        if not compiled.co_flags & _CO_COROUTINE:
            return value
        import asyncio  # noqa: PLC0415 - half of the time to start a session, for what few programs use

        return asyncio.run(value)

    def _show_figures(self) -> None:
        """Save the figures that plt.show() would show in a notebook as files."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot else ():
            pyplot.figure(number).savefig(f"figure-{self.cell_number}-{number}.png")
            pyplot.close(number)

    def _print_exception(self, exc: BaseException, file: str) -> None:
        """Print the traceback from the cell on, without the frames of this file above it."""
        frames = exc.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != file:
            frames = frames.tb_next
        try:
            text = "".join(traceback.format_exception(type(exc), exc, frames))
        except BaseException:  # noqa: BLE001 - the text of an exception is a program of its own
            text = f"{type(exc).__name__}: (its text cannot be shown)\n"
        print(text, end="", file=sys.__stderr__, flush=True)


class StreamOutput:
    """Output of one stream of a command: a head that is sent while the command runs, and the last characters."""

    def __init__(self, command: "CommandProcess", pipe: int) -> None:
        self.pipe = pipe
        self.is_open = True
        self.tail = ""
        self.dropped_count = 0
        self._command = command
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._next_part_at = 0.0

    def read(self) -> None:
        data = os.read(self.pipe, _PIPE_BYTES)
        if not data:
            self.close()
        self._add(self._decoder.decode(data, final=not data))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.pipe)

    def take_part(self, now: float) -> str:
        """Return whole lines, and a line without an end that nothing overwrites; not more often than the interval."""
        if now < self._next_part_at:
            return ""
        end = self._pending.rfind("\n") + 1
        line = self._pending[end:]
        if len(line) > _MAX_HELD_CHARS or not ("\r" in line or "\x1b" in line):
            end = len(self._pending)
        part, self._pending = self._pending[:end], self._pending[end:]
        self._next_part_at = now + self._command.part_interval_s if part else self._next_part_at
        return part

    def take_end(self, tail_chars: int) -> str:
        """Return all that was not sent, with at most this many characters of the tail."""
        dropped_count = self.dropped_count + max(0, len(self.tail) - tail_chars)
        tail = self.tail[len(self.tail) - tail_chars :] if tail_chars < len(self.tail) else self.tail
        mark = f"\n[... {dropped_count} characters of output are left out here ...]\n" if dropped_count else ""
        return self._pending + mark + tail

    def _add(self, text: str) -> None:
        head = text[: self._command.head_chars]
        self._command.head_chars -= len(head)
        self._pending += head
        self.tail += text[len(head) :]
        surplus = len(self.tail) - self._command.tail_chars
        if surplus > self._command.tail_chars + _PIPE_BYTES:  # in blocks: each cut moves the whole tail
            self.tail = self.tail[surplus:]
            self.dropped_count += surplus


class CommandProcess:
    """Running command, in a session of its own, so that its processes can be ended together."""

    def __init__(
        self, programs: "Programs", command: str, timeout_s: float, max_chars: int, environment: "dict[str, str]"
    ) -> None:
        import subprocess  # noqa: PLC0415 - a tenth of the time to start a session, for what few programs use

        self._programs = programs
        self.head_chars = max_chars // 2
        self.tail_chars = max_chars - self.head_chars
        self.part_interval_s = max(_MIN_PART_INTERVAL_S, timeout_s / _MAX_PARTS)
        self.is_timed_out = False
        self._deadline = time.monotonic() + timeout_s
        self._ended_at = 0.0
        pipes = [os.pipe(), os.pipe()]
        self.outputs = [StreamOutput(self, reading) for reading, _ in pipes]
        shell = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK)), "/bin/sh")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - to run commands is what the sandbox around this is for
                [shell, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env={**os.environ, **environment},
                start_new_session=True,
            )
            programs.add(self._process.pid)
        except (OSError, ValueError):
            for output in self.outputs:
                output.close()
            raise
        finally:
            for _, writing in pipes:
                os.close(writing)

    def has_ended(self, now: float) -> bool:
        """Return whether the shell has ended and its output was read; end all its processes at the time limit."""
        if self._programs.find_status(self._process.pid) is None:
            if now >= self._deadline:
                self.is_timed_out = True
                self.kill()
            return False
        self._ended_at = self._ended_at or now
        return now >= self._ended_at + _END_WAIT_S or not any(output.is_open for output in self.outputs)

    def kill(self) -> None:
        """End all processes of its group."""
        if self._programs.find_status(self._process.pid) is None:
            kill_group(self._process.pid)

    def finish(self) -> "list[str]":
        """Return the rest of both streams, which share the room for the tail."""
        self._process.returncode = 0  # it was waited for, or is by others
        out, err = self.outputs
        for output in self.outputs:
            output.close()
        err_chars = min(len(err.tail), max(self.tail_chars // 2, self.tail_chars - len(out.tail)))
        return [out.take_end(self.tail_chars - err_chars), err.take_end(err_chars)]

    @property
    def exit_code(self) -> "int | None":
        """The shell's exit code; None at the time limit."""
        status = self._programs.find_status(self._process.pid)
        code = 0 if status is None else os.waitstatus_to_exitcode(status)
        return None if self.is_timed_out else code if code >= 0 else 128 - code


class ShellCall:
    """The commands of one call, whose output and ends are sent as parts with its `token`."""

    def __init__(self, channel: "Channel", programs: "Programs", files: WorkFolder, request: GuestMessage) -> None:
        self._channel = channel
        self._programs = programs
        self._files = files
        self._token = request["token"]
        self._before = files.scan()
        self._running: dict[int, CommandProcess] = {}
        for index, command in enumerate(request["commands"]):
            limits = command["timeout_s"], command["max_chars"], request["environment"]
            try:
                self._running[index] = CommandProcess(programs, command["command"], *limits)
            except (OSError, ValueError) as exc:
                self._send_part(index, ["", f"The command could not be started: {exc}\n"], exit_code=126)

    @property
    def outputs(self) -> "list[StreamOutput]":
        return [output for command in self._running.values() for output in command.outputs]

    def report(self) -> bool:
        """Send what the commands have written, and the ends of those that have ended; return True while one runs."""
        now = time.monotonic()
        for index, command in list(self._running.items()):
            if command.has_ended(now):
                del self._running[index]
                self._send_part(index, command.finish(), exit_code=command.exit_code)
            else:
                self._send_part(index, [output.take_part(now) for output in command.outputs])
        return bool(self._running)

    def kill(self) -> None:
        """End the processes of the commands, of which one that has left its group goes on in the background."""
        for command in self._running.values():
            command.kill()

    def close(self, exit_status: str) -> None:
        """Send the rest of the output of commands whose processes have ended, and the reply with the files that have
        changed meanwhile."""
        for index, command in self._running.items():
            self._send_part(index, command.finish())
        after = self._files.scan()
        changed = [{"name": name, "size": after[name][0]} for name in after if after[name] != self._before.get(name)]
        self._channel.send({"exit": exit_status, "files": changed, "token": self._token})

    def _send_part(self, index: int, texts: "list[str]", **end: "int | None") -> None:
        if any(texts) or end:
            data = [text.encode() for text in texts]
            self._channel.send({"part": index, "out": len(data[0]), **end, "token": self._token}, data[0] + data[1])


class Shell:
    """Runs the commands of several calls at the same time."""

    def __init__(self, channel: "Channel", programs: "Programs", files: WorkFolder) -> None:
        self._channel = channel
        self._programs = programs
        self._files = files
        self._calls: dict[str, ShellCall] = {}

    def begin(self, request: GuestMessage) -> None:
        """Begin a call, which is replied to when its commands have ended."""
        self._calls[request["token"]] = ShellCall(self._channel, self._programs, self._files, request)

    def run(self) -> None:
        """Run the commands until there is a message, or none of them is left."""
        while self._calls:
            outputs = {output.pipe: output for call in self._calls.values() for output in call.outputs}
            pipes = [pipe for pipe, output in outputs.items() if output.is_open]
            ready = self._programs.wait_for([*pipes, self._channel.number])
            for pipe in ready - {self._channel.number}:
                outputs[pipe].read()
            for token, call in list(self._calls.items()):
                if not call.report():
                    del self._calls[token]
                    call.close("ok")
            if self._channel.number in ready:
                return

    def stop(self, token: str) -> bool:
        """End the commands of one call; return False where no other one has commands, so that all programs may end."""
        if token not in self._calls or len(self._calls) == 1:
            return False
        self._calls[token].kill()
        return True

    def close_calls(self) -> None:
        """Reply to all calls, because all programs have ended."""
        for call in self._calls.values():
            call.close("ended")
        self._calls.clear()


class Channel:
    """Connection to the other side. Nothing is read ahead: that a message has come must show on the descriptor."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._connection = socket.socket(fileno=number)
        self._connection.set_inheritable(False)

    def receive(self) -> "tuple[GuestMessage, bytes]":
        """Return a message and its payload. Ends the process when the other side has disconnected."""
        head = json.loads(self._read(int.from_bytes(self._read(4), "big")))
        return head, self._read(head.get("size", 0))

    def send(self, header: GuestMessage, payload: bytes = b"") -> None:
        text = json.dumps({**header, "size": len(payload)}).encode()
        self._connection.sendall(len(text).to_bytes(4, "big") + text + payload)

    def disconnect(self) -> None:
        """Cut a copy of this process off. Its number stays in use: what closes it must not close another file."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.number, inheritable=False)
        os.close(null)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = self._connection.recv(size - len(data), socket.MSG_WAITALL)
            if not received:
                os._exit(0)
            data += received
        return data


class Programs:
    """Processes that this one has started, and theirs."""

    def __init__(self) -> None:
        self._statuses: dict[int, int | None] = {}

    def add(self, pid: int) -> None:
        """Watch a child that leads a group of its own."""
        self._statuses[pid] = None

    def find_status(self, pid: int) -> "int | None":
        """Return the status with which a watched child has ended, or None."""
        return self._statuses.get(pid)

    def wait_for(self, readable: "list[int]", writable: int = -1) -> "set[int]":
        """Return the descriptors that can be read, or written; none after a moment. Children that have ended meanwhile
        have a status then."""
        poll = select.poll()
        for number in readable:
            poll.register(number, select.POLLIN | (select.POLLOUT if number == writable else 0))
        ready = {number for number, _ in poll.poll(_POLL_MS)}
        while self._reap_child():
            pass
        return ready

    def kill(self) -> None:
        """End all processes but this one, and wait for that."""
        if os.getpid() == 1:  # of a namespace
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for pid, status in self._statuses.items():
            if status is None:
                kill_group(pid)
        until = time.monotonic() + _KILL_TIMEOUT_S
        while time.monotonic() < until and (self._reap_child() or self._has_children()):
            time.sleep(0.001)
        self._statuses.clear()

    def _reap_child(self) -> bool:
        """Wait for one child that has ended, if there is one, also for one that its own parent did not wait for."""
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid in self._statuses:
            self._statuses[pid] = status
        return bool(pid)

    def _has_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True


class Interpreter:
    """Process that runs the cells of a notebook. It is started again by the first cell after its end."""

    def __init__(self, folder: str, programs: Programs, channel: Channel) -> None:
        self._folder = folder
        self._programs = programs
        self._channel = channel
        self._pid = 0
        self._connection: socket.socket | None = None

    def start(self) -> socket.socket:
        """Start the process, and return the connection with it."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                ours.close()
                self._channel.disconnect()
                os.setsid()
                run_cells(theirs, self._folder)
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        self._pid, self._connection = pid, ours
        self._programs.add(pid)
        return ours

    def run(self, code: str) -> GuestMessage:
        """Run a cell. The `exit` of the reply is `ok`, `exception` or `ended`, with the `status` of the process where
        it is known; `lost` is the status with which the process of the cells before has ended."""
        lost = self._programs.find_status(self._pid)
        if lost is not None:
            self.end()
        connection = self._connection or self.start()
        token, text = os.urandom(_TOKEN_BYTES), code.encode("utf-8", "surrogatepass")
        answer = self._exchange(connection, len(text).to_bytes(4, "big") + token + text)
        exit_status = {token + b"o": "ok", token + b"e": "exception"}.get(answer, "ended")
        status = self.end() if exit_status == "ended" else None
        return {"exit": exit_status, "status": status, "lost": lost}

    def end(self) -> "int | None":
        """End the process and all others, and return its status, where it has ended by itself."""
        status = self._programs.find_status(self._pid)
        self._programs.kill()
        if self._connection is not None:
            self._connection.close()
        self._pid, self._connection = 0, None
        return status

    def _exchange(self, connection: socket.socket, data: bytes) -> bytes:
        """Send a cell and return the answer: one that is too short, when the process has ended or is to end."""
        answer, number = b"", connection.fileno()
        closed_at = 0.0
        while len(answer) <= _TOKEN_BYTES and self._programs.find_status(self._pid) is None:
            if closed_at and time.monotonic() > closed_at + _END_WAIT_S:  # its status comes a moment later
                break
            readable = [self._channel.number] if closed_at else [self._channel.number, number]
            ready = self._programs.wait_for(readable, number if data else -1)
            if self._channel.number in ready:
                break
            try:
                if number in ready:
                    data = data[connection.send(data) :] if data else data
                    received = connection.recv(_TOKEN_BYTES + 1 - len(answer))
                    answer += received
                    closed_at = 0.0 if received else time.monotonic()
            except BlockingIOError:
                continue
            except OSError:
                closed_at = time.monotonic()
        return answer


def run_cells(connection: socket.socket, folder: str) -> None:
    """Run the cells that come in as a notebook does, until the other side disconnects."""
    # the kernel then ends this process before the one that keeps the files
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace", line_buffering=True)
    notebook = Notebook()
    stream = connection.makefile("rb")
    while size := stream.read(4):
        token = stream.read(_TOKEN_BYTES)
        code = stream.read(int.from_bytes(size, "big")).decode("utf-8", "surrogatepass")
        connection.sendall(token + (b"o" if notebook.run(code) == "ok" else b"e"))
    os._exit(0)


def open_way_out(network: GuestMessage) -> None:
    """Listen on the loopback, and hand that socket to the proxy outside. No copy is left that a program could take."""
    with socket.socket(fileno=network["descriptor"]) as outside, socket.socket() as listener:
        listener.bind(("127.0.0.1", network["port"]))
        listener.listen(128)
        socket.send_fds(outside, [b"."], [listener.fileno()])
    os.environ.update(network["environment"])
    packages = os.environ["PYTHONPATH"]
    os.makedirs(packages, exist_ok=True)  # a folder that comes later would not be looked into
    sys.path.append(packages)


def main() -> None:
    channel = Channel(int(sys.argv[1]))
    hello, _ = channel.receive()
    if hello.get("network"):
        open_way_out(hello["network"])
    for name, value in hello["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.nice(5)
    os.environ.update(hello.get("environment", {}))
    folder = hello["folder"]
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [""]
    files, programs = WorkFolder(folder), Programs()
    interpreter, shell = Interpreter(folder, programs, channel), Shell(channel, programs, files)
    interpreter.start()
    channel.send({"token": hello["token"]})
    while True:
        shell.run()
        request, payload = channel.receive()
        try:
            if request["do"] == "shell":
                shell.begin(request)
                continue
            if request["do"] == "stop" and shell.stop(request["call"]):
                continue
            if request["do"] == "pack":
                reply, data = {}, send_archive(channel, files.pack(request["max_bytes"]), request["token"])
            else:
                reply, data = handle_request(request, payload, files, interpreter, shell)
        except FileNotFoundError:
            reply, data = {"error": "missing"}, b""
        except OSError as exc:
            reply, data = {"error": exc.strerror or str(exc)}, b""
        except MemoryError:
            reply, data = {"error": "too large"}, b""
        if "token" in request:
            channel.send({**reply, "token": request["token"]}, data)


def send_archive(channel: Channel, archive: bytes, token: str) -> bytes:
    """Send an archive in parts, without its last one, which is returned."""
    start = 0
    while len(archive) - start > _PART_BYTES:
        channel.send({"part": 0, "token": token}, archive[start : start + _PART_BYTES])
        start += _PART_BYTES
    return archive[start:]


def handle_request(
    request: GuestMessage, payload: bytes, files: WorkFolder, interpreter: Interpreter, shell: Shell
) -> "tuple[GuestMessage, bytes]":
    if request["do"] in ("kill", "stop", "end"):
        interpreter.end()
        shell.close_calls()
        return {}, b""
    if request["do"] == "run":
        before = files.scan()
        reply = interpreter.run(request["code"])
        changed, skipped, data = files.read_changed(before, request["max_files"], request["max_bytes"])
        return {**reply, "files": changed, "skipped": skipped}, data
    if request["do"] == "read":
        return {}, files.read(request["name"], request["max_bytes"])
    if request["do"] == "write":
        files.write(request["name"], payload)
    elif request["do"] == "delete":
        files.delete(request["name"])
    elif request["do"] == "unpack":
        files.unpack(payload)
    stamps = files.scan(request.get("folder", ""))
    listed = [{"name": name, "size": size, "at": at // 10**9} for name, (size, at, _) in stamps.items()]
    return {"files": listed}, b""


def kill_group(group: int) -> None:
    """End all processes of a group that has any."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
