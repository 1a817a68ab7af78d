"""Encodes events as frames of a server-sent event stream or as WebSocket messages, in the client's dialect."""

import functools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import orjson
from openai.types.responses import Response
from starlette.types import Scope

from apis.errors import InvalidRequest
from apis.events import (
    FLAT_EVENTS,
    RESPONSE_EVENTS,
    LoggedEvent,
    ResponseEvent,
    ResponseStatusEvent,
    ResponseStreamEvent,
    event_to_json,
    flat_event_to_json,
    response_event_to_json,
)
from apis.wire.base import sdk_model_to_json
from stack.http.parsing import find_header

EventT = TypeVar("EventT", bound=ResponseStreamEvent | LoggedEvent)
ApiDialect = Literal["openai", "open-responses"]
DIALECT_HEADER: Final = b"x-responses-dialect"

DONE_FRAME: Final = b"data: [DONE]\n\n"
KEEP_ALIVE_FRAME: Final = b": keep-alive\n\n"

_OPEN_RESPONSES_NAMES: Final = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
_NOT_IN_OPEN_RESPONSES: Final = frozenset(("response.compaction.compacting",))
"""Events of items of the Open Responses schema that its closed union of events does not have."""
_FLOAT_TIMES: Final = re.compile(rb'"(created_at|completed_at)":(\d+)\.0(?=[,}])')


def encode_typed_events(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return events that are objects with a `type` as frames of a stream, each with the name of its event."""
    frames = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]
    return b"".join(frames)


def read_dialect(scope: Scope, default: ApiDialect) -> ApiDialect:
    """Return the dialect that the headers of a request name. Raises InvalidRequest for an unknown one."""
    dialect = find_header(scope, DIALECT_HEADER)
    if dialect is None:
        return default
    if dialect not in ("openai", "open-responses"):
        message = f"The header {DIALECT_HEADER.decode()} is 'openai' or 'open-responses'."
        raise InvalidRequest(message, code="invalid_value")
    return dialect


def response_to_json(response: Response, dialect: ApiDialect = "openai") -> bytes:
    """Return a response object as JSON, with whole seconds where the SDK's types are floats."""
    data = sdk_model_to_json(response)
    for name, seconds in (("created_at", response.created_at), ("completed_at", response.completed_at)):
        if isinstance(seconds, float):
            data = _replace_once(data, f'"{name}":{seconds:.1f}'.encode(), f'"{name}":{seconds:.0f}'.encode())
    return data if dialect == "openai" else orjson.dumps(_to_open_responses(orjson.loads(data)))


def _replace_once(data: bytes, old: bytes, new: bytes) -> bytes:
    """Return what `data.replace(old, new, 1)` returns, which takes several times as long where the data are large."""
    start, view = data.find(old), memoryview(data)
    return data if start < 0 else b"".join((view[:start], new, view[start + len(old) :]))


def _to_open_responses(response: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a response as the Open Responses schema has it: there the schema of a format is null."""
    text_format = response["text"]["format"]
    if text_format["type"] == "json_schema":
        text_format["schema"] = None
    return response


def select_events(events: Sequence[EventT], dialect: ApiDialect) -> Sequence[EventT]:
    """Return the events that the dialect has. The numbers of those that are left out are missing in the stream."""
    if dialect == "openai":
        return events
    return [event for event in events if event.type not in _NOT_IN_OPEN_RESPONSES]


def encode_frames(
    events: Sequence[ResponseStreamEvent | LoggedEvent], dialect: ApiDialect, *, obfuscate: bool = False
) -> bytes:
    """Return the frames of `events` as one chunk of the stream."""
    if obfuscate or dialect != "openai":
        visible_events = select_events(events, dialect)
        return b"".join([_encode_frame(event, dialect, obfuscate=obfuscate) for event in visible_events])
    if len(events) == 1 and (event := events[0]).type in FLAT_EVENTS and not isinstance(event, LoggedEvent):
        return b"%b%b\n\n" % (_frame_head(event.type), flat_event_to_json(event))  # nearly every batch: one token
    # joined at once, so that a large event is not copied twice
    return b"".join([part for event in events for part in _plain_frame(event)])


@functools.cache
def frame_encoder(dialect: ApiDialect, obfuscate: bool) -> Callable[[Sequence[Any]], bytes]:  # noqa: FBT001 - a key
    """Return the function that encodes batches: one for all streams of a kind."""
    return functools.partial(encode_frames, dialect=dialect, obfuscate=obfuscate)


def _plain_frame(event: ResponseStreamEvent | LoggedEvent) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a frame in OpenAI's dialect."""
    kind = event.type
    if kind in FLAT_EVENTS and not isinstance(event, LoggedEvent):
        return _frame_head(kind), flat_event_to_json(event), b"\n\n"
    return _frame_head(kind), _event_to_data(event), b"\n\n"


def events_to_json(events: Sequence[ResponseEvent], dialect: ApiDialect) -> bytes:
    """Return events as an array of JSON."""
    if dialect == "openai":
        return b"[%b]" % b",".join([_event_to_data(event) for event in events])
    return orjson.dumps([_event_to_fields(event, dialect, obfuscate=False) for event in select_events(events, dialect)])


@functools.cache
def _frame_head(event_type: str | None) -> bytes:
    return f"event: {event_type}\ndata: ".encode()


def _event_to_data(event: ResponseStreamEvent | LoggedEvent) -> bytes:
    if isinstance(event, LoggedEvent):
        data = event.data
    elif event.type not in RESPONSE_EVENTS:
        return event_to_json(event)
    elif event.model_extra:
        data = event_to_json(event)
    else:
        status_event: ResponseStatusEvent = event  # pyright: ignore[reportAssignmentType] - the types of events say so
        return response_event_to_json(status_event, response_to_json(status_event.response))
    return _FLOAT_TIMES.sub(rb'"\1":\2', data) if event.type in RESPONSE_EVENTS else data


def encode_message(event: ResponseStreamEvent, dialect: ApiDialect, stream_id: str, *, obfuscate: bool = False) -> str:
    """Return an event as a WebSocket's message, which names its stream unless that is the default one, ''."""
    if obfuscate or dialect != "openai":
        data = orjson.dumps(_event_to_fields(event, dialect, obfuscate=obfuscate))
    else:
        data = _event_to_data(event)
    if stream_id:
        data = b'%b,"stream_id":"%b"}' % (data[:-1], stream_id.encode())
    return data.decode()


def _encode_frame(event: ResponseStreamEvent | LoggedEvent, dialect: ApiDialect, *, obfuscate: bool) -> bytes:
    fields = _event_to_fields(event, dialect, obfuscate=obfuscate)
    return _frame_head(fields["type"]) + orjson.dumps(fields) + b"\n\n"


def _event_to_fields(
    event: ResponseStreamEvent | LoggedEvent, dialect: ApiDialect, *, obfuscate: bool
) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(_event_to_data(event))
    if obfuscate and isinstance(fields.get("delta"), str):
        # padding to a multiple of 32, so that the length of a frame reveals little about the length of a token
        fields["obfuscation"] = secrets.token_urlsafe(24)[: -len(fields["delta"]) % 32]
    if dialect == "open-responses":
        fields["type"] = _OPEN_RESPONSES_NAMES.get(fields["type"], fields["type"])
        if isinstance(fields.get("response"), dict):
            fields["response"] = _to_open_responses(fields["response"])
    return fields
