"""The response of a run as it was stored: its request, as it began, and as its log ends it. Pure functions."""

from collections.abc import Sequence
from typing import Any

import orjson
from openai.types.responses import Response, ResponseError

from apis.accounts.charges import RELEASED_USE, build_end
from apis.deltas import Usage
from apis.errors import StackError
from apis.responses import CreateResponse
from apis.storage.kv_store import Op
from apis.storage.records import reading_stored
from providers.common.moderated_inference import BLOCKED_CODE
from providers.responses.background.runs import StoredRequest
from providers.responses.events.response_object import (
    ResponseStatus,
    begin_response,
    end_response,
    response_from_json,
)
from providers.responses.run.pending_response import use_of_response
from providers.responses.store.history import sdk_model_to_json


def parse_stored_request(stored_request: StoredRequest, response_id: str) -> CreateResponse:
    """Return the request as the client sent it. Raises StorageCorrupt."""
    with reading_stored(response_id):
        return CreateResponse.model_validate_json(bytes(stored_request.request))


def build_stored_response(response_id: str, stored_request: StoredRequest, status: ResponseStatus) -> Response:
    """Return the response of a stored request as it began."""
    return begin_response(
        parse_stored_request(stored_request, response_id), response_id, stored_request.created_at, status
    )


def select_kept_input(stored_request: StoredRequest, error: StackError | None) -> bytes:
    """Return the input items that a response keeps which ends with an error. Input that was sent to a running response
    is judged when the next one is to read it: blocked input is not kept."""
    is_blocked = error is not None and error.code == BLOCKED_CODE
    return b"[]" if is_blocked else bytes(stored_request.input_items)


def build_charge_ops(stored_request: StoredRequest, response: Response, *, was_executed: bool) -> list[Op]:
    """Return the write that ends the charge of a run with its final response. One that was cancelled before a worker
    executed it has used nothing."""
    if stored_request.charge is None:
        return []
    return [build_end(stored_request.charge, use_of_response(response) if was_executed else RELEASED_USE).to_put()]


def encode_event_lines(events: Sequence[dict[str, Any]]) -> list[bytes]:
    """Return the lines of events that are JSON objects, as the log holds them."""
    return [b"%b %b\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def build_final_response(
    response: Response,
    status: ResponseStatus,
    items: Sequence[dict[str, Any]],
    failure: ResponseError | None,
    usage: Usage | None = None,
) -> Response:
    """Return the final response with output items that are JSON objects of a log."""
    fields: dict[str, Any] = orjson.loads(
        sdk_model_to_json(end_response(response, status, (), usage or Usage(), error=failure))
    )
    return response_from_json({**fields, "output": items})
