"""Fetcher: the one way to a URL that came from a request, a model, a tool or a page."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from apis.provider import Provider


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A request to send. `headers` that name credentials go to the origin of `url` only, never along a redirect.
    `private` is for a URL of the run config itself, which says that its host may be of a private network and its port
    any; it ends with the first redirect."""

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
    """An answer, whole. `url` is where the last redirect led; `headers` have lower-case names."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class FetchStream:
    """An answer whose body is read as it comes; the limits on bytes, inflation and time hold while it is read."""

    url: str
    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class Fetcher(Provider, ABC):
    """Connects only to addresses that were checked, and to the very address that was: of the first URL and of every
    redirect. Bounds redirects, bytes, inflation and time. What is refused is never connected to."""

    @abstractmethod
    async def fetch(self, request: FetchRequest) -> FetchResponse:
        """The whole answer, of any status. Raises FetchFailed with a text for the model."""

    @abstractmethod
    def open(self, request: FetchRequest) -> AbstractAsyncContextManager[FetchStream]:
        """The answer as a stream; leaving closes the connection. Raises FetchFailed, also while it is read."""
