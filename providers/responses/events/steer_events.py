"""The events by which a connection learns what becomes of the input that it sent to a running response."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from openai.types import responses

from apis.errors import StackError
from apis.events import ResponseStreamEvent
from apis.steering import Steer
from providers.responses.events.unvalidated import unvalidated


@cache
def _builder(name: str) -> Any:
    """Return the builder of the SDK's class of this name, which is imported for the first such event."""
    return unvalidated(getattr(responses, name))


def accepted_event(steer: Steer) -> ResponseStreamEvent:
    """Return the event of input that is stored."""
    fields = {"id": steer.id, "previous_response_id": steer.previous_response_id}
    return _builder("ResponseSteerAcceptedEvent")(type="response.steer.accepted", steer=fields, sequence_number=0)


def pending_event(steer_id: str, response_id: str, required_input: Sequence[Mapping[str, Any]]) -> ResponseStreamEvent:
    """Return the event of input that waits for what the client owes to the response."""
    return _builder("ResponseSteerPendingEvent")(
        type="response.steer.pending",
        steer={"id": steer_id, "previous_response_id": response_id},
        reason="waiting_for_required_input",
        required_input=[*required_input],
        sequence_number=0,
    )


def failed_event(
    error: StackError, code: str, value: Any, response_id: str, steer_id: str | None = None
) -> ResponseStreamEvent:
    """Return the event of input, with its `value`, that no response reads."""
    steer = {"input": value, "previous_response_id": response_id, **({} if steer_id is None else {"id": steer_id})}
    fields = {"code": code, "message": error.message, "type": "invalid_request_error"}
    build = _builder("ResponseSteerFailedEvent")
    return build(type="response.steer.failed", error=fields, steer=steer, sequence_number=0)


def failed_events(
    posted: Sequence[tuple[str, Any]], response_id: str, error: StackError, code: str
) -> list[ResponseStreamEvent]:
    """Return the events of inputs, each with its id and value, that no response reads."""
    return [failed_event(error, code, value, response_id, steer_id) for steer_id, value in posted]
