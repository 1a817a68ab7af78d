"""Files: the uploads of clients, stored and returned unchanged."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from openai.types.file_object import FileObject
from pydantic import Field

from apis.provider import Provider
from apis.storage.kv_store import Op
from apis.storage.pages import Page
from apis.wire.base import ListParams, Wire

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
FileSource = Literal["body", "parts", "server"]
"""Where a file comes from, which decides its bounds: one body, parts of an upload, or the server's own output, which is
counted for the tenant but never refused."""
FileCommit = Callable[[str], Awaitable[Sequence[Op]]]
"""Returns the operations that are written in the same step as the file with this id appears. It is called again where a
condition of the write does not hold, and raises the error of a file that may not appear any more."""


PartCommit = Callable[[int], Awaitable[Sequence[Op]]]
"""Returns the operations that are written in the same step as a part of this many bytes appears."""


@dataclass(frozen=True, slots=True)
class FileParts:
    """The parts of one upload that make a file: their sizes in bytes by their ids, in their order in the file. With
    `md5`, in hexadecimal, the file must have that digest."""

    upload_id: str
    sizes: Mapping[str, int]
    md5: str | None = None


async def commit_nothing(_file_id: str) -> Sequence[Op]:
    """Return no operations."""
    return ()


class FileExpiry(Wire):
    """Expiry of a file, `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class CreateFile(Wire):
    """The form fields of an upload. `filename` is a label of any text, never used as a path."""

    filename: str = ""
    purpose: Purpose
    expires_after: FileExpiry | None = None


class FileListParams(ListParams):
    """Query of a listing of files."""

    limit: int = Field(default=10_000, ge=1, le=10_000)
    purpose: str | None = None


class Files(Provider, ABC):
    """Stores files under ids that the server generates. A tenant's id is unknown to every other tenant.

    Promises of every provider (tests/conformance/files.py):
    - A file exists whole or not at all: an upload that fails, breaks off or is cancelled creates none, and where the
      outcome of its last write is unknown, it is read before anything is deleted.
    - A file that `create` returned exists until it is deleted or expires.
    - An upload above `max_file_bytes` is refused before it is read to its end.
    """

    max_file_bytes: int
    """Maximum size of a file that is sent as one body, in bytes."""
    max_joined_bytes: int
    """Maximum size of a file that is sent in parts, in bytes."""

    @abstractmethod
    async def create(
        self,
        request: CreateFile,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        source: FileSource = "body",
        commit: FileCommit = commit_nothing,
    ) -> FileObject:
        """Store `data`. The object's `filename` is the label without path, control and direction characters.

        Raises PayloadTooLarge, InvalidRequest (`storage_quota_exceeded`) for a tenant above its quota, what `commit`
        raises, and Overloaded if a condition of its operations does not hold in many attempts: then there is no file.
        """

    @abstractmethod
    async def add_part(
        self,
        upload_id: str,
        part_id: str,
        data: AsyncIterable[bytes],
        *,
        tenant: str,
        life_s: float,
        commit: PartCommit,
    ) -> int:
        """Store bytes that `join_parts` may make a part of a file until `life_s` have passed, and return their number.
        A part exists whole or not at all. Raises what `data` and `commit` raise."""

    @abstractmethod
    async def join_parts(
        self, request: CreateFile, parts: FileParts, *, tenant: str, commit: FileCommit = commit_nothing
    ) -> FileObject:
        """Create a file of the parts, with the promises and errors of `create`. Raises InvalidRequest for another MD5,
        and StorageCorrupt where a part is missing or damaged."""

    @abstractmethod
    async def delete_parts(self, upload_id: str, part_ids: Sequence[str], *, tenant: str) -> None:
        """Delete these parts of an upload that has ended; those that are part of a file stay."""

    @abstractmethod
    async def require_room(self, size_bytes: int, *, tenant: str) -> None:
        """Raise InvalidRequest (`storage_quota_exceeded`) if one more file of this size would exceed the quota."""

    @abstractmethod
    async def get(self, file_id: str, *, tenant: str) -> FileObject:
        """Return the file's metadata. Raises NotFound."""

    @abstractmethod
    async def list(self, params: FileListParams, *, tenant: str) -> Page[FileObject]:
        """List the tenant's files by creation time. The id of a deleted file is still valid as `after`."""

    @abstractmethod
    def content(self, file_id: str, *, tenant: str) -> AsyncGenerator[bytes]:
        """Yield the file's bytes in chunks of at most 1 MiB. Raises NotFound, also between chunks after a deletion, and
        StorageCorrupt where a part of the content is missing or damaged."""

    @abstractmethod
    async def delete(self, file_id: str, *, tenant: str) -> None:
        """Delete the file and its bytes. Raises NotFound."""

    async def delete_outside_of_store(self, *, tenant: str) -> None:
        """Delete all bytes of the tenant that are not in the KVStore, before its records are deleted there."""

    async def read(self, file_id: str, *, tenant: str) -> bytes:
        """Return all bytes of the file. Raises NotFound."""
        return b"".join([chunk async for chunk in self.content(file_id, tenant=tenant)])
