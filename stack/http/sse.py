"""Encodes events as frames of a server-sent event stream or as WebSocket messages, in the client's dialect."""

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from openai.types.responses import ResponseStreamEvent

from apis.errors import InvalidRequest
from apis.events import LoggedEvent

ApiDialect = Literal["openai", "open-responses"]
DIALECT_HEADER: Final = "x-responses-dialect"

DONE_FRAME: Final = b"data: [DONE]\n\n"
KEEP_ALIVE_FRAME: Final = b": keep-alive\n\n"

_OPEN_RESPONSES_NAMES: Final = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
_RESPONSE_EVENT_TYPES: Final = frozenset(
    f"response.{name}" for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
_FLAT_EVENT_TYPES: Final = frozenset(
    f"response.{name}.delta"
    for name in ("output_text", "reasoning_text", "refusal", "function_call_arguments", "custom_tool_call_input")
)
_FLOAT_TIMES: Final = re.compile(rb'"(created_at|completed_at)":(\d+)\.0(?=[,}])')


def read_dialect(headers: Mapping[str, str], default: ApiDialect) -> ApiDialect:
    """Return the dialect that a request's headers name. Raises InvalidRequest for an unknown one."""
    wanted = headers.get(DIALECT_HEADER, default)
    if wanted not in ("openai", "open-responses"):
        raise InvalidRequest(f"The header {DIALECT_HEADER} is 'openai' or 'open-responses'.", code="invalid_value")
    return wanted


def model_to_json(model: Any) -> bytes:
    """Return a model of the SDK as JSON, without its unset fields."""
    data: bytes = model.__pydantic_serializer__.to_json(model, by_alias=True, exclude_unset=True)
    return data


def response_to_json(response: Any) -> bytes:
    """Return a model that holds a response object as JSON, with whole seconds where the SDK's types are floats."""
    return _FLOAT_TIMES.sub(rb'"\1":\2', model_to_json(response))


def encode_frames(
    events: Sequence[ResponseStreamEvent | LoggedEvent], dialect: ApiDialect, *, obfuscate: bool = False
) -> bytes:
    """Return the frames of `events` as one chunk of the stream."""
    if obfuscate or dialect != "openai":
        return b"".join([_encode_frame(event, dialect, obfuscate=obfuscate) for event in events])
    if len(events) == 1:  # nearly every batch is one token
        return b"%b%b\n\n" % (_frame_head(events[0].type), _event_to_json(events[0]))
    return b"".join([b"%b%b\n\n" % (_frame_head(event.type), _event_to_json(event)) for event in events])


@functools.cache
def _frame_head(event_type: str | None) -> bytes:
    return f"event: {event_type}\ndata: ".encode()


def _event_to_json(event: ResponseStreamEvent | LoggedEvent) -> bytes:
    if isinstance(event, LoggedEvent):
        return _FLOAT_TIMES.sub(rb'"\1":\2', event.data) if event.type in _RESPONSE_EVENT_TYPES else event.data
    if event.type in _FLAT_EVENT_TYPES:
        # nearly all events are these; as plain fields they cost a third of the model's serializer
        return orjson.dumps(event.__dict__, _model_to_fields)
    return response_to_json(event) if event.type in _RESPONSE_EVENT_TYPES else model_to_json(event)


def _model_to_fields(model: Any) -> dict[str, Any]:
    return model.to_dict()


def encode_message(event: ResponseStreamEvent, dialect: ApiDialect, stream_id: str, *, obfuscate: bool = False) -> str:
    """Return an event as a WebSocket's message, which names its stream unless that is the default one, ''."""
    if obfuscate or dialect != "openai":
        data = orjson.dumps(_event_to_fields(event, dialect, obfuscate=obfuscate))
    else:
        data = _event_to_json(event)
    if stream_id:
        data = b'%b,"stream_id":"%b"}' % (data[:-1], stream_id.encode())
    return data.decode()


def _encode_frame(event: ResponseStreamEvent | LoggedEvent, dialect: ApiDialect, *, obfuscate: bool) -> bytes:
    fields = _event_to_fields(event, dialect, obfuscate=obfuscate)
    return _frame_head(fields["type"]) + orjson.dumps(fields) + b"\n\n"


def _event_to_fields(
    event: ResponseStreamEvent | LoggedEvent, dialect: ApiDialect, *, obfuscate: bool
) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(_event_to_json(event))
    if obfuscate and isinstance(fields.get("delta"), str):
        # padding to a multiple of 32, so that the length of a frame reveals little about the length of a token
        fields["obfuscation"] = secrets.token_urlsafe(24)[: -len(fields["delta"]) % 32]
    if dialect == "open-responses":
        fields["type"] = _OPEN_RESPONSES_NAMES.get(fields["type"], fields["type"])
    return fields
