"""Reader: the files that requests bring along, and the text in them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from apis.errors import InvalidRequest
from apis.provider import Provider

UnreadableReason = Literal["server_error", "unsupported_file", "invalid_file", "invalid_base64_image"]


class UnreadableFile(InvalidRequest):
    """A file has no text that can be had; the message is for whoever brought it."""

    def __init__(self, reason: UnreadableReason, message: str) -> None:
        super().__init__(message, code=reason)
        self.reason: UnreadableReason = reason


@dataclass(frozen=True, slots=True)
class Document:
    """A file: its name, a label that may hold anything, and its bytes."""

    name: str
    data: bytes = field(repr=False)


class Reader(Provider, ABC):
    """Gets files and reads them. What parses a file of a stranger is bounded in time and memory, and takes nothing
    along when it dies."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError where something is not installed that it takes to read a kind of file."""

    @abstractmethod
    async def extract_text(self, document: Document, max_chars: int) -> str:
        """The text of a file, of at most `max_chars`. Raises Unreadable. Takes a minute at most."""

    @abstractmethod
    async def load_upload(self, file_id: str, *, tenant: str) -> Document:
        """A file of the stack's Files. Raises NotFound, and Unsupported where no files are kept."""

    @abstractmethod
    async def fetch_file(self, url: str) -> Document:
        """The file at a URL. Raises FetchFailed."""
