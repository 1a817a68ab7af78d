"""RequestRecord: the facts of one request for the metrics and the access log. It holds no content of the request."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.types import Scope

from apis.accounts.usage import count_hosted_calls
from apis.deltas import Usage, estimate_tokens, measure_deltas, usage_from_wire
from apis.errors import StackError
from apis.events import LoggedEvent
from stack.http.parsing import find_header

OTHER: Final = "other"
WEBSOCKET: Final = "WEBSOCKET"
DISCONNECTED_STATUS: Final = 499
"""The status of a request whose client has left before its response."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", WEBSOCKET})
_OUTCOMES: Final = frozenset({"completed", "incomplete", "failed", "cancelled", "queued"})
_NO_CALLS: Final[Mapping[str, int]] = MappingProxyType({})

_CLIENT_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_ERROR_CODE: Final = re.compile(r"[a-z0-9_]{1,64}")
# the text after the first dot may be a key of the client's own, as in `metadata`
_PARAM_PATH: Final = re.compile(r"[A-Za-z][A-Za-z_-]{0,63}(?:\[\d{1,9}\])?")
_MODEL_NAME: Final = re.compile(r"[\x21-\x7e]{1,256}")


class RequestRecord(msgspec.Struct):
    """The facts of one request, or of one response on a WebSocket.

    `status` is 0 until a response has started, `route` is the template of the path, `outcome` the status of the
    response object that the request created, and `is_stream` is true for an event stream. Times are in seconds since
    the request started, NaN if the event did not happen.
    """

    id: str
    method: str
    route: str
    status: int = 0
    sent_bytes: int = 0
    is_stream: bool = False
    first_byte_s: float = math.nan
    first_output_s: float = math.nan
    client_request_id: str = ""
    model: str = ""
    response_id: str = ""
    outcome: str = ""
    service_tier: str = ""
    usage_category: str = ""
    tenant: str = ""
    code: str = ""
    param: str = ""
    tokens: Usage | None = None
    tool_calls: Mapping[str, int] = _NO_CALLS
    _expected_response_id: str = ""
    _streamed_deltas: int = 0
    _streamed_chars: int = 0
    _started_at: float = msgspec.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            self.method = OTHER

    def elapsed_s(self) -> float:
        """Return the seconds since the request started."""
        return time.perf_counter() - self._started_at

    def record_error(self, error: StackError) -> None:
        """Record why the request was refused, without any text of the client."""
        if error.code is not None and _ERROR_CODE.fullmatch(error.code):
            self.code = error.code
        if error.param is not None and (place := _PARAM_PATH.match(error.param)):
            self.param = place[0]
        if not self.response_id:
            self.outcome = ""

    def expect_response(self, response_id: str = "") -> None:
        """Record that the request creates a response: unless its end is observed, the client has disconnected."""
        self.outcome = "cancelled"
        self._expected_response_id = response_id

    def observe(self, event: Any) -> None:
        """Record the first or the last event of the response that the request created."""
        if isinstance(event, LoggedEvent):  # of a background response, which ends in another request or in none
            self.outcome = "queued"
            self.response_id = self._expected_response_id
            return
        response = getattr(event, "response", None)
        if response is None:
            return
        self.response_id, self.model = response.id, response.model
        if response.status in _OUTCOMES:
            self.outcome = response.status
        if response.usage is not None:
            self.tool_calls = count_hosted_calls(response)
            self.service_tier = response.service_tier or ""
            self.tokens = usage_from_wire(response.usage)

    def record_usage(self, model: str, usage: Usage, *, category: str = "") -> None:
        """Record the tokens that the request has used, other than by a response; `category` is that of UsageSubject."""
        self.model, self.usage_category, self.tokens = model, category, usage

    def add_streamed(self, deltas: Sequence[Any]) -> None:
        """Count the deltas of a model's output and their characters, in case the end with the usage is missed."""
        count, chars = measure_deltas(deltas)
        self._streamed_deltas += count
        self._streamed_chars += chars

    def estimate_streamed(self) -> int:
        """Return an estimate of the tokens that the model has generated."""
        return estimate_tokens(self._streamed_deltas, self._streamed_chars)

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the access log's line, without the empty ones."""
        fields = {
            "request": self.id,
            "client_request": self.client_request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "ms": _seconds_to_ms(self.elapsed_s()),
            "first_byte_ms": _seconds_to_ms(self.first_byte_s),
            "first_output_ms": _seconds_to_ms(self.first_output_s),
            "bytes": self.sent_bytes,
            "tenant": self.tenant,
            "model": self.model if _MODEL_NAME.fullmatch(self.model) else "",
            "response": self.response_id,
            "outcome": self.outcome,
            "error": self.code,
            "param": self.param,
        }
        return {name: value for name, value in fields.items() if value not in ("", None)}


def _seconds_to_ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1000, 1)


def read_client_request_id(scope: Scope) -> str:
    """Return the client's own id of the request, from `x-request-id`; empty if there is none or it is malformed."""
    request_id = find_header(scope, b"x-request-id") or ""
    return request_id if _CLIENT_REQUEST_ID.fullmatch(request_id) else ""
