"""PostgresServer: a real PostgreSQL on a free loopback port, for tests to fill, hang, kill and start again."""

import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import psutil

from tests.support.servers.ports import free_port

START_S: Final = 20
PASSWORD: Final = "s3cret"


class PostgresServer:
    """A cluster of its own in a temporary folder, so that a killed server comes back with what it had.

    PostgreSQL does not run as root: then it runs as the user `postgres`, who could not enter pytest's own folders.
    Every method blocks for a bounded time: within a running event loop, call it through `asyncio.to_thread`.
    """

    def __init__(self, programs: Path | None = None, **settings: str) -> None:
        """`programs` is the folder of another PostgreSQL than the machine's own."""
        self._programs = programs
        self._folder = tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True)
        self._data = Path(self._folder.name) / "data"
        self._settings = settings
        self._port = free_port()
        self._user = "postgres" if os.geteuid() == 0 else None

    def __enter__(self) -> Self:
        if self._user is not None:
            shutil.chown(self._folder.name, self._user, self._user)
        self._create_data()
        settings = {"listen_addresses": "127.0.0.1", "port": str(self._port), "unix_socket_directories": ""}
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in {**settings, **self._settings}.items())
        self.start()
        return self

    def _create_data(self) -> None:
        secret = Path(self._folder.name) / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        options = ("--username=stack", f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C")
        self._run("initdb", "--no-sync", *options, f"--pgdata={self._data}")

    def __exit__(self, *_: object) -> None:
        self.resume()
        self.kill()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"postgresql://stack:{PASSWORD}@{self.host}/postgres"

    @property
    def host(self) -> str:
        """The host and port, of which a url may name several."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, unless it runs, and return when connections are accepted."""
        if not self._processes():
            log = Path(self._folder.name) / "log"
            self._run("pg_ctl", "start", "--wait", f"--timeout={START_S}", f"--log={log}", f"--pgdata={self._data}")

    def kill(self) -> None:
        """Send SIGKILL to all its processes: no connection is closed properly."""
        dead: list[int] = []
        for process in self._processes():
            with suppress(ProcessLookupError):
                dead.append(os.pidfd_open(process.pid))
        self._each(psutil.Process.kill)
        for each in dead:
            assert select.select([each], [], [], 5)[0]
            os.close(each)
        # Its parent may not have noticed yet, and until then the number in the file looks like a server that runs.
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        """Send SIGSTOP to all its processes: the kernel still accepts connections, and no query is answered."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        """SIGCONT, whether it was paused or not."""
        self._each(psutil.Process.resume)

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        """The first process first: it makes no new ones then."""
        for process in self._processes()[:1] + self._processes()[1:]:
            with suppress(psutil.NoSuchProcess):
                act(process)

    def _processes(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(int((self._data / "postmaster.pid").read_text().split("\n", 1)[0]))
            return [first, *first.children()]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return []

    def execute(self, *statements: str) -> str:
        """Execute each statement in a transaction of its own, and return the output of the last one."""
        output = ""
        for statement in statements:
            output = self._run("psql", self.url, "--tuples-only", "--no-align", "--command", statement)
        return output.strip()

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._programs / program) if self._programs else _path(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            timeout=3 * START_S,
            check=False,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else (),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} fails: {done.stdout!r}")
        return done.stdout.decode()


class StandbyServer(PostgresServer):
    """A hot standby of another server, which acknowledges no durable write from now on that the standby has not."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self._primary = primary

    def _create_data(self) -> None:
        copied = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync", f"--pgdata={self._data}")
        self._run("pg_basebackup", f"--dbname={self._primary.url}", *copied)

    def start(self) -> None:
        """Start it, and return when the primary waits for it."""
        super().start()
        self._primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_S
        while self._primary.execute("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") != "1":
            assert time.monotonic() < deadline, "the standby does not replicate"
            time.sleep(0.05)

    def promote(self) -> None:
        """Make it the primary, and return when it accepts writes."""
        self._run("pg_ctl", "promote", "--wait", f"--timeout={START_S}", f"--pgdata={self._data}")


def _path(program: str) -> str:
    """Debian keeps the server's programs off the path, in a folder for each version."""
    path = shutil.which(program) or max(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{program}")), default=None)
    if path is None:
        raise RuntimeError("These tests need a PostgreSQL server: apt-get install postgresql")
    return path
