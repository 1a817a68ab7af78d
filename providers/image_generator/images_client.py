"""ImagesClient: the HTTP of an images server, bounded in bytes. It goes only to the host that the run config names."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx2

from apis.certificates import trusted_certificates
from apis.errors import ConfigError, ToolFailed
from apis.image_generator import ImageRequest, SourceImage
from providers.common.net.http.inflater import EncodingError, inflate_chunks
from providers.image_generator.answers import error_of_answer, parse_answer

_CONNECT_TIMEOUT_S: Final = 10.0
_KEEPALIVE_S: Final = 15.0
_MAX_ERROR_BYTES: Final = 64 * 1024
_OVERHEAD_BYTES: Final = 256 * 1024
"""Bytes of an answer besides its images."""


class ImagesClient:
    """Sends requests to one images server. `proxy` is a URL, or "" for those of the environment; `image_field` is the
    name of the images in the form of an edit."""

    def __init__(self, base_url: str, api_key: str, proxy: str, image_field: str) -> None:
        """Raises ConfigError for a proxy that is no URL and for certificates that cannot be loaded."""
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every URL at level INFO
        self._base_url = base_url.rstrip("/")
        self._image_field = image_field
        headers = {"accept-encoding": "identity", "user-agent": "responses-stack"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        try:
            self._client = httpx2.AsyncClient(
                headers=headers,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
                limits=httpx2.Limits(keepalive_expiry=_KEEPALIVE_S),
                verify=trusted_certificates(),
                proxy=proxy or None,
                trust_env=base_url.startswith("https:"),
            )
        # `from None`: the causes quote the URL of the proxy, which may hold a password
        except (ImportError, ValueError, httpx2.InvalidURL):
            raise ConfigError(
                "the proxy (image_generator.proxy, or those of the environment) is not of the form http://host:port"
            ) from None
        except OSError as exc:
            raise ConfigError(f"the certificates to trust cannot be loaded: {exc}") from exc

    async def close(self) -> None:
        await self._client.aclose()

    async def send(
        self, request: ImageRequest, fields: Mapping[str, Any], max_encoded_bytes: int
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the objects that the server answers with: one, or one for each event of a stream. An edit is sent as a
        form, a new image as JSON. The answer may have `max_encoded_bytes` for each image that it may hold.

        Raises ToolFailed.
        """
        max_bytes = (1 + request.partial_images) * max_encoded_bytes + _OVERHEAD_BYTES
        body: dict[str, Any] = {"data": _form_fields(fields), "files": _form_files(request, self._image_field)}
        path, body = ("/images/edits", body) if request.images else ("/images/generations", {"json": {**fields}})
        async with self._open(f"{self._base_url}{path}", body) as response:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for event in _read_events(response, max_bytes):
                    yield event
            else:
                yield await asyncio.to_thread(parse_answer, await _read_body(response, max_bytes))

    @asynccontextmanager
    async def _open(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx2.Response]:
        try:
            async with self._client.stream("POST", url, **body) as response:
                if response.status_code != 200:
                    raise error_of_answer(response.status_code, await _read_prefix(response))
                yield response
        except EncodingError as exc:
            raise ToolFailed(f"The images server's answer cannot be read. {exc}") from None
        # `from None`: the causes hold the request, and with it the key
        except httpx2.TimeoutException:
            raise ToolFailed(f"The images server could not be reached within {_CONNECT_TIMEOUT_S:g} s.") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError):
            raise ToolFailed("The images server could not be reached, or broke off its answer.") from None


def _form_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}


def _form_files(request: ImageRequest, image_field: str) -> list[tuple[str, tuple[str, bytes, str]]]:
    files = [(image_field, _file(f"image_{number}", image)) for number, image in enumerate(request.images, 1)]
    return [*files, ("mask", _file("mask", request.mask))] if request.mask is not None else files


def _file(name: str, image: SourceImage) -> tuple[str, bytes, str]:
    return f"{name}.{image.media_type.rpartition('/')[2]}", image.data, image.media_type


def _read_chunks(response: httpx2.Response) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
    return aclosing(inflate_chunks(response.aiter_raw(), response.headers.get("content-encoding", "")))


async def _read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    body = bytearray()
    async with _read_chunks(response) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                raise _too_large_error(max_bytes)
    return bytes(body)


async def _read_prefix(response: httpx2.Response) -> bytes:
    body = bytearray()
    async with _read_chunks(response) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > _MAX_ERROR_BYTES:
                return b""
    return bytes(body)


async def _read_events(response: httpx2.Response, max_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events. Raises ToolFailed for an event that is an error."""
    data: list[bytes] = []
    async for line in _read_lines(response, max_bytes):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            body, data = b"\n".join(data), []
            if body == b"[DONE]":
                return
            yield await asyncio.to_thread(parse_answer, body)


async def _read_lines(response: httpx2.Response, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the lines of an answer of at most `max_bytes`, the last one if it is ended."""
    buffer, searched, total = bytearray(), 0, 0
    async with _read_chunks(response) as chunks:
        async for chunk in chunks:
            total += len(chunk)
            if total > max_bytes:
                raise _too_large_error(max_bytes)
            buffer += chunk
            while (end := buffer.find(b"\n", searched)) >= 0:
                yield bytes(buffer[:end]).removesuffix(b"\r")
                del buffer[: end + 1]
                searched = 0
            searched = len(buffer)


def _too_large_error(max_bytes: int) -> ToolFailed:
    return ToolFailed(f"The images server answered with more than {max_bytes} bytes.")
