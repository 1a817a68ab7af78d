"""The events by which a connection learns what becomes of the input that it sent to a running response."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from openai.types.responses import (
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
    ResponseSteerPendingEvent,
    ResponseStreamEvent,
)

from apis.errors import StackError
from apis.steering import Steer
from providers.responses.events.unvalidated import unvalidated

_build_accepted_event: Any = unvalidated(ResponseSteerAcceptedEvent)
_build_pending_event: Any = unvalidated(ResponseSteerPendingEvent)
_build_failed_event: Any = unvalidated(ResponseSteerFailedEvent)


def accepted_event(steer: Steer) -> ResponseStreamEvent:
    """Return the event of input that is stored."""
    fields = {"id": steer.id, "previous_response_id": steer.previous_response_id}
    return _as_event(_build_accepted_event(type="response.steer.accepted", steer=fields, sequence_number=0))


def pending_event(steer_id: str, response_id: str, required_input: Sequence[Mapping[str, Any]]) -> ResponseStreamEvent:
    """Return the event of input that waits for what the client owes to the response."""
    return _as_event(
        _build_pending_event(
            type="response.steer.pending",
            steer={"id": steer_id, "previous_response_id": response_id},
            reason="waiting_for_required_input",
            required_input=[*required_input],
            sequence_number=0,
        )
    )


def failed_event(
    error: StackError, code: str, value: Any, response_id: str, steer_id: str | None = None
) -> ResponseStreamEvent:
    """Return the event of input, with its `value`, that no response reads."""
    steer = {"input": value, "previous_response_id": response_id, **({} if steer_id is None else {"id": steer_id})}
    fields = {"code": code, "message": error.message, "type": "invalid_request_error"}
    return _as_event(_build_failed_event(type="response.steer.failed", error=fields, steer=steer, sequence_number=0))


def failed_events(
    posted: Sequence[tuple[str, Any]], response_id: str, error: StackError, code: str
) -> list[ResponseStreamEvent]:
    """Return the events of inputs, each with its id and value, that no response reads."""
    return [failed_event(error, code, value, response_id, steer_id) for steer_id, value in posted]


def _as_event(event: Any) -> ResponseStreamEvent:
    return cast("ResponseStreamEvent", event)  # the SDK's union of events is that of a stream over HTTP
