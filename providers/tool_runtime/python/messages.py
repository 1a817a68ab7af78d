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
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_ERROR_KINDS: Final[dict[str, type[StackError]]] = {
    each.__name__: each
    for each in (InvalidRequest, NotFound, Overloaded, PayloadTooLarge, StackError, StoreUnavailable, Unsupported)
}


class ErrorPayload(msgspec.Struct):
    """An error of an operation."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class OperationRequest(msgspec.Struct):
    """An operation that is asked for, by its name; with a `session`, only where that is kept."""

    operation: str
    tenant: str
    session: str | None
    arguments: dict[str, Any]


class OperationReply(msgspec.Struct, rename={"result": "answer", "has_session": "kept"}):
    """What came of it. `kept` is false where the session is not: then nothing was done."""

    result: Any = None
    error: ErrorPayload | None = None
    has_session: bool = True


MessageT = TypeVar("MessageT", OperationRequest, OperationReply)
Operation = Callable[P, Awaitable[R]]


@dataclass(frozen=True, slots=True)
class OperationSchema:
    """How an operation's arguments and its answer are checked and written."""

    arguments: Mapping[str, TypeAdapter[Any]]
    result: TypeAdapter[Any]


def build_operation_schema(operation: Callable[..., Any]) -> OperationSchema:
    """By the annotations of a function or method."""
    return _build_function_schema(getattr(operation, "__func__", operation))


@cache
def _build_function_schema(function: Callable[..., Any]) -> OperationSchema:
    adapters = {name: TypeAdapter[Any](hint) for name, hint in typing.get_type_hints(function).items()}
    return OperationSchema(adapters, adapters.pop("return"))


def error_to_payload(error: StackError) -> ErrorPayload:
    """The same for the other side. What it does not know is told as the nearest kind that it does."""
    if isinstance(error, ToolFailed):
        return ErrorPayload("ToolFailed", error.message, code=error.code)
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERROR_KINDS)
    return ErrorPayload(kind, error.message, error.param, error.code, error.retry_after_s)


def payload_to_error(payload: ErrorPayload) -> StackError:
    if payload.kind == "ToolFailed":
        return ToolFailed(payload.message, code=payload.code)
    kind = _ERROR_KINDS.get(payload.kind, StackError)
    return kind(payload.message, param=payload.param, code=payload.code, retry_after_s=payload.retry_after_s)


def encode_message(message: OperationRequest | OperationReply) -> bytes:
    """Raises UnicodeEncodeError for text that is none."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_message(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT:
    """Raises EOFError when the other side leaves, and msgspec.MsgspecError for what is no such message."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError("It is too large for a message.")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=message_type)
