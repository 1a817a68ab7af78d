"""Reader: the text of files that requests name, and of web pages.

Reader has one provider. It is an API because an API is also the only way to share code across provider folders.
"""

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from apis.documents.page_images import PageImagesParams
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
class ChunkedText:
    """The text of a file, and overlapping chunks of it in their order."""

    text: str
    chunks: Sequence[str]


@dataclass(frozen=True, slots=True)
class PageImage:
    """A picture of one page of a PDF, in pixels, as a PNG file."""

    width: int
    height: int
    png: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PageImages:
    """Pictures of some pages of a PDF that has `page_count` of them."""

    page_count: int
    pages: Sequence[PageImage]


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
    """Loads files, extracts the text of files and pages, and draws the pages of PDFs. A parser of untrusted bytes is
    bounded in time and memory, and its crash affects no other request."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError when a package that some kind of file needs is not installed."""

    @abstractmethod
    async def extract_text(self, document: Document, max_chars: int, *, tenant: str = "") -> str:
        """Return the text of a file, within a minute from the tenant's turn. Raises UnreadableFile, also for more than
        `max_chars`, and RateLimited if too many files of the tenant wait."""

    @abstractmethod
    async def extract_chunks(
        self, document: Document, max_chars: int, *, max_tokens: int, overlap_tokens: int, tenant: str = ""
    ) -> ChunkedText:
        """Return the text of a file with its chunks of at most `max_tokens` estimated tokens, of which `overlap_tokens`
        are also the end of the chunk before. Bounded and raising as `extract_text`."""

    @abstractmethod
    async def extract_page(self, page: FetchedPage, max_chars: int) -> WebPage:
        """Return the text of a page, truncated to `max_chars`, within a minute. Raises UnreadableFile."""

    @abstractmethod
    async def render_pages(self, document: Document, params: PageImagesParams, *, tenant: str = "") -> PageImages:
        """Draw pages of a PDF, fewer than asked for where it has no more. Bounded as `extract_text`. Raises
        UnreadableFile, also for a file that is no PDF, and RateLimited if too many files of the tenant wait."""

    @abstractmethod
    async def load_upload(self, file_id: str, *, tenant: str) -> Document:
        """Load a file of the stack's Files. Raises NotFound, and Unsupported where the stack has no Files."""

    @abstractmethod
    async def fetch_file(self, url: str) -> Document:
        """Fetch the file at a URL. Raises FetchFailed."""


def decode_file_data(file_data: str) -> Document:
    """Return the file that a part of a message holds as base64 or as a data URL, without its name. Raises
    UnreadableFile."""
    head, comma, rest = file_data.partition(",")
    if head.startswith("data:") and not (comma and head.endswith(";base64")):
        raise UnreadableFile("invalid_file", "File data is base64, or a data URL like data:TYPE;base64,DATA.")
    try:
        data = base64.b64decode(rest if head.startswith("data:") else file_data, validate=True)
    except (binascii.Error, ValueError):
        raise UnreadableFile("invalid_file", "The file's data is not base64.") from None
    return Document("file", data)


def render_file(name: str, text: str) -> str:
    """Return the text of a file as a model is shown it; `name` is on one line."""
    return f'<file name="{name.replace(chr(34), chr(39))}">\n{text}\n</file>'


def image_to_url(data: bytes) -> str:
    """Return the image as a data URL of the type that its bytes have. Raises UnreadableFile as `image_media_type`."""
    return f"data:{image_media_type(data)};base64,{base64.b64encode(data).decode()}"


def validate_image_url(url: str) -> str:
    """Return a data URL of an image with the type that its bytes have. Raises UnreadableFile."""
    return _label_image_url(url, image_media_type(_decode_image(url.partition(",")[2])))


def relabel_image_url(url: str) -> str:
    """Return a data URL that was validated before as `validate_image_url` does, after a look at its first bytes."""
    try:
        return _label_image_url(url, _find_image_type(_decode_image(url.partition(",")[2][:64])))
    except UnreadableFile:
        return url


def image_media_type(data: bytes) -> str:
    """Return the media type of an image by its bytes, which must have the beginning and the end of one. Raises
    UnreadableFile. The pixels are not decoded: that is the inference server's part."""
    media_type = _find_image_type(data)
    match media_type:
        case "image/png":
            is_whole = data[12:16] == b"IHDR" and b"IEND" in data[-4096:]
        case "image/gif":
            is_whole = b";" in data[13:]
        case "image/webp":
            is_whole = int.from_bytes(data[4:8], "little") + 8 <= len(data) + 1
        case _:
            is_whole = b"\xff\xd9" in data
    if not is_whole:
        raise UnreadableFile("unsupported_file", "The image is cut off or damaged.")
    return media_type


def _find_image_type(data: bytes) -> str:
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    raise UnreadableFile("unsupported_file", "The file is no image: PNG, JPEG, GIF and WebP are taken.")


def _decode_image(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UnreadableFile("invalid_base64_image", "The image's data is not base64.") from None


def _label_image_url(url: str, media_type: str) -> str:
    head, _, rest = url.partition(",")
    label = f"data:{media_type};base64"
    return url if head == label else f"{label},{rest}"
