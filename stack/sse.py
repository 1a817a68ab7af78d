"""Frames a response's events as the bytes of a server-sent event stream, in the dialect that the client speaks."""

import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal

import orjson
from openai.types.responses import ResponseStreamEvent

from apis.logged_event import LoggedEvent

Dialect = Literal["openai", "open-responses"]

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_OPEN_RESPONSES_NAMES: Final = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
_WITH_RESPONSE: Final = frozenset(
    f"response.{name}" for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
_FLAT: Final = frozenset(
    f"response.{name}.delta"
    for name in ("output_text", "reasoning_text", "refusal", "function_call_arguments", "custom_tool_call_input")
)
_SECONDS: Final = re.compile(rb'"(created_at|completed_at)":(\d+)\.0(?=[,}])')


def to_json(model: Any) -> bytes:
    """A model of the SDK as the API writes it. Its times are whole seconds: the SDK types them as floats."""
    data: bytes = model.__pydantic_serializer__.to_json(model, by_alias=True, exclude_unset=True)
    return data


def response_to_json(response: Any) -> bytes:
    """The same for what holds a response object."""
    return _SECONDS.sub(rb'"\1":\2', to_json(response))


def frames(events: Sequence[ResponseStreamEvent | LoggedEvent], dialect: Dialect, *, obfuscate: bool = False) -> bytes:
    """All of `events` as one piece of the stream."""
    if obfuscate or dialect != "openai":
        return b"".join([_frame_as(event, dialect, obfuscate=obfuscate) for event in events])
    return b"".join([b"%b%b\n\n" % (_head(event.type), _data(event)) for event in events])


@functools.cache
def _head(name: str | None) -> bytes:
    return f"event: {name}\ndata: ".encode()


def _data(event: ResponseStreamEvent | LoggedEvent) -> bytes:
    if isinstance(event, LoggedEvent):
        return _SECONDS.sub(rb'"\1":\2', event.data) if event.type in _WITH_RESPONSE else event.data
    if event.type in _FLAT:
        # nearly all events are these; as plain fields they cost a third of what the model's serializer takes
        return orjson.dumps(event.__dict__, default=_fields)
    return response_to_json(event) if event.type in _WITH_RESPONSE else to_json(event)


def _fields(model: Any) -> dict[str, Any]:
    return model.to_dict()


def _frame_as(event: ResponseStreamEvent | LoggedEvent, dialect: Dialect, *, obfuscate: bool) -> bytes:
    fields: dict[str, Any] = orjson.loads(_data(event))
    if obfuscate and isinstance(fields.get("delta"), str):
        # padding to a multiple of 32, so that the length of a frame tells little of the length of a token
        fields["obfuscation"] = secrets.token_urlsafe(24)[: -len(fields["delta"]) % 32]
    if dialect == "open-responses":
        fields["type"] = _OPEN_RESPONSES_NAMES.get(fields["type"], fields["type"])
    return _head(fields["type"]) + orjson.dumps(fields) + b"\n\n"
