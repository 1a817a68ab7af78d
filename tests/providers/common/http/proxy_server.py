"""An HTTP proxy for tests: forwards plain requests, opens tunnels, and refuses or breaks off on demand."""

import asyncio
import base64
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit


class ProxyServer:
    """Use as an async context manager. `request_lines` are those received; `credentials` are required if set.

    `refusal` is the response to every request.
    """

    def __init__(self, *, credentials: str | None = None, refusal: bytes | None = None) -> None:
        self.request_lines: list[str] = []
        self.url = ""
        self.name = ""
        self._credentials = credentials
        self._refusal = refusal
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.name = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.url = f"http://{self.name}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.break_connections()

    async def break_connections(self) -> None:
        """Close all connections at once."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        response_pipe: asyncio.Task[None] | None = None
        upstream: asyncio.StreamWriter | None = None
        try:
            while True:
                line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip("\r\n").split("\r\n")
                self.request_lines.append(line)
                fields = {
                    name.lower(): value.strip() for name, _, value in (header.partition(":") for header in headers)
                }
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                refusal = self._find_refusal(fields)
                if refusal is not None:
                    writer.write(refusal)
                    await writer.drain()
                    continue
                method, target, version = line.split(" ")
                if method == "CONNECT":
                    host, _, port = target.rpartition(":")
                    upstream_reader, upstream = await asyncio.open_connection(host, int(port))
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await asyncio.gather(_pipe(reader, upstream), _pipe(upstream_reader, writer))
                    return
                parts = urlsplit(target)
                if upstream is None:
                    upstream_reader, upstream = await asyncio.open_connection(parts.hostname, parts.port)
                    response_pipe = asyncio.create_task(_pipe(upstream_reader, writer))
                end_to_end_headers = [header for header in headers if not header.lower().startswith("proxy-")]
                upstream.write(
                    "\r\n".join([f"{method} {parts.path} {version}", *end_to_end_headers, "", ""]).encode() + body
                )
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            if response_pipe is not None:
                response_pipe.cancel()
            for stream in (writer, upstream):
                if stream is not None:
                    stream.transport.abort()

    def _find_refusal(self, fields: dict[str, str]) -> bytes | None:
        if self._refusal is not None:
            return self._refusal
        if self._credentials is None:
            return None
        expected = f"Basic {base64.b64encode(self._credentials.encode()).decode()}"
        if fields.get("proxy-authorization") == expected:
            return None
        return b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n"


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
    writer.close()
