"""Client of the machine's Python session server, which it starts where no other worker has."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec

from apis.confinement.commands import CommandEvent
from apis.errors import ConfigError, InvalidRequest, NotFound, Overloaded, ToolFailed
from providers.tool_runtime.python.messages import (
    FailureKind,
    OperationReply,
    OperationRequest,
    encode_message,
    operation_types,
    read_message,
)
from providers.tool_runtime.python.operations import SessionOperations, SessionServerConfig
from providers.tool_runtime.python.session_server import ACKNOWLEDGEMENT
from providers.tool_runtime.python.socket_folder import (
    connect,
    locked_folder,
    prepare_folder,
    remove_stale_sockets,
    socket_path,
)

_log = logging.getLogger(__name__)

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[Concatenate[SessionOperations, P], Awaitable[R]]

_BACKLOG: Final = 1024
_ACKNOWLEDGEMENT_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 15.0
"""Seconds to wait for a server to end all sessions when its last worker leaves."""
_MAX_STARTS: Final = 3
"""Attempts to join a server, which may end just then because its last worker has left."""
_SERVER_VARIABLES: Final = ("PATH", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that a session server gets: no secret of the deployment is in its memory."""


class SessionNotFound(NotFound):
    """The session server of this machine has no session of this name."""


class SessionExpired(SessionNotFound):
    """The session server knows why it has no session of this name any more."""


_ERROR_TYPES: Final[dict[FailureKind, type[Exception]]] = {
    "no_session": SessionNotFound,
    "session_ended": SessionExpired,
    "no_file": NotFound,
    "file_refused": InvalidRequest,
    "unavailable": Overloaded,
    "config": ConfigError,
    "bug": ToolFailed,
}


class _ServerDisconnected(Exception):
    """The server ended before it answered. `was_sent` when it may have begun the operation."""

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__()
        self.was_sent = was_sent


