"""RedisServer: a real redis-server on a free loopback port, for tests to fill, stop and start again."""

import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support.servers.ports import free_port

START_S = 10.0


class RedisServer:
    """Keeps its data in `folder` (append-only file), so that a killed server comes back with what it had.

    Every method blocks for a bounded time: within a running event loop, call it through `asyncio.to_thread`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://{self.host}/0"

    @property
    def host(self) -> str:
        """The host and port."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, on the same port if it ran before, and return when connections are accepted."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("These tests need a Redis server: apt-get install redis-server")
        again = self._port != 0
        said: bytes | None = b""
        for _ in range(1 if again else 5):
            self._port = self._port if again else free_port()
            persistence = ("--save", "", "--appendonly", "yes", "--dir", str(self._folder))
            command = (program, "--bind", "127.0.0.1", "--port", str(self._port), *persistence, *self._options)
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = _read_until(self._process, b"Ready to accept connections")
            if said is None:
                return
            self.stop()
        raise RuntimeError(f"redis-server does not start: {said!r}")

    def stop(self) -> None:
        """End it by its process id, first politely; it may be paused or dead already."""
        if self._process is not None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._gone()

    def kill(self) -> None:
        """Send SIGKILL: no connection is closed properly."""
        if self._process is not None:
            self._process.kill()
            self._gone()

    def pause(self) -> None:
        """SIGSTOP: it still accepts connections, and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _gone(self) -> None:
        if self._process is not None:
            self._process.wait(5)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def _read_until(process: "subprocess.Popen[bytes]", expected: bytes) -> bytes | None:
    """None once `process` has printed `wanted`; what it printed instead if it ended or START_S passed."""
    assert process.stdout is not None
    output = b""
    deadline = time.monotonic() + START_S
    while expected not in output:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not chunk:
            return output
        output += chunk
    return None
