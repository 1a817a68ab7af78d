"""ImagesClient: the HTTP of an images server, bounded in bytes. It goes only to the host that the run config names."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from pydantic import SecretStr

from apis.errors import ToolFailed
from apis.image_generator import ImageRequest, SourceImage
from providers.common.net.http.event_stream import EventReader
from providers.common.net.http.inflater import EncodingError
from providers.common.net.service_client import open_service_client, read_body, read_chunks
from providers.image_generator.answers import error_of_answer, parse_answer

_CONNECT_TIMEOUT_S: Final = 10.0
_MAX_ERROR_BYTES: Final = 64 * 1024
_OVERHEAD_BYTES: Final = 256 * 1024
"""Bytes of an answer besides its images."""


class ImagesClient:
    """Sends requests to one images server. `proxy` is a URL, None for those of the environment; `image_field` is the
    name of the images in the form of an edit."""

    def __init__(self, base_url: str, api_key: str, proxy: SecretStr | None, image_field: str) -> None:
        """Raises ConfigError for a proxy that is no URL and for certificates that cannot be loaded."""
        self._base_url = base_url.rstrip("/")
        self._image_field = image_field
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = open_service_client(base_url, headers, proxy, "image_generator", _CONNECT_TIMEOUT_S)

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
                answer = await read_body(response, max_bytes)
                if answer is None:
                    raise _too_large_error(max_bytes)
                yield await asyncio.to_thread(parse_answer, answer)

    @asynccontextmanager
    async def _open(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx2.Response]:
        try:
            async with self._client.stream("POST", url, **body) as response:
                if response.status_code != 200:
                    raise error_of_answer(response.status_code, await read_body(response, _MAX_ERROR_BYTES) or b"")
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


async def _read_events(response: httpx2.Response, max_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events. Raises ToolFailed for an event that is an error."""
    reader, total = EventReader(max_bytes), 0
    async with read_chunks(response) as chunks:
        async for chunk in chunks:
            total += len(chunk)
            if total > max_bytes:
                raise _too_large_error(max_bytes)
            for data in reader.feed(chunk):
                if data == b"[DONE]":
                    return
                yield await asyncio.to_thread(parse_answer, data)


def _too_large_error(max_bytes: int) -> ToolFailed:
    return ToolFailed(f"The images server answered with more than {max_bytes} bytes.")
