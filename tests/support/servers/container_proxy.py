"""A container's proxy without its sandbox, on a port of loopback, and clients that speak to it byte by byte."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from providers.tool_runtime.python.egress.access import Egress
from providers.tool_runtime.python.egress.proxy import ContainerProxy, open_proxy
from providers.tool_runtime.python.egress.settings import EgressSettings, NetworkSettings, SecretValue
from tests.support.servers.fetcher_hosts import SITE, certificate

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Opened:
    """A proxy, the way out that it shares with others, and its port."""

    proxy: ContainerProxy
    egress: Egress
    port: int

    async def connect(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """All that is answered to these bytes, until the end of the connection."""
        async with asyncio.timeout(10):
            reader, writer = await self.connect()
            try:
                writer.write(data)
                return await reader.read()
            finally:
                writer.transport.abort()

    async def get(self, url: str, *headers: str) -> bytes:
        """The answer to a plain request for a URL."""
        host = url.partition("://")[2].partition("/")[0]
        lines = [f"GET {url} HTTP/1.1", f"Host: {host}", *headers, "", ""]
        return await self.ask("\r\n".join(lines).encode())

    @asynccontextmanager
    async def tunnel(self, authority: str, status: int = 200) -> AsyncGenerator[Streams]:
        """A connection whose CONNECT was answered with this status."""
        async with asyncio.timeout(10):
            reader, writer = await self.connect()
            try:
                writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
                yield reader, writer
            finally:
                writer.transport.abort()

    async def ask_over_tls(self, authority: str, request: str, trusted: bytes, *, name: str | None = None) -> bytes:
        """The answer to a request in a tunnel, by a client that trusts these certificates alone."""
        context = ssl.create_default_context(cadata=trusted.decode())
        async with self.tunnel(authority) as (reader, writer):
            await writer.start_tls(context, server_hostname=name or authority.partition(":")[0])
            writer.write(request.encode())
            return await reader.read()


@asynccontextmanager
async def container_proxy(
    hosts: Sequence[str],
    *,
    domains: Sequence[str] | None = None,
    secrets: Mapping[tuple[str, str], str] | None = None,
    addresses: Mapping[str, Sequence[Sequence[str]]] | None = None,
    egress: Egress | None = None,
    owner: tuple[str, str] = ("tenant", "cntr_1"),
    **settings: Any,
) -> AsyncGenerator[Opened]:
    """A proxy for `hosts` of the run config, of which the request names `domains`. `secrets` are by host and name.
    Names have the `addresses` of one round after the other, or that of SITE, the one private address permitted."""
    counts: dict[str, int] = {}

    async def resolve(host: str, port: int) -> Sequence[str]:
        rounds = (addresses or {}).get(host, [[SITE]])
        counts[host] = counts.get(host, 0) + 1
        return rounds[min(counts[host], len(rounds)) - 1]

    fields: dict[str, Any] = {"allowed_hosts": hosts, "allowed_private_networks": [f"{SITE}/32"], **settings}
    shared = egress or Egress(EgressSettings(**fields), resolve=resolve)
    names = domains if domains is not None else [host.partition(":")[0] for host in hosts]
    values = [SecretValue(host, name, value) for (host, name), value in (secrets or {}).items()]
    proxy = await open_proxy(shared, owner, NetworkSettings(names), values)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.serve(listener)
    try:
        yield Opened(proxy, shared, listener.getsockname()[1])
    finally:
        await proxy.close()
        if egress is None:
            shared.close()
        await asyncio.sleep(0)  # in which transports that were aborted close


async def server_context(folder: Path, name: str) -> tuple[ssl.SSLContext, bytes]:
    """The context of a server of this name at SITE, and the certificate to trust."""
    file, key = await certificate(folder, name, SITE)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    return context, await asyncio.to_thread(file.read_bytes)
