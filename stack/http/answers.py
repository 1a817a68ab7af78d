"""Responses that all routes share: JSON, an object or a page of objects, a deletion, an error."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apis.errors import QuotaExceeded, StackError, error_to_body
from apis.storage.pages import Page
from providers.common.fair_turns import REQUEST_WORK, current_turn
from stack.http.messages.dialect import error_to_message_body, message_status, speaks_messages
from stack.http.request_record import DISCONNECTED_STATUS

_PIECE_BYTES: Final = 256 * 1024
"""Bytes of a response that are written at a time."""


class _LargeResponse(Response):
    """Response that is written in pieces, in the tenant's turns."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn, body = current_turn(), bytes(self.body)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(body), _PIECE_BYTES):
            await turn.wait(REQUEST_WORK)
            await send({"type": "http.response.body", "body": body[start : start + _PIECE_BYTES], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response whose body is already JSON."""
    kind = _LargeResponse if len(body) > _PIECE_BYTES else Response
    return kind(body, status, headers, media_type="application/json")


def value_response(value: Any, status: int = 200) -> Response:
    """Return a response of one of the SDK's objects, with its null fields, of a page of objects, or of any value that
    orjson can serialize."""
    fields = _page_to_fields(cast("Page[Any]", value)) if isinstance(value, Page) else _to_fields(value)
    return json_response(orjson.dumps(fields), status)


def _page_to_fields(page: Page[Any]) -> dict[str, Any]:
    """Return a page in the shape that the SDK's cursors read."""
    data: list[dict[str, Any]] = [_to_fields(entry) for entry in page.data]
    first, last = (data[0]["id"], page.last_id or data[-1]["id"]) if data else (None, page.last_id)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": page.has_more}


def _to_fields(value: Any) -> Any:
    return value.model_dump(mode="json", warnings=False) if isinstance(value, BaseModel) else value


def build_single_page(kind: str, data: Sequence[BaseModel], **fields: Any) -> dict[str, Any]:
    """Return all of a listing as the only page of the object type `kind`."""
    entries = [_to_fields(entry) for entry in data]
    return {"object": kind, **fields, "data": entries, "has_more": False, "next_page": None}


def deleted_response(object_id: str, kind: str) -> Response:
    """Return the confirmation that an object was deleted; `kind` is its `object` field."""
    return value_response({"id": object_id, "object": kind, "deleted": True})


def client_disconnected_response() -> Response:
    """Return the response to a client that has closed its connection: a status for the metrics and the log."""
    return Response(status_code=DISCONNECTED_STATUS)


def error_response(error: StackError, scope: Scope | None = None, request_id: str = "") -> Response:
    """Return the body of an error, with the headers by which an SDK decides whether to retry: OpenAI's, or Anthropic's
    for a request of the Messages API."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, round(error.retry_after_s))}"
    elif error.status in (503, 504):
        headers["retry-after"] = "1"
    if error.repeats_work or isinstance(error, QuotaExceeded):
        headers["x-should-retry"] = "false"
    if scope is not None and speaks_messages(scope):
        body = error_to_message_body(error, request_id)
        return json_response(orjson.dumps(body), message_status(error), headers)
    return json_response(orjson.dumps(error_to_body(error)), error.status, headers)
