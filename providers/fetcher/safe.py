"""Safe: a Fetcher that connects to the public internet only, and to nothing that it has not checked."""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, Field

from apis.errors import ConfigError, FetchFailed
from apis.fetcher import Fetcher, FetchRequest, FetchResponse, FetchStream
from apis.imports import import_from_string
from apis.provider import Provider
from providers.fetcher.addresses import AddressPolicy, IPNetwork
from providers.fetcher.limits import FetchLimits
from providers.fetcher.targets import Target, resolve_redirect, text_to_host, url_to_target

if TYPE_CHECKING:
    from providers.fetcher.connections import Connections, HopResponse

HostResolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> the addresses of the host."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REDIRECT_STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_FRAMING_HEADERS: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
"""Headers that frame a message: set here alone, dropped where a caller gives them."""
_CROSS_ORIGIN_HEADERS: Final = frozenset({"accept", "accept-language", "content-type", "user-agent"})
"""All else may name a credential, and stays with the origin it was given for."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")
_RESOLVER_THREADS: Final = 16
_ALL_NETWORKS: Final = (ip_network("0.0.0.0/0"), ip_network("::/0"))


def _validate_host(text: str) -> str:
    try:
        return text_to_host(text)
    except FetchFailed as exc:
        raise ValueError(exc.message) from None


@dataclass(frozen=True, slots=True)
class _Hop:
    """One request on the way along redirects."""

    target: Target
    method: str
    headers: dict[str, str] = field(repr=False)
    body: bytes | None = field(repr=False)
    allow_private: bool = False

    def next_hop(self, status: int, location: str) -> "_Hop":
        """The next request, as browsers make it, without what was meant for the origin that is left."""
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


class Safe(Fetcher):
    """Fetches over http and https. Every connection is a fresh one, to an address that was resolved and checked for
    it; no proxy, cookie or credential of the environment is used.

    `timeout_s` and `max_bytes` of a request stand in place of the config's; the silence between two reads is then
    bounded by `timeout_s` alone, for streams that pause.
    """

    class Config(Provider.Config):
        """`allowed_hosts`, where set, are the only hosts, each with its subdomains. `allowed_private_networks` opens
        networks that are not of the public internet (an intranet's); `denied_networks` closes more, and wins.
        `max_bytes` bounds a body as it is sent, `max_inflated_bytes` as it is read."""

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

    def __init__(self, config: Config, resolve: HostResolver | None = None) -> None:
        self._config = config
        self._resolve = resolve or self._resolve_by_system
        self._public_policy = AddressPolicy(config.allowed_private_networks, config.denied_networks)
        self._private_policy = AddressPolicy(_ALL_NETWORKS, config.denied_networks)
        self._threads: ThreadPoolExecutor | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._connections: dict[AddressPolicy, Connections] = {}
        self._connections_type: type[Connections] | None = None
        self._fetch_errors: Callable[[FetchLimits], AbstractContextManager[None]]

    async def start(self) -> None:
        try:
            self._ssl_context = ssl.create_default_context()
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"the certificates to trust cannot be loaded: {exc}") from exc
        # Threads of its own: names whose servers never answer must not hold up other work.
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")

    async def close(self) -> None:
        self._ssl_context = None
        for connections in self._connections.values():
            await connections.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        body = bytearray()
        async with self.open(request) as incoming:
            async for chunk in incoming.chunks:
                body += chunk
        return FetchResponse(incoming.url, incoming.status, incoming.headers, bytes(body))

    @asynccontextmanager
    async def open(self, request: FetchRequest) -> AsyncGenerator[FetchStream]:
        limits = self._limits(request)
        if self._connections_type is None:  # not before it is needed: it costs more than the rest of the start
            self._connections_type = await asyncio.to_thread(
                import_from_string, "providers.fetcher.connections:Connections"
            )
            self._fetch_errors = import_from_string("providers.fetcher.connections:fetch_errors")
        with self._fetch_errors(limits):
            async with asyncio.timeout_at(limits.deadline):
                target, answer = await self._follow(request)
        try:
            async with aclosing(answer.chunks(limits)) as chunks:
                yield FetchStream(target.url, answer.status, answer.headers(), chunks)
        finally:
            answer.close()

    def _limits(self, outgoing: FetchRequest) -> FetchLimits:
        config = self._config
        timeout_s = config.timeout_s if outgoing.timeout_s is None else outgoing.timeout_s
        return FetchLimits(
            deadline=asyncio.get_running_loop().time() + timeout_s,
            timeout_s=timeout_s,
            read_timeout_s=config.read_timeout_s if outgoing.timeout_s is None else timeout_s,
            raw_bytes=outgoing.max_bytes or config.max_bytes,
            inflated_bytes=outgoing.max_bytes or config.max_inflated_bytes,
        )

    async def _follow(self, outgoing: FetchRequest) -> "tuple[Target, HopResponse]":
        hop = self._first_hop(outgoing)
        for _ in range(self._config.max_redirects + 1):
            answer = await self._send(hop)
            location = answer.location
            if answer.status not in _REDIRECT_STATUSES or location is None or not outgoing.follow_redirects:
                return hop.target, answer
            answer.close()
            hop = hop.next_hop(answer.status, location)
        raise FetchFailed(f"The page redirects more than {self._config.max_redirects} times.")

    def _first_hop(self, outgoing: FetchRequest) -> _Hop:
        if outgoing.method not in _METHODS:
            raise FetchFailed("The method of the request is not one that is sent.")
        headers = {"user-agent": self._config.user_agent, "accept": "*/*"}
        for name, value in outgoing.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise FetchFailed("A header of the request holds characters that no header has.")
            if name.lower() not in _FRAMING_HEADERS and not name.lower().startswith("proxy-"):
                headers[name.lower()] = value
        return _Hop(url_to_target(outgoing.url), outgoing.method, headers, outgoing.body, outgoing.allow_private)

    async def _send(self, hop: _Hop) -> "HopResponse":
        target = hop.target
        if not hop.allow_private:
            self._check_target(target)
        addresses = self._private_policy if hop.allow_private else self._public_policy
        if target.is_address and addresses.is_refused(target.host):
            raise _private_address_error(target.host)
        return await self._connections_to(addresses).request(hop.method, target.url, hop.headers, hop.body)

    def _connections_to(self, policy: AddressPolicy) -> "Connections":
        if policy not in self._connections:
            assert self._ssl_context is not None, "started before it fetches"
            assert self._connections_type is not None, "opened before it connects"
            self._connections[policy] = self._connections_type(
                policy,
                partial(self._resolve_host, policy),
                self._ssl_context,
                limit=self._config.max_connections,
                connect_s=self._config.connect_timeout_s,
            )
        return self._connections[policy]

    def _check_target(self, target: Target) -> None:
        if target.port not in self._config.allowed_ports:
            raise FetchFailed(f"The port {target.port} is not open to fetching.")
        allowed = self._config.allowed_hosts
        if allowed is not None and not any(target.host == host or target.host.endswith(f".{host}") for host in allowed):
            raise FetchFailed(f"The host {target.host} is not one of those that this server may fetch from.")

    async def _resolve_host(self, policy: AddressPolicy, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise FetchFailed(f"The host {host} is not known.")
        if any(policy.is_refused(address) for address in addresses):
            raise _private_address_error(host)
        return addresses

    async def _resolve_by_system(self, host: str, port: int) -> Sequence[str]:
        answers = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(answer[4][0]) for answer in answers]


def _private_address_error(host: str) -> FetchFailed:
    return FetchFailed(f"The host {host} has an address that is not of the public internet, which is refused.")
