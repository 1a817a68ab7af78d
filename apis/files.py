"""Files: what clients upload, kept whole and handed back unchanged."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Literal

from openai.types import FileObject
from pydantic import Field

from apis.provider import Provider
from apis.storage.pages import Page
from apis.wire.base import Wire

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
Order = Literal["asc", "desc"]


class FileExpiry(Wire):
    """The file is gone `seconds` after it was made."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class CreateFile(Wire):
    """What a client says of the bytes it uploads. `filename` is a label and never a path: it may hold anything."""

    filename: str = ""
    purpose: Purpose
    expires_after: FileExpiry | None = None


class FileListParams(Wire):
    """Which of a tenant's files to list; `after` is the id of the last one seen."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=10_000, ge=1, le=10_000)
    order: Order = "desc"
    purpose: str | None = None


class Files(Provider, ABC):
    """Files by ids that the server makes. One tenant's id is unknown to another.

    Promises, the same for every provider (tests/conformance/files.py):
    - A file is there whole or not at all: an upload that fails, is cut off or cancelled leaves none.
    - What `create` returned is there until it is deleted or has expired.
    - An upload that is larger than one file may be is refused before it is read to its end.
    """

    max_file_bytes: int
    """The largest file that is taken."""

    @abstractmethod
    async def create(self, request: CreateFile, data: AsyncIterable[bytes], *, tenant: str) -> FileObject:
        """Keep `data`. The object's `filename` is the label without path, control and direction characters.

        Raises PayloadTooLarge, and InvalidRequest (`storage_quota_exceeded`) where the tenant's share is used up.
        """

    @abstractmethod
    async def get(self, file_id: str, *, tenant: str) -> FileObject:
        """Raises NotFound."""

    @abstractmethod
    async def list(self, params: FileListParams, *, tenant: str) -> Page[FileObject]:
        """The tenant's files by the time they were made. An `after` that is gone still marks its place."""

    @abstractmethod
    def content(self, file_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        """The file's bytes, in pieces of at most 1 MiB. Raises NotFound, also in between when it is deleted then."""

    @abstractmethod
    async def delete(self, file_id: str, *, tenant: str) -> None:
        """Forget the file and its bytes. Raises NotFound."""

    async def read(self, file_id: str, *, tenant: str) -> bytes:
        """The file's bytes in one piece. Raises NotFound."""
        return b"".join([piece async for piece in self.content(file_id, tenant=tenant)])
