"""The fetcher's connections, over aiohttp: each to an address that was checked for it alone.

Imported when something is fetched for the first time: it would be a tenth of a cold start.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from apis.errors import FetchFailed
from providers.fetcher.addresses import AddressPolicy
from providers.fetcher.inflate import ACCEPTED_ENCODINGS, Inflater
from providers.fetcher.limits import FetchLimits, too_large_error

HostResolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> the addresses of the host."""


class Connections:
    """To what `addresses` do not refuse. `resolve` gives nothing that they do."""

    def __init__(
        self, policy: AddressPolicy, resolve: HostResolver, context: ssl.SSLContext, *, limit: int, connect_s: float
    ):
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=context,
                resolver=_CheckedResolver(resolve),
                socket_factory=partial(_open_checked_socket, policy),
                use_dns_cache=False,
                force_close=True,
                limit=limit,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> "HopResponse":
        """The answer as far as its headers. Raises what `told` tells."""
        response = await self._session.request(
            method,
            URL(url, encoded=True),
            headers={**headers, "accept-encoding": ACCEPTED_ENCODINGS},
            data=body,
            allow_redirects=False,
        )
        return HopResponse(response)

    async def close(self) -> None:
        await self._session.close()


class HopResponse:
    """What came back. To be closed."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.location = response.headers.get("Location")

    def headers(self) -> dict[str, str]:
        """Cookies are for nobody here; how the body was packed is past."""
        headers: dict[str, str] = {}
        for key, value in self._response.headers.items():
            name = key.lower()
            if name in ("set-cookie", "content-encoding", "content-length", "transfer-encoding"):
                continue
            text = value.encode(errors="replace").decode()
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        return headers

    async def chunks(self, limits: FetchLimits) -> AsyncGenerator[bytes]:
        """The body, inflated. Raises FetchFailed."""
        response = self._response
        raw_bytes = inflated_bytes = 0
        loop = asyncio.get_running_loop()
        inflater = Inflater(response.headers.get("Content-Encoding", ""))
        if (response.content_length or 0) > limits.raw_bytes:
            raise too_large_error(limits.raw_bytes)
        while True:
            with fetch_errors(limits):
                async with asyncio.timeout_at(min(limits.deadline, loop.time() + limits.read_timeout_s)):
                    data = await response.content.readany()
            if not data:
                break
            raw_bytes += len(data)
            if raw_bytes > limits.raw_bytes:
                raise too_large_error(limits.raw_bytes)
            for piece in inflater.feed(data):
                inflated_bytes += len(piece)
                if inflated_bytes > limits.inflated_bytes:
                    raise too_large_error(limits.inflated_bytes)
                yield piece
                # A little that inflates to much must not keep others waiting.
                await asyncio.sleep(0)
        inflater.finish()

    def close(self) -> None:
        self._response.close()


@contextmanager
def fetch_errors(limits: FetchLimits) -> Generator[None]:
    """Says in words what went wrong on the way. `from None`: causes carry the headers that were sent, secrets too."""
    try:
        yield
    except TimeoutError:
        raise FetchFailed(f"The server did not answer in time ({limits.timeout_s:g} s in all).") from None
    except aiohttp.ClientSSLError:
        raise FetchFailed("The server's certificate is not one that can be trusted.") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise FetchFailed("The server could not be reached, or did not answer in proper HTTP.") from None


def _open_checked_socket(policy: AddressPolicy, info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """Every connection begins here. What was refused before never comes as far; this holds if it does."""
    family, kind, protocol, _, address = info
    if policy.is_refused(str(address[0])):
        raise PermissionError("refused")
    return socket.socket(family, kind, protocol)


class _CheckedResolver(AbstractResolver):
    """Gives the connector nothing but addresses that were checked for this one connection."""

    def __init__(self, resolve: HostResolver) -> None:
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
