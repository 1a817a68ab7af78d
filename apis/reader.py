"""Reader: the text of files that requests name, and of web pages.

Reader has one provider. It is an API because an API is also the only way to share code across provider folders.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from apis.errors import InvalidRequest
from apis.provider import Provider

UnreadableReason = Literal["server_error", "unsupported_file", "invalid_file", "invalid_base64_image"]


class UnreadableFile(InvalidRequest):
    """A file or page has no readable text. The message is for the client that sent it."""

    def __init__(self, reason: UnreadableReason, message: str) -> None:
        super().__init__(message, code=reason)
        self.reason: UnreadableReason = reason


@dataclass(frozen=True, slots=True)
class Document:
    """A file: its bytes, and its name, a label that may hold any text."""

    name: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """A page as fetched: HTML, or text where `is_html` is false. `charset` is the one that the server named."""

    url: str
    body: bytes = field(repr=False)
    is_html: bool
    charset: str | None = None


@dataclass(frozen=True, slots=True)
class WebPage:
    """The text of a page. `[#1]` in `text` follows the words of a link to the first URL of `links`. `is_truncated` is
    set when the page has more text."""

    title: str
    text: str
    links: Sequence[str]
    is_truncated: bool


class Reader(Provider, ABC):
    """Loads files, and extracts the text of files and pages. A parser of untrusted bytes is bounded in time and memory,
    and its crash affects no other request."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError when a package that some kind of file needs is not installed."""

    @abstractmethod
    async def extract_text(self, document: Document, max_chars: int, *, tenant: str = "") -> str:
        """Return the text of a file, within a minute from the tenant's turn. Raises UnreadableFile, also for more than
        `max_chars`, and RateLimited if too many files of the tenant wait."""

    @abstractmethod
    async def extract_page(self, page: FetchedPage, max_chars: int) -> WebPage:
        """Return the text of a page, truncated to `max_chars`, within a minute. Raises UnreadableFile."""

    @abstractmethod
    async def load_upload(self, file_id: str, *, tenant: str) -> Document:
        """Load a file of the stack's Files. Raises NotFound, and Unsupported where the stack has no Files."""

    @abstractmethod
    async def fetch_file(self, url: str) -> Document:
        """Fetch the file at a URL. Raises FetchFailed."""
