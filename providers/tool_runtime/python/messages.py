"""What the processes that keep Python sessions say to each other: a length, then msgpack; values as annotations say."""

import asyncio
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
from pydantic import TypeAdapter

from apis.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    StackError,
    StoreUnavailable,
    ToolFailed,
    Unsupported,
)

P = ParamSpec("P")
R = TypeVar("R")
_MAX_BYTES: Final = 64 * 1024 * 1024
_RAISED: Final[dict[str, type[StackError]]] = {
    each.__name__: each
    for each in (InvalidRequest, NotFound, Overloaded, PayloadTooLarge, StackError, StoreUnavailable, Unsupported)
}


class Raised(msgspec.Struct):
    """An error of an operation."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class Request(msgspec.Struct):
    """An operation that is asked for, by its name; with a `session`, only where that is kept."""

    operation: str
    tenant: str
    session: str | None
    arguments: dict[str, Any]


class Reply(msgspec.Struct):
    """What came of it. `kept` is false where the session is not: then nothing was done."""

    answer: Any = None
    error: Raised | None = None
    kept: bool = True


Message = TypeVar("Message", Request, Reply)
Operation = Callable[P, Awaitable[R]]


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation's arguments and its answer are checked and written."""

    arguments: Mapping[str, TypeAdapter[Any]]
    answer: TypeAdapter[Any]


def form_of(operation: Callable[..., Any]) -> Form:
    """By the annotations of a function or method."""
    return _form_of(getattr(operation, "__func__", operation))


@cache
def _form_of(function: Callable[..., Any]) -> Form:
    adapters = {name: TypeAdapter[Any](hint) for name, hint in typing.get_type_hints(function).items()}
    return Form(adapters, adapters.pop("return"))


def error_to_raised(error: StackError) -> Raised:
    """The same for the other side. What it does not know is told as the nearest kind that it does."""
    if isinstance(error, ToolFailed):
        return Raised("ToolFailed", error.message, code=error.code)
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _RAISED)
    return Raised(kind, error.message, error.param, error.code, error.retry_after_s)


def raised_to_error(raised: Raised) -> StackError:
    if raised.kind == "ToolFailed":
        return ToolFailed(raised.message, code=raised.code)
    kind = _RAISED.get(raised.kind, StackError)
    return kind(raised.message, param=raised.param, code=raised.code, retry_after_s=raised.retry_after_s)


def message_to_bytes(message: Request | Reply) -> bytes:
    """Raises UnicodeEncodeError for text that is none."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_message(reader: asyncio.StreamReader, kind: type[Message]) -> Message:
    """Raises EOFError when the other side leaves, and msgspec.MsgspecError for what is no such message."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_BYTES:
        raise msgspec.DecodeError("It is too large for a message.")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
