"""Proxies of containers: each one listens inside of its sandbox and connects outside, to the hosts of its rules."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from apis.fair_share import Place
from apis.imports import import_from_string
from providers.tool_runtime.python.egress.access import ContainerAccess, Egress
from providers.tool_runtime.python.egress.connection import ProxyConnection
from providers.tool_runtime.python.egress.environment import read_system_certificates
from providers.tool_runtime.python.egress.rules import HostRule, HostRules
from providers.tool_runtime.python.egress.secrets import ContainerSecrets
from providers.tool_runtime.python.egress.settings import NetworkSettings, NetworkUse, SecretValue

if TYPE_CHECKING:
    from providers.tool_runtime.python.egress.authority import ContainerAuthority

_log = logging.getLogger(__name__)
_BUFFER_BYTES: Final = 256 * 1024
"""Size of the kernel's buffers of a connection, in each direction: they belong to this process, not to the sandbox."""
_READ_AHEAD_BYTES: Final = 64 * 1024
_ACCEPT_PAUSE_S: Final = 0.5


class ContainerProxy:
    """The proxy of one container, which has the `access`."""

    def __init__(self, access: ContainerAccess) -> None:
        self.access = access
        self._room = asyncio.Semaphore(access.egress.settings.max_container_connections)
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], asyncio.WriteTransport] = {}

    def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket of the sandbox until `close`, which closes it."""
        listener.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._accepting = asyncio.ensure_future(self._accept_connections(listener))

    async def close(self) -> None:
        """End the listener and all connections. Harmless the second time."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        while self._connections:  # one may have begun meanwhile
            for task in self._connections:
                task.cancel()
            await asyncio.wait([*self._connections])

    async def _accept_connections(self, listener: socket.socket) -> None:
        """Accept a connection when there is room for it: others wait in the kernel's queue, in the sandbox."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                await self._room.acquire()
                connection = await _accept(listener)
                try:
                    place = await self.access.egress.places.acquire(self.access.tenant)
                except BaseException:
                    connection.close()
                    raise
                reader = asyncio.StreamReader(limit=_READ_AHEAD_BYTES)
                # with a callback, the protocol is that of a server, whose side of TLS it then takes
                protocol = asyncio.StreamReaderProtocol(reader, partial(self._begin_connection, place))
                await loop.connect_accepted_socket(lambda protocol=protocol: protocol, connection)

    def _begin_connection(self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(ProxyConnection(self.access, reader, writer).serve())
        self._connections[task] = writer.transport  # that of TLS, which may come, cannot be aborted once it is closed
        task.add_done_callback(partial(self._end_connection, place))

    def _end_connection(self, place: Place, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task).abort()
        place.release()
        self._room.release()
        if not task.cancelled() and (bug := task.exception()) is not None:
            _log.error("a connection of a container failed on a bug", exc_info=bug)


async def open_proxy(
    egress: Egress,
    owner: tuple[str, str],
    settings: NetworkSettings,
    secrets: Sequence[SecretValue],
    use: NetworkUse | None = None,
    *,
    may_get_secrets: bool = False,
) -> ContainerProxy:
    """Return the proxy of a container, whose `owner` is its tenant and its name. `use` has the bytes of its former
    proxies. One that `may_get_secrets` later has its programs trust it from the beginning. Raises OSError."""
    authority: ContainerAuthority | None = None
    certificates = await asyncio.to_thread(read_system_certificates)
    if secrets or may_get_secrets:
        authority_type: type[ContainerAuthority] = await asyncio.to_thread(
            import_from_string, "providers.tool_runtime.python.egress.authority:ContainerAuthority"
        )
        authority = await asyncio.to_thread(authority_type)
        certificates += authority.certificate
    rules = HostRules(map(HostRule.parse, settings.allowed_domains))
    of_container = await asyncio.to_thread(ContainerSecrets, secrets)
    access = ContainerAccess(egress, owner, rules, of_container, certificates, authority)
    access.use = use or NetworkUse()
    return ContainerProxy(access)


async def _accept(listener: socket.socket) -> socket.socket:
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            return connection
        except OSError as exc:  # no descriptors are left
            _log.warning("a container's connection cannot be accepted now: %s", exc)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
