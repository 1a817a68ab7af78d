"""Pictures of the pages of a PDF: which of them, of a stored file and of one that is sent with the request."""

from typing import Final

from pydantic import Field

from apis.wire.base import Wire

MAX_PAGE_IMAGES: Final = 4
"""Pages of one request."""


class PageImagesParams(Wire):
    """Query of the pictures of a stored file: `count` pages from the page `first` on, each `width` pixels wide."""

    first: int = Field(default=1, ge=1, le=100_000, strict=False)
    count: int = Field(default=1, ge=1, le=MAX_PAGE_IMAGES, strict=False)
    width: int = Field(default=320, ge=16, le=1600, strict=False)


class CreatePageImages(PageImagesParams):
    """Body of the pictures of a file that is not stored: base64, or a data URL, as in an `input_file`."""

    file_data: str
