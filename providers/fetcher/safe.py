"""Safe: a Fetcher that connects to the public internet only, and to nothing that it has not checked."""

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic import AfterValidator, Field
from yarl import URL

from apis.errors import ConfigError, FetchFailed
from apis.fetcher import Fetched, Fetcher, Incoming, Outgoing
from apis.provider import Provider
from providers.fetcher.addresses import Addresses, Network
from providers.fetcher.inflate import ACCEPTED, Inflater
from providers.fetcher.targets import Target, redirected, text_to_host, url_to_target

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> the addresses of the host."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OURS: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
"""Headers that frame a message: set here alone, dropped where a caller gives them."""
_HARMLESS: Final = frozenset({"accept", "accept-language", "content-type", "user-agent"})
"""All else may name a credential, and stays with the origin it was given for."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]*")
_RESOLVING_THREADS: Final = 16


def _host(text: str) -> str:
    try:
        return text_to_host(text)
    except FetchFailed as exc:
        raise ValueError(exc.message) from None


@dataclass(frozen=True, slots=True)
class _Limits:
    deadline: float
    timeout_s: float
    read_timeout_s: float
    raw_bytes: int
    inflated_bytes: int


@dataclass(frozen=True, slots=True)
class _Hop:
    """One request on the way along redirects."""

    target: Target
    method: str
    headers: dict[str, str] = field(repr=False)
    body: bytes | None = field(repr=False)

    def along(self, status: int, location: str) -> "_Hop":
        """The next request, as browsers make it, without what was meant for the origin that is left."""
        target = redirected(self.target, location)
        hop = replace(self, target=target)
        if status == 303 or (status in (301, 302) and self.method == "POST"):
            headers = {name: value for name, value in self.headers.items() if name != "content-type"}
            hop = replace(hop, method="HEAD" if self.method == "HEAD" else "GET", headers=headers, body=None)
        if target.origin == self.target.origin:
            return hop
        if hop.body is not None:
            raise FetchFailed("The server redirects what was sent to another server, which is refused.")
        return replace(hop, headers={name: value for name, value in hop.headers.items() if name in _HARMLESS})


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

        allowed_hosts: list[Annotated[str, AfterValidator(_host)]] | None = None
        allowed_private_networks: list[Network] = Field(default_factory=list[Network])
        denied_networks: list[Network] = Field(default_factory=list[Network])
        allowed_ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default=[80, 443], min_length=1)
        timeout_s: float = Field(default=15.0, gt=0)
        connect_timeout_s: float = Field(default=5.0, gt=0)
        read_timeout_s: float = Field(default=10.0, gt=0)
        max_bytes: int = Field(default=5 * 2**20, gt=0)
        max_inflated_bytes: int = Field(default=20 * 2**20, gt=0)
        max_redirects: int = Field(default=5, ge=0)
        max_connections: int = Field(default=100, gt=0)
        user_agent: str = Field(default="Mozilla/5.0 (compatible; responses-stack)", pattern=r"^[\x20-\x7e]+$")

    def __init__(self, config: Config, resolve: Resolve | None = None) -> None:
        self._config = config
        self._resolve = resolve or self._ask_the_system
        self._addresses = Addresses(config.allowed_private_networks, config.denied_networks)
        self._threads: ThreadPoolExecutor | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        try:
            context = ssl.create_default_context()
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"the certificates to trust cannot be loaded: {exc}") from exc
        # Threads of its own: names whose servers never answer must not hold up other work.
        self._threads = ThreadPoolExecutor(_RESOLVING_THREADS, thread_name_prefix="resolve")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context,
                resolver=_Checking(self._checked_addresses),
                socket_factory=self._socket,
                use_dns_cache=False,
                force_close=True,
                limit=self._config.max_connections,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, outgoing: Outgoing) -> Fetched:
        body = bytearray()
        async with self.open(outgoing) as incoming:
            async for chunk in incoming.chunks:
                body += chunk
        return Fetched(incoming.url, incoming.status, incoming.headers, bytes(body))

    @asynccontextmanager
    async def open(self, outgoing: Outgoing) -> AsyncGenerator[Incoming]:
        limits = self._limits(outgoing)
        with _told(limits):
            async with asyncio.timeout_at(limits.deadline):
                target, response = await self._follow(outgoing)
        try:
            async with aclosing(_chunks(response, limits)) as chunks:
                yield Incoming(target.url, response.status, _received(response), chunks)
        finally:
            response.close()

    def _limits(self, outgoing: Outgoing) -> _Limits:
        config = self._config
        timeout_s = config.timeout_s if outgoing.timeout_s is None else outgoing.timeout_s
        return _Limits(
            deadline=asyncio.get_running_loop().time() + timeout_s,
            timeout_s=timeout_s,
            read_timeout_s=config.read_timeout_s if outgoing.timeout_s is None else timeout_s,
            raw_bytes=outgoing.max_bytes or config.max_bytes,
            inflated_bytes=outgoing.max_bytes or config.max_inflated_bytes,
        )

    async def _follow(self, outgoing: Outgoing) -> tuple[Target, aiohttp.ClientResponse]:
        hop = self._first(outgoing)
        for _ in range(self._config.max_redirects + 1):
            response = await self._send(hop)
            location = response.headers.get("Location")
            if response.status not in _REDIRECTS or location is None or not outgoing.follow_redirects:
                return hop.target, response
            response.close()
            hop = hop.along(response.status, location)
        raise FetchFailed(f"The page redirects more than {self._config.max_redirects} times.")

    def _first(self, outgoing: Outgoing) -> _Hop:
        if outgoing.method not in _METHODS:
            raise FetchFailed("The method of the request is not one that is sent.")
        headers = {"user-agent": self._config.user_agent, "accept": "*/*"}
        for name, value in outgoing.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise FetchFailed("A header of the request holds characters that no header has.")
            if name.lower() not in _OURS and not name.lower().startswith("proxy-"):
                headers[name.lower()] = value
        return _Hop(url_to_target(outgoing.url), outgoing.method, headers, outgoing.body)

    async def _send(self, hop: _Hop) -> aiohttp.ClientResponse:
        assert self._session is not None, "started before it fetches"
        target = hop.target
        if target.port not in self._config.allowed_ports:
            raise FetchFailed(f"The port {target.port} is not open to fetching.")
        allowed = self._config.allowed_hosts
        if allowed is not None and not any(target.host == host or target.host.endswith(f".{host}") for host in allowed):
            raise FetchFailed(f"The host {target.host} is not one of those that this server may fetch from.")
        if target.is_address and self._addresses.refuse(target.host):
            raise _private(target.host)
        return await self._session.request(
            hop.method,
            URL(target.url, encoded=True),
            headers={**hop.headers, "accept-encoding": ACCEPTED},
            data=hop.body,
            allow_redirects=False,
        )

    async def _checked_addresses(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise FetchFailed(f"The host {host} is not known.")
        if any(self._addresses.refuse(address) for address in addresses):
            raise _private(host)
        return addresses

    async def _ask_the_system(self, host: str, port: int) -> Sequence[str]:
        answers = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(answer[4][0]) for answer in answers]

    def _socket(self, info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
        """Every connection begins here. What was refused before never comes as far; this holds if it does."""
        family, kind, protocol, _, address = info
        if self._addresses.refuse(str(address[0])):
            raise PermissionError("refused")
        return socket.socket(family, kind, protocol)


class _Checking(AbstractResolver):
    """Gives the connector nothing but addresses that were checked for this one connection."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._resolve(host, port)
        ]

    async def close(self) -> None:
        """There is nothing to close."""


