"""The listening socket of a server: it is bound before the workers start, which then accept its connections."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from apis.errors import ConfigError
from stack.server_config import HttpServerConfig

_log = logging.getLogger(__name__)

_BACKLOG: Final = 4096
_MAX_ACCEPTED: Final = 64
"""Connections that one turn of the event loop accepts; more wait for the next one, and delay no other request."""
_RETRY_S: Final = 1.0
"""Seconds without accepting after the system had no file or memory left for a connection."""


class Listener:
    """Listens on a bound socket and makes a protocol for each connection.

    One turn of the event loop accepts all connections that wait. uvloop's own server accepts one in each turn, which
    spreads the beginnings of requests that arrive together, and then each token of their streams wakes the server.
    """

    def __init__(self, bound: socket.socket, create_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._socket = bound
        self._create_protocol = create_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._loop.add_reader(bound, self._accept)

    async def close(self) -> None:
        """Accept no more, and wait until the connections that were accepted are open: a request may be on its way."""
        self._pause()
        if self._opening:
            await asyncio.wait(self._opening)
        self._socket.close()

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # the waiting connection would wake the loop again at once
                _log.error("cannot accept connections: %s; trying again in %g s", exc.strerror, _RETRY_S)
                self._pause()
                self._retry = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._socket, self._accept)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._create_protocol, connection)
        except OSError:  # the client has gone
            connection.close()


def bind_listener(config: HttpServerConfig) -> socket.socket:
    """Return a socket bound to the config's host and port, which does not listen yet. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only for a socket with its protocol: without it, deltas wait for 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ConfigError(
            f"server: cannot listen on {config.host} port {config.port}: {exc.strerror}. Choose another with "
            "server.host and server.port, or --host and --port."
        ) from exc
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL at which clients reach the listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
