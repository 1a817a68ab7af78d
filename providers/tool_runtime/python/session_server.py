"""Python session server: one process per machine, user and deployment that holds the Python sessions of all workers.

A worker starts it (see `session_client`) with a listening Unix socket as standard input. It serves one operation per
connection and ends with its last connection: each worker holds one open, on which it sends nothing, for as long as it
runs. It handles SIGTERM and SIGINT by doing nothing, since a service manager sends them to all processes at once, while
the workers still finish their responses.
"""

import asyncio
import inspect
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from apis.confinement.commands import CommandEvent
from providers.tool_runtime.python.messages import (
    EVENTS_PARAMETER,
    OperationReply,
    OperationRequest,
    SessionFailure,
    encode_message,
    operation_types,
    read_message,
)
from providers.tool_runtime.python.operations import SessionOperations, SessionServerConfig
from providers.tool_runtime.python.socket_folder import locked_folder

_log = logging.getLogger(__name__)

ACKNOWLEDGEMENT: Final = b"."
"""Sent as soon as a request was read, so that a worker can distinguish a stopped server from a long program."""
_CREDENTIALS_STRUCT: Final = struct.Struct("3i")


class SessionServer:
    """Serves operations to the processes of this user. A client that disconnects cancels its operation."""

    def __init__(self, operations: SessionOperations) -> None:
        self._operations = operations
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._is_unused = asyncio.Event()

    async def serve(self, listener: socket.socket, path: Path) -> None:
        """Serve until the last connection ends, then remove the socket at `path` and end all sessions.

        The last connection stays open until the process has ended, so that its worker can wait for that.
        """
        server = await asyncio.start_unix_server(self._accept_connection, sock=listener)
        await self._is_unused.wait()
        await asyncio.to_thread(_remove_socket, path)
        server.close()
        await self._operations.close()

    def _accept_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve_connection(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._forget_connection)

    def _forget_connection(self, task: asyncio.Task[None]) -> None:
        if len(self._connections) == 1:
            self._is_unused.set()
        else:
            self._connections.pop(task).close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _get_peer_uid(writer.get_extra_info("socket")) != os.geteuid():
                _log.warning("a process of another user was refused the Python sessions of this one")
                return
            request = await read_message(reader, OperationRequest)
            writer.write(ACKNOWLEDGEMENT)
            reply = await _run_until_disconnect(reader, self._handle_request(request, writer))
            if reply is not None:
                writer.write(reply)
                await writer.drain()
        except (OSError, EOFError, msgspec.MsgspecError) as exc:
            _log.debug("a worker disconnected: %r", exc)

    async def _handle_request(self, request: OperationRequest, writer: asyncio.StreamWriter) -> bytes:
        operation = getattr(self._operations, request.operation)
        argument_types, _ = operation_types(operation.__func__)
        arguments = msgspec.msgpack.decode(request.arguments, type=argument_types)
        if EVENTS_PARAMETER in inspect.signature(operation).parameters:
            arguments += (partial(_send_event, writer),)
        try:
            result = await operation(*arguments)
        except SessionFailure as exc:
            return encode_message(OperationReply(failure=(exc.kind, str(exc))))
        return encode_message(OperationReply(msgspec.Raw(msgspec.msgpack.encode(result))))


async def _run_until_disconnect(reader: asyncio.StreamReader, work: Coroutine[Any, Any, bytes]) -> bytes | None:
    """Return the work's reply, or None when the worker has disconnected, which cancels it. A bug becomes a reply."""
    operation = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait([operation, disconnect], return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        operation.cancel()
        await asyncio.wait([disconnect, operation])
    if not disconnect.cancelled():
        disconnect.exception()  # without this, asyncio logs it as never retrieved
    if operation.cancelled():
        return None
    if (bug := operation.exception()) is not None:
        _log.error("an operation on a Python session failed on a bug", exc_info=bug)
        return encode_message(OperationReply(failure=("bug", "The tool failed on an error of its own.")))
    return operation.result()


def _send_event(writer: asyncio.StreamWriter, event: CommandEvent) -> None:
    """Send an event. Their number and size are bounded, so they need not wait for a worker that reads slowly."""
    writer.write(encode_message(OperationReply(event=event)))


def _get_peer_uid(connection: Any) -> int:
    """Return the user of the process at the other end, from the kernel where that is Linux; elsewhere only the
    folder's mode keeps other users out."""
    if sys.platform != "linux":
        return os.geteuid()
    size = _CREDENTIALS_STRUCT.size
    return _CREDENTIALS_STRUCT.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


def _remove_socket(path: Path) -> None:
    with locked_folder(path.parent):
        path.unlink(missing_ok=True)


async def _serve(listener: socket.socket, path: Path, config: SessionServerConfig) -> SessionServer:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: None)
    server = SessionServer(SessionOperations(config))
    await server.serve(listener, path)
    return server


def main() -> None:
    """Serve with the socket's path, the level of the log and the configuration as JSON from the command line."""
    path, log_level, config = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it holds the secrets of containers
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("providers").setLevel(int(log_level))
    listener = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    _server = asyncio.run(_serve(listener, Path(path), msgspec.json.decode(config, type=SessionServerConfig)))
    os._exit(0)  # with the last connection still open, by whose end its worker learns of this one


if __name__ == "__main__":
    main()
