"""Messages between a session and its guest, whose programs may write what they like into the channel."""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from typing import Any, Final

from providers.tool_runtime.python.commands import GuestMessage
from providers.tool_runtime.python.files import MAX_FILES_BYTES
from providers.tool_runtime.python.outcomes import SessionEnded

_MAX_HEADER_BYTES: Final = 1024 * 1024
PartHandler = Callable[[GuestMessage, bytes], None]
"""Takes a part that comes before a reply, and its payload; raises ValueError for a wrong one."""


class GuestChannel:
    """Sends requests to a guest, one at a time, and reads its replies."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Read and write by the event loop from now on."""
        self._streams = await asyncio.open_unix_connection(sock=self._connection)

    def send(self, request: GuestMessage) -> None:
        """Send a request that has no reply."""
        assert self._streams is not None, "connected before it is used"
        self._streams[1].write(_encode_message({**request, "size": 0}))

    async def exchange(
        self, request: GuestMessage, payload: bytes, on_part: PartHandler | None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request, and its payload. Raise SessionEnded for another message, EOFError, OSError."""
        # A reply that a program wrote ahead of time does not have this call's token.
        assert self._streams is not None, "connected before it is used"
        reader, writer = self._streams
        token = secrets.token_hex(8)
        writer.write(_encode_message({**request, "token": token, "size": len(payload)}) + payload)
        await writer.drain()
        with contextlib.suppress(ValueError, RecursionError):
            while (size := int.from_bytes(await reader.readexactly(4), "big")) <= _MAX_HEADER_BYTES:
                match json.loads(await reader.readexactly(size)):
                    case {"token": str(reply_token), "size": int(length)} as reply if (
                        reply_token == token and 0 <= length <= MAX_FILES_BYTES
                    ):
                        data = await reader.readexactly(length)
                        if on_part is None or "part" not in reply:
                            return reply, data
                        on_part(reply, data)
                    case _:
                        break
        raise SessionEnded("it answered something else than was asked")

    def close(self) -> None:
        """Close the channel."""
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._connection.close()


def _encode_message(header: GuestMessage) -> bytes:
    head = json.dumps(header).encode()
    return len(head).to_bytes(4, "big") + head
