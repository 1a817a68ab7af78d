"""Connections to hosts that requests and programs name: each address is checked after its name was resolved, and again
when its socket is opened.

No proxy is used for them and none may be: a proxy resolves names itself, so that no address could be checked.
"""

import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType] - socket addresses vary

from apis.fair_share import FairShare
from providers.common.fair_turns import run_in_turn
from providers.common.net.addresses import AddressPolicy
from providers.common.net.host_names import is_address

HostResolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes a host and a port; returns the addresses of the host."""
_HAPPY_EYEBALLS_DELAY_S: Final = 0.25
_RESOLVER_THREADS: Final = 16
_TENANT_THREADS: Final = 4
"""Threads that one of several tenants uses: a look-up that no server answers takes one for half a minute."""


class HostUnknown(Exception):
    """The host has no address."""


class AddressRefused(Exception):
    """The host has an address that the policy refuses."""


class SystemResolver:
    """Resolves names as the system does, in threads of its own: name servers that never answer block no other work. A
    tenant whose names have such servers takes some of the threads, and no more where there are `several_tenants`."""

    def __init__(self, *, several_tenants: bool = False) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")
        self._places = FairShare(
            "names being resolved", _RESOLVER_THREADS, tenant_places=_TENANT_THREADS, several_tenants=several_tenants
        )

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host. Raises OSError and UnicodeError."""
        infos = await run_in_turn(
            self._places, self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(info[4][0]) for info in infos]

    def close(self) -> None:
        """End the threads, without waiting for those that resolve."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedHosts:
    """Hosts at the addresses that `policy` permits."""

    def __init__(self, policy: AddressPolicy, resolve: HostResolver) -> None:
        self._policy = policy
        self._resolve = resolve

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connection to an address of the host, which is resolved once. Raises HostUnknown, AddressRefused
        where one of its addresses is refused, and OSError."""
        addresses = [
            (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
            for address in await self._find_addresses(host, port)
        ]
        return await start_connection(
            addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_S, interleave=1, socket_factory=self._open_socket
        )

    async def _find_addresses(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = [host] if is_address(host) else await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise HostUnknown
        if any(self._policy.is_refused(address) for address in addresses):
            raise AddressRefused
        return addresses

    def _open_socket(self, info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
        """Open the socket of every connection. The address was checked before; this holds even if it was not."""
        family, kind, protocol, _, address = info
        if self._policy.is_refused(str(address[0])):
            raise PermissionError("refused")
        return socket.socket(family, kind, protocol)
