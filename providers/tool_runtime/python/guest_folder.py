"""GuestFolder: the work folder of a session, whose files its first process lists, reads and writes."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from providers.tool_runtime.python.commands import GuestMessage
from providers.tool_runtime.python.files import MAX_FILES_BYTES, is_file_name, parse_file_list
from providers.tool_runtime.python.guest_channel import PartHandler
from providers.tool_runtime.python.outcomes import FileRefused
from providers.tool_runtime.python.output import render_terminal_text

MAX_ARCHIVE_BYTES: Final = 48 * 1024 * 1024
"""Most that the archive of a work folder may have: it is held in memory, and passes to a worker in one message."""

Exchange = Callable[[GuestMessage, bytes, PartHandler | None], Awaitable[tuple[dict[str, Any], bytes]]]


class GuestFolder:
    """The work folder. All methods raise SessionEnded where the first process does not answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def list_files(self, folder: str = "") -> list[tuple[str, int, int]]:
        """Return the files in a folder of the work folder, at most 2,000: name, bytes, last write in seconds since
        1970."""
        reply, _ = await self._request({"do": "list", "folder": folder})
        return [file for file in parse_file_list(reply) if is_file_name(file[0])]

    async def read(self, name: str) -> bytes:
        """Return a file's content. Raise FileRefused when it is not a regular file or larger than 16 MiB."""
        _, data = await self._request({"do": "read", "name": name, "max_bytes": MAX_FILES_BYTES})
        return data

    async def write(self, name: str, data: bytes) -> None:
        """Write a whole file and create the folders above it. Raise FileRefused when there is no room."""
        await self._request({"do": "write", "name": name}, data)

    async def delete(self, name: str) -> None:
        """Delete a file. Raise FileRefused when there is none."""
        await self._request({"do": "delete", "name": name})

    async def pack(self) -> bytes:
        """Return an archive of the work folder. Raise FileRefused when it is larger than MAX_ARCHIVE_BYTES."""
        parts: list[bytes] = []

        def take(_: GuestMessage, data: bytes) -> None:
            parts.append(data)
            if sum(map(len, parts)) > 2 * MAX_ARCHIVE_BYTES:
                raise ValueError("more than the limit")

        _, last = await self._request({"do": "pack", "max_bytes": MAX_ARCHIVE_BYTES}, b"", take)
        archive = b"".join([*parts, last])
        if len(archive) > MAX_ARCHIVE_BYTES:
            raise FileRefused("too large")
        return archive

    async def unpack(self, archive: bytes) -> None:
        """Write what an archive holds into the work folder. Raise FileRefused when it is damaged, or has no room."""
        await self._request({"do": "unpack"}, archive)

    async def _request(
        self, request: GuestMessage, payload: bytes = b"", on_part: PartHandler | None = None
    ) -> tuple[dict[str, Any], bytes]:
        reply, data = await self._exchange(request, payload, on_part)
        if reply.get("error"):
            raise FileRefused(render_terminal_text(str(reply["error"]).encode(errors="replace"))[:200])
        return reply, data
