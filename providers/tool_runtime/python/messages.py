"""Messages between a worker and the machine's Python session server: four bytes of length, then msgpack.

Both sides run the same code (see `socket_folder.socket_path`), so a message has no version.
"""

import asyncio
import inspect
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, TypeVar

import msgspec

from apis.confinement.commands import CommandEvent

EVENTS_PARAMETER: Final = "on_event"
"""Last parameter of an operation that reports events while it runs. It is a function, which the server fills in."""
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

FailureKind = Literal["no_session", "session_ended", "no_file", "file_refused", "unavailable", "config", "bug"]


class SessionFailure(Exception):
    """An operation on a Python session failed. The text is a sentence for the caller."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class OperationRequest(msgspec.Struct, array_like=True):
    """Call of a method of SessionOperations, with its positional arguments."""

    operation: str
    arguments: msgspec.Raw


class OperationReply(msgspec.Struct, array_like=True):
    """Result of an operation (nil for None), or its failure; before it any number with an `event` of a running one."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: tuple[FailureKind, str] | None = None
    event: CommandEvent | None = None


MessageT = TypeVar("MessageT", OperationRequest, OperationReply)


@cache
def operation_types(operation: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the type of an operation's arguments, as a tuple without `self` and EVENTS_PARAMETER, and that of its
    result."""
    hints = typing.get_type_hints(operation)
    names = [name for name in inspect.signature(operation).parameters if name not in ("self", EVENTS_PARAMETER)]
    return tuple.__class_getitem__(tuple(hints[name] for name in names)), hints["return"]


def encode_message(message: OperationRequest | OperationReply) -> bytes:
    """Return the message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_message(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT:
    """Raise EOFError when the other side disconnects, and msgspec.MsgspecError for anything but such a message."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError("The message is too large.")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=message_type)
