"""Proxies of containers: each one listens inside of its sandbox and connects outside, to the hosts of its rules."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from apis.certificates import trusted_certificates
from apis.fair_share import FairShare, Place
from apis.imports import import_from_string
from providers.common.net.addresses import AddressPolicy
from providers.common.net.checked_hosts import CheckedHosts, HostResolver, SystemResolver
from providers.tool_runtime.python.egress.connection import ProxyConnection
from providers.tool_runtime.python.egress.environment import build_environment, read_system_certificates
from providers.tool_runtime.python.egress.rules import HostRule, HostRules
from providers.tool_runtime.python.egress.secrets import ContainerSecrets, HostSecrets
from providers.tool_runtime.python.egress.settings import (
    EgressCounts,
    EgressSettings,
    NetworkSettings,
    NetworkUse,
    SecretValue,
)

if TYPE_CHECKING:
    from providers.tool_runtime.python.egress.authority import ContainerAuthority

_log = logging.getLogger(__name__)
_BUFFER_BYTES: Final = 256 * 1024
"""Size of the kernel's buffers of a connection, in each direction: they belong to this process, not to the sandbox."""
_READ_AHEAD_BYTES: Final = 64 * 1024
_ACCEPT_PAUSE_S: Final = 0.5


class Egress:
    """The way out of all containers of a session server: what their proxies share."""

    def __init__(
        self, settings: EgressSettings, *, several_tenants: bool = False, resolve: HostResolver | None = None
    ) -> None:
        self.settings = settings
        self.rules = settings.rules()
        self._resolver = SystemResolver()
        policy = AddressPolicy(
            [ip_network(each) for each in settings.allowed_private_networks],
            [ip_network(each) for each in settings.denied_networks],
        )
        self.hosts = CheckedHosts(policy, resolve or self._resolver.resolve)
        self.places = FairShare("connections of containers", settings.max_connections, several_tenants=several_tenants)

    async def open_proxy(
        self,
        owner: tuple[str, str],
        settings: NetworkSettings,
        secrets: Sequence[SecretValue],
        use: NetworkUse | None = None,
    ) -> "ContainerProxy":
        """Return the proxy of a container, whose `owner` is its tenant and its name. `use` has the bytes of its former
        proxies. Raises OSError."""
        authority: ContainerAuthority | None = None
        certificates = await asyncio.to_thread(read_system_certificates)
        if secrets:
            authority_type: type[ContainerAuthority] = await asyncio.to_thread(
                import_from_string, "providers.tool_runtime.python.egress.authority:ContainerAuthority"
            )
            authority = await asyncio.to_thread(authority_type)
            certificates += authority.certificate
        rules = HostRules(map(HostRule.parse, settings.allowed_domains))
        of_container = await asyncio.to_thread(ContainerSecrets, secrets)
        proxy = ContainerProxy(self, owner, rules, of_container, certificates, authority)
        proxy.use = use or NetworkUse()
        return proxy

    async def load_upstream_context(self) -> ssl.SSLContext:
        """Return the context by which hosts are verified. Raises OSError."""
        return await asyncio.to_thread(trusted_certificates)

    def close(self) -> None:
        """End the threads that resolve names."""
        self._resolver.close()


class ContainerProxy:
    """Proxy of one container. `environment` and `certificates` are what programs need to use it; `use` is bounded."""

    def __init__(
        self,
        egress: Egress,
        owner: tuple[str, str],
        rules: HostRules,
        secrets: ContainerSecrets,
        certificates: bytes,
        authority: "ContainerAuthority | None",
    ) -> None:
        self.egress = egress
        self.tenant, self.container = owner
        self.rules = rules
        self.environment = build_environment(secrets.variables())
        self.certificates = certificates
        self._secrets = secrets
        self._authority = authority
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._room = asyncio.Semaphore(egress.settings.max_container_connections)
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._counts = EgressCounts()
        self.use = NetworkUse()

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

    def update_secrets(self, secrets: Sequence[SecretValue]) -> None:
        """Take other values for the secrets of these names."""
        self._secrets.update(secrets)

    def secrets_of_host(self, host: str) -> HostSecrets | None:
        """Return the secrets that belong to a host, whose TLS the proxy then ends; None where there are none."""
        return self._secrets.of_host(host)

    async def server_context(self, host: str) -> ssl.SSLContext:
        """Return the context in which the proxy stands for a host that secrets belong to."""
        assert self._authority is not None, "made with the first secret"
        if host not in self._contexts:
            self._contexts[host] = await asyncio.to_thread(self._authority.build_server_context, host)
        return self._contexts[host]

    def count(self, counts: EgressCounts) -> bool:
        """Add to the counts; return False where the container has used up its bytes."""
        self._counts += counts
        self.use.total_bytes += counts.sent_bytes + counts.received_bytes
        return self.use.total_bytes <= self.egress.settings.container_bytes

    def take_counts(self) -> EgressCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, EgressCounts()
        return counts

    async def _accept_connections(self, listener: socket.socket) -> None:
        """Accept a connection when there is room for it: others wait in the kernel's queue, in the sandbox."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                await self._room.acquire()
                connection = await _accept(listener)
                try:
                    place = await self.egress.places.acquire(self.tenant)
                except BaseException:
                    connection.close()
                    raise
                reader = asyncio.StreamReader(limit=_READ_AHEAD_BYTES)
                # with a callback, the protocol is that of a server, whose side of TLS it then takes
                protocol = asyncio.StreamReaderProtocol(reader, partial(self._begin_connection, place))
                await loop.connect_accepted_socket(lambda protocol=protocol: protocol, connection)

    def _begin_connection(self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(ProxyConnection(self, reader, writer).serve())
        self._connections[task] = writer
        task.add_done_callback(partial(self._end_connection, place))

    def _end_connection(self, place: Place, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task).transport.abort()
        place.release()
        self._room.release()
        if not task.cancelled() and (bug := task.exception()) is not None:
            _log.error("a connection of a container failed on a bug", exc_info=bug)


async def _accept(listener: socket.socket) -> socket.socket:
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            return connection
        except OSError as exc:  # no descriptors are left
            _log.warning("a container's connection cannot be accepted now: %s", exc)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
