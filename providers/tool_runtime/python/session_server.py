"""Keeper: a Unix socket on which other processes of this machine and user can use the sessions of this one."""

import asyncio
import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from pydantic import ValidationError

from apis.errors import ConfigError, InvalidRequest, Overloaded, StackError, ToolFailed
from providers.tool_runtime.python.messages import (
    Operation,
    OperationReply,
    OperationRequest,
    R,
    build_operation_schema,
    encode_message,
    error_to_payload,
    payload_to_error,
    read_message,
)

_log = logging.getLogger(__name__)

_FOLDER_PREFIX: Final = "python-keeper"
_SOCKET_NAME: Final = "s"
_BACKLOG: Final = 1024
_MESSAGE_TIMEOUT_S: Final = 10.0
"""For a message to come or go: both sides are on one machine."""
_ACKNOWLEDGEMENT: Final = b"."
"""Told at once when a request was read: who does not say so is stopped, and not waited for as work is."""
_CREDENTIALS_STRUCT: Final = struct.Struct("3i")


class SessionNotHere(Exception):
    """Nobody keeps the session there. `has_ended`: nor is there anybody who could."""

    def __init__(self, *, server_has_ended: bool) -> None:
        super().__init__()
        self.server_has_ended = server_has_ended


class ServerDisconnected(Exception):
    """The other process ended, or left, before it had answered: what was asked may be half done."""


class SessionServer:
    """Does `operations` for other processes, by their names; those on a session only where it is kept here.

    Its folder is for this user alone, and whoever connects is asked of the kernel: another user is left unanswered.
    Whoever leaves before the answer cancels what was asked.
    """

    address = ""
    """The socket's path, while it listens."""

    def __init__(self, operations: Sequence[Operation[..., Any]], has_session: Callable[[str, str], bool]) -> None:
        self._operations: Mapping[str, Operation[..., Any]] = {each.__name__: each for each in operations}
        self._has_session = has_session
        self._server: asyncio.Server | None = None
        self._connection_tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ConfigError where there is no place for a socket."""
        await asyncio.to_thread(_remove_stale_folders)
        listener = socket.socket(socket.AF_UNIX)
        try:
            path = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}-{os.getpid()}-"), _SOCKET_NAME)
            self.address = str(path)
            listener.bind(self.address)
            listener.listen(_BACKLOG)
            self._server = await asyncio.start_unix_server(self._accept_connection, sock=listener)
        except OSError as exc:
            listener.close()
            await self.close()
            raise ConfigError(
                f"tool_runtime: there can be no socket in the folder for temporary files, by which other workers use "
                f"this one's Python sessions: {exc}. Name a folder with a short path in TMPDIR."
            ) from exc

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._connection_tasks:
            task.cancel()
        if self._connection_tasks:
            await asyncio.wait(self._connection_tasks)
        if self.address:
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)
            self.address = ""

    def _accept_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._connection_tasks.add(task)
        task.add_done_callback(self._connection_tasks.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _get_peer_uid(writer.get_extra_info("socket")) != os.geteuid():
                _log.warning("a process of another user was refused the Python sessions of this one")
                return
            async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
                request = await read_message(reader, OperationRequest)
            writer.write(_ACKNOWLEDGEMENT)
            reply = await _run_until_disconnect(reader, self._handle_request(request))
            if reply is not None:
                writer.write(reply)
                async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as exc:
            _log.debug("another process broke off: %r", exc)
        finally:
            writer.close()

    async def _handle_request(self, request: OperationRequest) -> bytes:
        if request.session is not None and not self._has_session(request.tenant, request.session):
            return encode_message(OperationReply(has_session=False))
        try:
            operation = self._operations[request.operation]
            form = build_operation_schema(operation)
            given = {name: form.arguments[name].validate_python(it) for name, it in request.arguments.items()}
        except (KeyError, ValidationError):
            return _encode_error(Overloaded(_VERSION_MISMATCH))
        try:
            answer = form.result.dump_python(await operation(**given))
        except StackError as exc:
            return _encode_error(exc)
        return encode_message(OperationReply(answer))


_VERSION_MISMATCH: Final = "The process that keeps this container is of another version. Try again later."


def _encode_error(error: StackError) -> bytes:
    return encode_message(OperationReply(error=error_to_payload(error)))


async def _run_until_disconnect(reader: asyncio.StreamReader, work: Coroutine[Any, Any, bytes]) -> bytes | None:
    """The work's reply; None when the other side has left: then it was cancelled. A bug is told as such."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait([leaving, working])
    if not leaving.cancelled():
        leaving.exception()  # or else it is reported as forgotten
    if working.cancelled():
        return None
    if (bug := working.exception()) is not None:
        _log.error("an operation on a Python session failed on a bug", exc_info=bug)
        return _encode_error(ToolFailed("The tool failed on an error of its own."))
    return working.result()


async def call_server(address: str, request: OperationRequest, operation: Operation[..., R], timeout_s: float) -> R:
    """Have an operation done by the keeper at `address`, and its answer. To be cancelled cancels it there.

    Raises what the operation does, NotKept, BrokeOff, and Overloaded when it is not begun at once, or not done
    `within_s` seconds later.
    """
    try:
        message = encode_message(request)
    except UnicodeEncodeError:
        raise InvalidRequest("Text for a container must be whole Unicode characters.") from None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _open_connection(address)
            try:
                async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
                    writer.write(message)
                    await writer.drain()
                    await reader.readexactly(len(_ACKNOWLEDGEMENT))
                reply = await read_message(reader, OperationReply)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise Overloaded("The process that keeps this container does not answer. Try again later.") from None
    except (OSError, EOFError):
        raise ServerDisconnected from None
    except msgspec.MsgspecError:
        raise Overloaded(_VERSION_MISMATCH) from None
    if not reply.has_session:
        raise SessionNotHere(server_has_ended=False)
    if reply.error is not None:
        raise payload_to_error(reply.error)
    try:
        return build_operation_schema(operation).result.validate_python(reply.result)
    except ValidationError:
        raise Overloaded(_VERSION_MISMATCH) from None


async def _open_connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        connection = _connect(address)
    except (ConnectionRefusedError, FileNotFoundError):
        raise SessionNotHere(server_has_ended=True) from None
    except OSError as exc:  # no files left to open here, or no room left there
        message = f"The process that keeps this container cannot be reached now: {exc.strerror}. Try again later."
        raise Overloaded(message) from None
    try:
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


def _connect(address: str) -> socket.socket:
    """A connection to the keeper there. Raises OSError, also for somebody else who has taken its place."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)  # it never waits: there is room for it at once, or there is none
        connection.connect(address)
        if _get_peer_uid(connection) != os.geteuid():
            raise ConnectionRefusedError
    except BaseException:
        connection.close()
        raise
    return connection


def _get_peer_uid(connection: Any) -> int:
    """The user that the process at the other end runs as, as the kernel knows it; where it tells nobody, the folder
    alone has kept others out."""
    if sys.platform != "linux":
        return os.geteuid()
    size = _CREDENTIALS_STRUCT.size
    return _CREDENTIALS_STRUCT.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


def _remove_stale_folders() -> None:
    """Take away the folders of servers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}-*-*"):
        with suppress(OSError, ValueError):
            if folder.stat().st_uid != os.geteuid() or psutil.pid_exists(int(folder.name.split("-")[2])):
                continue
            try:
                _connect(str(folder / _SOCKET_NAME)).close()
            except (ConnectionRefusedError, FileNotFoundError):  # nor a process whose numbers are others than ours
                shutil.rmtree(folder, ignore_errors=True)
