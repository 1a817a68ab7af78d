"""Uploads: files that are sent in parts, because they are larger than one body may be, and joined at the end."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable
from typing import Annotated, Final

from openai.types.upload import Upload
from openai.types.uploads import UploadPart
from pydantic import Field

from apis.documents.files import FileExpiry, Purpose
from apis.provider import Provider
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


class Uploads(Provider, ABC):
    """Joins parts to a file of the stack's Files. A tenant's id is unknown to every other tenant.

    Promises of every provider:
    - Parts may be added at the same time, on any worker, and sent again; only those that `complete` names count.
    - The file exists whole or not at all, and once, however often `complete` is called.
    - An upload that is not completed is gone, with its parts, when it has expired.
    """

    max_part_bytes: int
    """Maximum size of one part, in bytes."""

    @abstractmethod
    async def create(self, request: CreateUpload, *, tenant: str) -> Upload:
        """Begin an upload, which expires after an hour.

        Raises PayloadTooLarge for more bytes than a file may have, and InvalidRequest (`storage_quota_exceeded`) for
        more than the tenant may still store, uploads in progress included.
        """

    @abstractmethod
    async def add_part(self, upload_id: str, data: AsyncIterable[bytes], *, tenant: str) -> UploadPart:
        """Store a part. Raises NotFound; PayloadTooLarge; InvalidRequest if the upload is not pending."""

    @abstractmethod
    async def complete(self, upload_id: str, request: CompleteUpload, *, tenant: str) -> Upload:
        """Join the parts and return the upload with its file, also when it was completed before by the same parts.

        Raises NotFound; InvalidRequest for an unknown part, for another number of bytes than was announced, for
        another MD5, and for an upload that is not pending.
        """

    @abstractmethod
    async def cancel(self, upload_id: str, *, tenant: str) -> Upload:
        """End a pending upload and delete its parts. Raises NotFound; InvalidRequest if it is not pending."""
