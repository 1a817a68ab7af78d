"""Steering on a WebSocket: the message that sends input to a running response, and answers that belong to no stream."""

from typing import Any, Final

import orjson

from apis.errors import InvalidRequest, StackError, SteeringRefused
from apis.responses import SteerResponse, Successor
from apis.steering import Steer
from providers.common.fair_turns import calculate
from stack.http.parsing import validate_request

_FIELDS: Final = frozenset(("type", "previous_response_id", "input"))
_NO_NUMBER: Final = 0
"""The number of an event that belongs to no stream."""


async def parse_steer(fields: dict[str, Any], *, is_large: bool) -> SteerResponse:
    """Return the input that a message sends. Raises SteeringRefused."""
    try:
        for name in fields.keys() - _FIELDS:
            raise InvalidRequest(f"Unknown parameter: '{name[:64]}'.", param=name[:64])
        values = {name: value for name, value in fields.items() if name != "type"}
        if is_large:
            return await calculate(validate_request, values, SteerResponse)
        return validate_request(values, SteerResponse)
    except InvalidRequest as exc:
        raise SteeringRefused(exc.message, param=exc.param, code="invalid_input") from None


def measure_posted(successor: Successor) -> int:
    """Return the bytes of the input that a successor reads."""
    return sum(len(orjson.dumps(value)) for _, value in successor.posted)


def accepted_message(steer: Steer) -> str:
    """Return the event of input for a response that runs elsewhere."""
    fields = {"id": steer.id, "previous_response_id": steer.previous_response_id}
    return _encode({"type": "response.steer.accepted", "steer": fields})


def failed_message(error: StackError, fields: dict[str, Any]) -> str:
    """Return the event that gives the input of a message back."""
    response_id = fields.get("previous_response_id")
    steer = {
        "input": fields.get("input", ""),
        "previous_response_id": response_id if isinstance(response_id, str) else "",
    }
    detail = {"type": "invalid_request_error", "code": error.code or error.failure_code, "message": error.message}
    return _encode({"type": "response.steer.failed", "error": detail, "steer": steer})


def _encode(event: dict[str, Any]) -> str:
    return orjson.dumps({**event, "sequence_number": _NO_NUMBER}).decode()
