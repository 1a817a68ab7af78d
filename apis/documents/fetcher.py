"""Fetcher: opens URLs that come from a request, a model, a tool or a page. Nothing else in the stack may open one.

Fetcher has one provider. It is an API because an API is also the only way to share code across provider folders.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from apis.provider import Provider


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A request to send. `headers` that may hold credentials are sent to the origin of `url` only, never along a
    redirect to another. `allow_private` is for a URL of the run config itself: it permits private networks and every
    port, for `url` alone. `max_bytes` and `timeout_s` (seconds) replace the provider's own limits."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    follow_redirects: bool = True
    max_bytes: int | None = None
    timeout_s: float | None = None
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class FetchResponse:
    """A complete response. `url` is the target of the last redirect; the names of `headers` are in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class FetchStream:
    """A response whose body is streamed. The limits on bytes, decompression and time apply while it is read."""

    url: str
    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class Fetcher(Provider, ABC):
    """Opens URLs, for the first one and for every redirect, by connecting to exactly the address that was checked. A
    refused address is never connected to. Redirects, bytes, decompression and time are bounded."""

    @abstractmethod
    async def fetch(self, request: FetchRequest) -> FetchResponse:
        """Return the complete response, of any status. Raises FetchFailed with a text for the model."""

    @abstractmethod
    def open(self, request: FetchRequest) -> AbstractAsyncContextManager[FetchStream]:
        """Open the response as a stream; exit closes the connection. Raises FetchFailed, also while it is read."""