def _private(host: str) -> FetchFailed:
    return FetchFailed(f"The host {host} has an address that is not of the public internet, which is refused.")


def _received(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Cookies are for nobody here; how the body was packed is past."""
    headers: dict[str, str] = {}
    for key, value in response.headers.items():
        name = key.lower()
        if name in ("set-cookie", "content-encoding", "content-length", "transfer-encoding"):
            continue
        text = value.encode(errors="replace").decode()
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


async def _chunks(response: aiohttp.ClientResponse, limits: _Limits) -> AsyncGenerator[bytes]:
    raw_bytes = inflated_bytes = 0
    loop = asyncio.get_running_loop()
    inflater = Inflater(response.headers.get("Content-Encoding", ""))
    if (response.content_length or 0) > limits.raw_bytes:
        raise _too_large(limits.raw_bytes)
    while True:
        with _told(limits):
            async with asyncio.timeout_at(min(limits.deadline, loop.time() + limits.read_timeout_s)):
                data = await response.content.readany()
        if not data:
            break
        raw_bytes += len(data)
        if raw_bytes > limits.raw_bytes:
            raise _too_large(limits.raw_bytes)
        for piece in inflater.feed(data):
            inflated_bytes += len(piece)
            if inflated_bytes > limits.inflated_bytes:
                raise _too_large(limits.inflated_bytes)
            yield piece
            # A little that inflates to much must not keep others waiting.
            await asyncio.sleep(0)
    inflater.finish()


def _too_large(max_bytes: int) -> FetchFailed:
    return FetchFailed(f"The answer is larger than {max_bytes} bytes.")


@contextmanager
def _told(limits: _Limits) -> Generator[None]:
    """Says in words what went wrong on the way. `from None`: causes carry the headers that were sent, secrets too."""
    try:
        yield
    except TimeoutError:
        raise FetchFailed(f"The server did not answer in time ({limits.timeout_s:g} s in all).") from None
    except aiohttp.ClientSSLError:
        raise FetchFailed("The server's certificate is not one that can be trusted.") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise FetchFailed("The server could not be reached, or did not answer in proper HTTP.") from None
