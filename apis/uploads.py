"""Uploads: files that are sent in parts, because they are larger than one body may be, and joined at the end."""

from typing import Annotated, Final

from pydantic import Field

from apis.documents.files import FileExpiry, Purpose
from apis.wire.base import Wire

MAX_PARTS: Final = 10_000
"""Parts that one upload may have."""


class CreateUpload(Wire):
    """An upload of `bytes` bytes in all. `mime_type` is checked for its form alone: files have no type here."""

    bytes: int = Field(ge=1, le=2**40)
    filename: str = Field(min_length=1, max_length=4096)
    mime_type: str = Field(min_length=1, max_length=256)
    purpose: Purpose
    expires_after: FileExpiry | None = None


class CompleteUpload(Wire):
    """The parts in their order in the file, and the MD5 of the file in hexadecimal."""

    part_ids: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(min_length=1, max_length=MAX_PARTS)
    md5: str | None = Field(None, pattern=r"^[0-9A-Fa-f]{32}$")
