"""Messages between a session and its guest, whose programs may write what they like into the channel."""

import asyncio
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
    """Sends requests to a guest, and reads its replies, in whichever order they come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[str, tuple[asyncio.Future[tuple[dict[str, Any], bytes]], PartHandler | None]] = {}
        """The futures of replies, and what takes the parts before them, by the tokens of the requests."""
        self._failure: Exception | None = None

    async def connect(self) -> None:
        """Read and write by the event loop from now on."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self._reading = asyncio.ensure_future(self._read_replies(reader))

    def send(self, request: GuestMessage) -> None:
        """Send a request that has no reply."""
        assert self._writer is not None, "connected before it is used"
        self._writer.write(_encode_message({**request, "size": 0}))

    async def exchange(
        self, request: GuestMessage, payload: bytes, on_part: PartHandler | None, token: str = ""
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request, and its payload. Raise SessionEnded for another message, EOFError, OSError.
        Another request can name this one by its `token`."""
        # A reply that a program wrote ahead of time does not have this call's token.
        assert self._writer is not None, "connected before it is used"
        if self._failure is not None:
            raise self._failure
        token = token or new_token()
        reply = asyncio.get_running_loop().create_future()
        self._waiting[token] = reply, on_part
        try:
            self._writer.write(_encode_message({**request, "token": token, "size": len(payload)}) + payload)
            await self._writer.drain()
            return await reply
        finally:
            del self._waiting[token]
            if reply.done() and not reply.cancelled():
                reply.exception()  # without this, asyncio logs one that drain() was faster with

    def close(self) -> None:
        """Close the channel."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail(EOFError())
        if self._writer is not None:
            self._writer.close()
        else:
            self._connection.close()

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        try:
            while (size := int.from_bytes(await reader.readexactly(4), "big")) <= _MAX_HEADER_BYTES:
                match json.loads(await reader.readexactly(size)):
                    case {"token": str(token), "size": int(length)} as message if (
                        token in self._waiting and 0 <= length <= MAX_FILES_BYTES
                    ):
                        self._take(token, message, await reader.readexactly(length))
                    case _:
                        break
        except (EOFError, OSError) as exc:
            self._fail(exc)
        except (ValueError, RecursionError, KeyError):
            pass
        self._fail(SessionEnded("it answered something else than was asked"))

    def _take(self, token: str, message: dict[str, Any], data: bytes) -> None:
        """Take a part, or a reply. Raises ValueError and KeyError for one that does not belong to a request."""
        reply, on_part = self._waiting[token]
        if on_part is not None and "part" in message:
            on_part(message, data)
        elif reply.done():
            raise ValueError("a second reply")
        else:
            reply.set_result((message, data))

    def _fail(self, failure: Exception) -> None:
        """Let all exchanges fail, those included that would begin later."""
        self._failure = self._failure or failure
        for reply, _ in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._failure)


def new_token() -> str:
    """Return a token of a request, which no program can guess."""
    return secrets.token_hex(8)


def _encode_message(header: GuestMessage) -> bytes:
    head = json.dumps(header).encode()
    return len(head).to_bytes(4, "big") + head