class _Lease:
    """Open connection that keeps the server running, because this process uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._end = asyncio.ensure_future(_read_to_end(reader))

    async def release(self) -> None:
        """Disconnect. The last worker waits until the server and all sessions have ended."""
        with suppress(OSError):
            self._writer.write_eof()
        await asyncio.wait([self._end], timeout=_CLOSE_TIMEOUT_S)
        self.abort()

    def abort(self) -> None:
        """Disconnect without waiting."""
        self._end.cancel()
        self._writer.transport.abort()

    def has_ended(self) -> bool:
        """Return whether the server has ended."""
        return self._end.done()


class SessionClient:
    """Calls the operations of the session server, which runs from `start` to `close` and is started again when it
    ends in between: its sessions are lost then. `has_cgroup` is whether they have a control group."""

    def __init__(self, config: SessionServerConfig, timeout_s: float) -> None:
        self._config = msgspec.json.encode(config)
        self._timeout_s = timeout_s
        self._path = Path()
        self._lease: _Lease | None = None
        self.has_cgroup = False
        self._join_lock = asyncio.Lock()

    async def start(self, deployment_id: str) -> None:
        """Join the server of a deployment. Raise ConfigError when there can be none, or its sandbox does not hold."""
        try:
            self._path = await asyncio.to_thread(socket_path, deployment_id, self._config)
            await self._join(None)
        except OSError as exc:
            raise ConfigError(
                f"tool_runtime: there can be no socket in the folder for temporary files, by which all workers use "
                f"the Python sessions of this machine: {exc}. Name a folder with a short path in TMPDIR."
            ) from exc
        except Overloaded as exc:
            raise ConfigError(f"tool_runtime: {exc.message}") from exc

    async def close(self) -> None:
        """Leave the server, which ends with its last worker."""
        if self._lease is not None:
            await self._lease.release()
            self._lease = None

    async def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return an operation's result; a cancelled call is cancelled in the server, too.

        Raise what `_ERROR_TYPES` names, InvalidRequest for text that is not Unicode, and Overloaded when the server
        does not acknowledge the request at once, does not answer in time, or ends before it has.
        """
        assert not kwargs, "arguments are sent by position"
        return await self._call(operation, args)

    async def call_with_events(
        self,
        operation: Callable[[SessionOperations, str, str, A, Callable[[CommandEvent], None]], Awaitable[R]],
        session: tuple[str, str],
        argument: A,
        on_event: Callable[[CommandEvent], None],
    ) -> R:
        """Return the result of an operation on a session that reports events while it runs, as `call` does."""
        return await self._call(operation, (*session, argument), on_event)

    async def _call(
        self,
        operation: Callable[..., Awaitable[R]],
        arguments: tuple[Any, ...],
        on_event: Callable[[CommandEvent], None] | None = None,
    ) -> R:
        if self._lease is None:
            raise Overloaded("The Python sandbox is not running; try again later.")
        if self._lease.has_ended():
            await self._rejoin(self._lease)
        lease = self._lease
        try:
            return await self._exchange(operation, arguments, on_event)
        except _ServerDisconnected as exc:
            if exc.was_sent:
                raise _state_lost() from None
        await self._rejoin(lease)
        try:
            return await self._exchange(operation, arguments, on_event)
        except _ServerDisconnected:
            raise _state_lost() from None

    async def _rejoin(self, lease: _Lease) -> None:
        _log.warning("the Python session server has ended, and all sessions with it; another one is used")
        try:
            await self._join(lease)
        except (ConfigError, OSError) as exc:
            _log.error("the Python session server cannot be started: %s", exc)
            raise Overloaded("The Python sandbox could not be started; try again later.") from exc

    async def _join(self, old_lease: _Lease | None) -> None:
        """Connect to the server instead of `old_lease`, unless another task has done so."""
        async with self._join_lock:
            if self._lease is not old_lease:
                return
            if old_lease is not None:
                old_lease.abort()
            for _ in range(_MAX_STARTS):
                connection = await asyncio.to_thread(_connect_or_start_server, self._path, self._config)
                self._lease = _Lease(*await asyncio.open_unix_connection(sock=connection))
                try:
                    self.has_cgroup = await self._exchange(SessionOperations.wait_until_ready, ())
                    return
                except _ServerDisconnected:
                    self._lease.abort()
                except BaseException:
                    await self._lease.release()
                    raise
        raise Overloaded("The Python session server ends as soon as it starts; the log says why.")

    async def _exchange(
        self,
        operation: Callable[..., Awaitable[R]],
        arguments: tuple[Any, ...],
        on_event: Callable[[CommandEvent], None] | None = None,
    ) -> R:
        request = OperationRequest(operation.__name__, _encode_arguments(arguments))
        was_sent = False
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_unix_connection(sock=connect(self._path))
                try:
                    async with asyncio.timeout(_ACKNOWLEDGEMENT_TIMEOUT_S):
                        was_sent = True
                        writer.write(encode_message(request))
                        await writer.drain()
                        await reader.readexactly(len(ACKNOWLEDGEMENT))
                    while (reply := await read_message(reader, OperationReply)).event is not None:
                        if on_event is not None:
                            on_event(reply.event)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise Overloaded("The process that keeps this container does not answer. Try again later.") from None
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError, EOFError):
            raise _ServerDisconnected(was_sent=was_sent) from None
        except OSError as exc:  # no descriptors left here, or no room in the server's queue
            message = f"The process that keeps this container cannot be reached now: {exc.strerror}. Try again later."
            raise Overloaded(message) from None
        if reply.failure is not None:
            kind, message = reply.failure
            raise _ERROR_TYPES[kind](message)
        return msgspec.msgpack.decode(reply.result, type=operation_types(operation)[1])


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        await reader.read()


def _state_lost() -> Overloaded:
    message = "The process that kept this container ended before it answered: its variables and files are gone."
    return Overloaded(message)


def _encode_arguments(arguments: tuple[Any, ...]) -> msgspec.Raw:
    # A model may write, and an embedding program name, half of a surrogate pair, which has no UTF-8.
    texts = (each.encode(errors="backslashreplace").decode() if isinstance(each, str) else each for each in arguments)
    try:
        return msgspec.Raw(msgspec.msgpack.encode(tuple(texts)))
    except UnicodeEncodeError:
        raise InvalidRequest("Text for a container must be whole Unicode characters.") from None


def _connect_or_start_server(path: Path, config: bytes) -> socket.socket:
    """Return a connection to the server at `path`, and start it where none listens. Blocks for milliseconds.

    The first connection waits in the listener's queue before the server runs, so that there is one to end with.
    """
    prepare_folder(path)
    with locked_folder(path.parent):
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return connect(path)
        remove_stale_sockets(path.parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            connection = connect(path)
            try:
                _start_server(listener, path, config)
            except BaseException:
                connection.close()
                path.unlink()
                raise
        return connection


def _start_server(listener: socket.socket, path: Path, config: bytes) -> None:
    module = SessionOperations.__module__.rpartition(".")[0] + ".session_server"
    environment = {name: os.environ[name] for name in _SERVER_VARIABLES if name in os.environ}
    process = subprocess.Popen(  # noqa: S603 - this Python and a module of ours
        [sys.executable, "-P", "-m", module, str(path), str(_log.getEffectiveLevel()), config.decode()],
        stdin=listener.fileno(),
        stdout=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    # It may outlive this worker; if not, it is waited for, so that no zombie remains.
    threading.Thread(target=process.wait, name="python-session-server", daemon=True).start()
