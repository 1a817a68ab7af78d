"""Interpreter loop inside the sandbox: reads requests from a socket and runs code as a notebook does.

It needs only the standard library of Python 3.9 or later. The other side must not trust its messages, since the code
that it runs shares its process.

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
import signal
import socket
import stat
import sys
import time
import traceback
import types
from typing import Any

MAX_SCANNED_FILES = 2000
_CO_COROUTINE = 0x80
_PIPE_BYTES = 64 * 1024
_MIN_PART_INTERVAL_S = 0.05
_MAX_PARTS = 400
"""Parts of the output of one command that are sent while it runs, per stream."""
_MAX_HELD_CHARS = 4096
"""Length from which an unfinished line is sent in pieces, even one that a terminal would overwrite."""
_END_WAIT_S = 0.1
"""Seconds that the end of a command waits for more output: a process in the background may hold its pipes open."""

GuestMessage = dict[str, Any]
FileStamps = dict[str, tuple[int, int, int]]


class WorkFolder:
    """Regular files in the work folder, without hidden ones."""

    def __init__(self, path: str) -> None:
        self.path = path

    def scan(self) -> FileStamps:
        """Return a stamp that changes with the file, by name, for the first 2,000 files."""
        stamps: FileStamps = {}
        folders = [""]
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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(os.path.join(self.path, name), flags), "rb") as file:
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

    def __init__(self, command: str, timeout_s: float, max_chars: int) -> None:
        import subprocess  # noqa: PLC0415 - a tenth of the time to start a session, for what few programs use

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
                start_new_session=True,
            )
        except (OSError, ValueError):
            for output in self.outputs:
                output.close()
            raise
        finally:
            for _, writing in pipes:
                os.close(writing)

    def has_ended(self, now: float) -> bool:
        """Return whether the shell has ended and its output was read; end all its processes at the time limit."""
        if self._process.poll() is None:
            if now >= self._deadline:
                self.is_timed_out = True
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            return False
        self._ended_at = self._ended_at or now
        return now >= self._ended_at + _END_WAIT_S or not any(output.is_open for output in self.outputs)

    def finish(self) -> "list[str]":
        """Return the rest of both streams, which share the room for the tail."""
        out, err = self.outputs
        for output in self.outputs:
            output.close()
        err_chars = min(len(err.tail), max(self.tail_chars // 2, self.tail_chars - len(out.tail)))
        return [out.take_end(self.tail_chars - err_chars), err.take_end(err_chars)]

    @property
    def exit_code(self) -> "int | None":
        """The shell's exit code; None at the time limit."""
        code = self._process.returncode
        return None if self.is_timed_out else code if code >= 0 else 128 - code


class ShellRun:
    """Runs shell commands at the same time and sends their output and ends as parts with the `token`."""

    def __init__(self, stream: io.BufferedRWPair, token: str) -> None:
        self._stream = stream
        self._token = token
        self._running: dict[int, CommandProcess] = {}

    def run(self, commands: "list[GuestMessage]") -> None:
        for index, command in enumerate(commands):
            try:
                self._running[index] = CommandProcess(command["command"], command["timeout_s"], command["max_chars"])
            except (OSError, ValueError) as exc:
                self._send_part(index, ["", f"The command could not be started: {exc}\n"], exit_code=126)
        while self._running:
            self._read_outputs()
            now = time.monotonic()
            for index, command in list(self._running.items()):
                if command.has_ended(now):
                    del self._running[index]
                    self._send_part(index, command.finish(), exit_code=command.exit_code)
                else:
                    self._send_part(index, [output.take_part(now) for output in command.outputs])

    def _read_outputs(self) -> None:
        """Read what is there, and wait a moment where there is nothing."""
        import select  # noqa: PLC0415 - see CommandProcess

        outputs = {output.pipe: output for command in self._running.values() for output in command.outputs}
        poll = select.poll()
        for pipe, output in outputs.items():
            if output.is_open:
                poll.register(pipe, select.POLLIN)
        for pipe, _ in poll.poll(20):
            outputs[pipe].read()

    def _send_part(self, index: int, texts: "list[str]", **end: "int | None") -> None:
        if any(texts) or end:
            data = [text.encode() for text in texts]
            part = {"part": index, "out": len(data[0]), **end, "token": self._token}
            send_message(self._stream, part, data[0] + data[1])


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    stream = channel.makefile("rwb", buffering=-1)
    hello, _ = receive_message(stream)
    for name, value in hello["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.nice(5)
    os.chdir(hello["folder"])
    sys.path.insert(0, hello["folder"])
    sys.argv = [""]
    files, notebook = WorkFolder(hello["folder"]), Notebook()
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace", line_buffering=True)
    send_message(stream, {"token": hello["token"]})
    while True:
        request, payload = receive_message(stream)
        if request["do"] == "shell":
            reply, data = run_commands(request, files, ShellRun(stream, request["token"])), b""
        else:
            reply, data = handle_request(request, payload, files, notebook)
        send_message(stream, {**reply, "token": request["token"]}, data)


def handle_request(
    request: GuestMessage, payload: bytes, files: WorkFolder, notebook: Notebook
) -> "tuple[GuestMessage, bytes]":
    try:
        if request["do"] == "run":
            before = files.scan()
            exit_status = notebook.run(request["code"])
            changed, skipped, data = files.read_changed(before, request["max_files"], request["max_bytes"])
            return {"exit": exit_status, "files": changed, "skipped": skipped}, data
        if request["do"] == "read":
            return {}, files.read(request["name"], request["max_bytes"])
        if request["do"] == "write":
            files.write(request["name"], payload)
        elif request["do"] == "delete":
            files.delete(request["name"])
        listed = [{"name": name, "size": size, "at": at // 10**9} for name, (size, at, _) in files.scan().items()]
        return {"files": listed}, b""
    except FileNotFoundError:
        return {"error": "missing"}, b""
    except OSError as exc:
        return {"error": exc.strerror or str(exc)}, b""


def run_commands(request: GuestMessage, files: WorkFolder, shell: ShellRun) -> GuestMessage:
    before = files.scan()
    shell.run(request["commands"])
    after = files.scan()
    return {"files": [{"name": name, "size": after[name][0]} for name in after if after[name] != before.get(name)]}


def receive_message(stream: io.BufferedRWPair) -> "tuple[GuestMessage, bytes]":
    """Return a message and its payload. Ends the process when the other side has disconnected."""
    size = stream.read(4)
    if len(size) < 4:
        os._exit(0)
    head = json.loads(stream.read(int.from_bytes(size, "big")))
    return head, stream.read(head.get("size", 0))


def send_message(stream: io.BufferedRWPair, header: GuestMessage, payload: bytes = b"") -> None:
    text = json.dumps({**header, "size": len(payload)}).encode()
    stream.write(len(text).to_bytes(4, "big") + text + payload)
    stream.flush()


if __name__ == "__main__":
    main()
