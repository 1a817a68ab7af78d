"""GuardedFetcher: a Fetcher that connects only to addresses of the public internet, each checked before it connects."""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, Field

from apis.certificates import trusted_certificates
from apis.documents.fetcher import Fetcher, FetchRequest, FetchResponse, FetchStream
from apis.errors import FetchFailed, FetchRefused
from apis.fair_share import ONE_TENANT, Tenants
from apis.imports import import_from_string
from apis.provider import Provider
from providers.common.net.addresses import AddressPolicy, IPNetwork
from providers.common.net.checked_hosts import AddressRefused, CheckedHosts, HostResolver, HostUnknown, SystemResolver
from providers.fetcher.limits import FetchLimits
from providers.fetcher.targets import Target, resolve_redirect, text_to_host, url_to_target

if TYPE_CHECKING:
    from providers.fetcher.connections import Connections, HopResponse

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REDIRECT_STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_FRAMING_HEADERS: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
"""Headers that frame a message. Only the fetcher sets them; a caller's are dropped."""
_CROSS_ORIGIN_HEADERS: Final = frozenset({"accept", "accept-language", "content-type", "user-agent"})
"""Headers that follow a redirect to another origin. Any other may hold a credential of the first origin."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")
_ALL_NETWORKS: Final = (ip_network("0.0.0.0/0"), ip_network("::/0"))

_log = logging.getLogger(__name__)


def _validate_host(text: str) -> str:
    try:
        return text_to_host(text)
    except FetchFailed as exc:
        raise ValueError(exc.message) from None


@dataclass(frozen=True, slots=True)
class _Hop:
    """One request of a chain of redirects."""

    target: Target
    method: str
    headers: dict[str, str] = field(repr=False)
    body: bytes | None = field(repr=False)
    allow_private: bool = False

    def next_hop(self, status: int, location: str) -> "_Hop":
        """Return the next request as browsers form it, less the headers of the first origin. Raises FetchFailed."""
        target = resolve_redirect(self.target, location)
        hop = replace(self, target=target, allow_private=False)
        if status == 303 or (status in (301, 302) and self.method == "POST"):
            headers = {name: value for name, value in self.headers.items() if name != "content-type"}
            hop = replace(hop, method="HEAD" if self.method == "HEAD" else "GET", headers=headers, body=None)
        if target.origin == self.target.origin:
            return hop
        if hop.body is not None:
            raise FetchFailed("The server redirects what was sent to another server, which is refused.")
        return replace(
            hop, headers={name: value for name, value in hop.headers.items() if name in _CROSS_ORIGIN_HEADERS}
        )


class GuardedFetcher(Fetcher):
    """Fetches over http and https. Each request has a connection of its own, to an address that was resolved and
    checked for it.

    Never sends through a proxy: HTTP_PROXY, HTTPS_PROXY and ALL_PROXY have no effect here, and there is no `proxy`
    field, because a proxy resolves names itself and would reach addresses that nothing has checked. On a network whose
    only way out is a proxy, fetches fail. Cookies and credentials of the environment are not used either.

    `timeout_s` and `max_bytes` of a request replace the config's; `timeout_s` then also replaces `read_timeout_s`, for
    streams that pause.
    """

    class Config(Provider.Config):
        """`allowed_hosts`, where set, are the only hosts, each with its subdomains. `allowed_private_networks` permits
        networks outside the public internet (an intranet's); `denied_networks` forbids more, and wins. `max_bytes`
        bounds a body as sent, `max_inflated_bytes` after decompression. `connect_timeout_s` bounds resolving,
        connecting and the TLS handshake together, `read_timeout_s` the silence between two reads, `timeout_s` all."""

        allowed_hosts: list[Annotated[str, AfterValidator(_validate_host)]] | None = None
        allowed_private_networks: list[IPNetwork] = Field(default_factory=list[IPNetwork])
        denied_networks: list[IPNetwork] = Field(default_factory=list[IPNetwork])
        allowed_ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default=[80, 443], min_length=1)
        timeout_s: float = Field(default=15.0, gt=0)
        connect_timeout_s: float = Field(default=5.0, gt=0)
        read_timeout_s: float = Field(default=10.0, gt=0)
        max_bytes: int = Field(default=5 * 2**20, gt=0)
        max_inflated_bytes: int = Field(default=20 * 2**20, gt=0)
        max_redirects: int = Field(default=5, ge=0)
        max_connections: int = Field(default=100, gt=0)
        user_agent: str = Field(default="Mozilla/5.0 (compatible; responses-stack)", pattern=r"^[\x20-\x7e]+$")

    def __init__(self, config: Config, resolve: HostResolver | None = None, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._tenants = tenants
        self._resolve = resolve or self._resolve_by_system
        self._public_policy = AddressPolicy(config.allowed_private_networks, config.denied_networks)
        self._private_policy = AddressPolicy(_ALL_NETWORKS, config.denied_networks)
        self._resolver: SystemResolver | None = None
        self._connections: dict[AddressPolicy, Connections] = {}

    async def start(self) -> None:
        self._resolver = SystemResolver(several_tenants=self._tenants.are_several)

    async def close(self) -> None:
        for connections in self._connections.values():
            await connections.close()
        if self._resolver is not None:
            self._resolver.close()

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        body = bytearray()
        async with self.open(request) as response:
            async for chunk in response.chunks:
                body += chunk
        return FetchResponse(response.url, response.status, response.headers, bytes(body))

    @asynccontextmanager
    async def open(self, request: FetchRequest) -> AsyncGenerator[FetchStream]:
        limits = self._limits(request)
        try:
            async with asyncio.timeout_at(limits.deadline):
                target, response = await self._follow(request, limits)
        except TimeoutError:
            raise limits.timeout_error() from None
        try:
            async with aclosing(response.chunks()) as chunks:
                yield FetchStream(target.url, response.status, response.headers(), chunks)
        finally:
            await response.close()

    def _limits(self, request: FetchRequest) -> FetchLimits:
        config = self._config
        timeout_s = config.timeout_s if request.timeout_s is None else request.timeout_s
        return FetchLimits(
            deadline=asyncio.get_running_loop().time() + timeout_s,
            timeout_s=timeout_s,
            read_timeout_s=config.read_timeout_s if request.timeout_s is None else timeout_s,
            raw_bytes=request.max_bytes or config.max_bytes,
            inflated_bytes=request.max_bytes or config.max_inflated_bytes,
        )

    async def _follow(self, request: FetchRequest, limits: FetchLimits) -> "tuple[Target, HopResponse]":
        hop = self._first_hop(request)
        for _ in range(self._config.max_redirects + 1):
            response = await self._send(hop, limits)
            location = response.location
            if response.status not in _REDIRECT_STATUSES or location is None or not request.follow_redirects:
                return hop.target, response
            await response.close()
            hop = hop.next_hop(response.status, location)
        raise FetchFailed(f"The page redirects more than {self._config.max_redirects} times.")

    def _first_hop(self, request: FetchRequest) -> _Hop:
        if request.method not in _METHODS:
            raise FetchFailed("The method of the request is not one that is sent.")
        headers = {"user-agent": self._config.user_agent, "accept": "*/*"}
        for name, value in request.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise FetchFailed("A header of the request holds characters that no header has.")
            if name.lower() not in _FRAMING_HEADERS and not name.lower().startswith("proxy-"):
                headers[name.lower()] = value
        return _Hop(url_to_target(request.url), request.method, headers, request.body, request.allow_private)

    async def _send(self, hop: _Hop, limits: FetchLimits) -> "HopResponse":
        if not hop.allow_private:
            self._check_target(hop.target)
        policy = self._private_policy if hop.allow_private else self._public_policy
        connections = self._connections.get(policy) or await self._open_connections(policy)
        return await connections.request(hop.method, hop.target, hop.headers, hop.body, limits)

    async def _open_connections(self, policy: AddressPolicy) -> "Connections":
        # Imported and loaded at the first fetch, because they cost start-up time, and 4 MB that a server which fetches
        # nothing does not need; in a thread, because both read files.
        connections_type: type[Connections] = await asyncio.to_thread(
            import_from_string, "providers.fetcher.connections:Connections"
        )
        try:
            certificates = await asyncio.to_thread(trusted_certificates)
        except OSError as exc:
            _log.error("the certificates to trust cannot be loaded: %s", exc)
            raise FetchFailed("The certificates that the server trusts cannot be loaded.") from exc
        return self._connections.setdefault(
            policy,
            connections_type(
                partial(self._connect, CheckedHosts(policy, self._resolve)),
                certificates,
                limit=self._config.max_connections,
                connect_timeout_s=self._config.connect_timeout_s,
            ),
        )

    def _check_target(self, target: Target) -> None:
        if target.port not in self._config.allowed_ports:
            raise FetchRefused(
                f"The port {target.port} is not open to fetching.",
                "To open it, add it to `allowed_ports` of the run config's `fetcher`; an address of a private network "
                "needs `allowed_private_networks` too.",
            )
        allowed = self._config.allowed_hosts
        if allowed is not None and not any(target.host == host or target.host.endswith(f".{host}") for host in allowed):
            raise FetchRefused(
                f"The host {target.host} is not one of those that this server may fetch from.",
                "They are the `allowed_hosts` of the run config's `fetcher`.",
            )

    async def _connect(self, hosts: CheckedHosts, host: str, port: int) -> socket.socket:
        """Return a connection to a host, all of whose addresses the policy of `hosts` permits. Raises FetchFailed."""
        try:
            return await hosts.connect(host, port)
        except HostUnknown:
            raise FetchFailed(f"The host {host} is not known.") from None
        except AddressRefused:
            raise FetchRefused(
                f"The host {host} has an address that is not of the public internet, which is refused.",
                "To permit it, add its network to `allowed_private_networks` of the run config's `fetcher`.",
            ) from None

    async def _resolve_by_system(self, host: str, port: int) -> Sequence[str]:
        assert self._resolver is not None, "started before it fetches"
        return await self._resolver.resolve(host, port)
