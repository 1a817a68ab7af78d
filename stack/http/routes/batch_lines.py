"""RouteLineExecutor: executes the requests of batches by the handlers that answer the same requests over HTTP."""

import asyncio
import secrets
from typing import Final

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from apis.accounts.accounts import Caller
from apis.batches.batches import BatchOwner, LineAnswer
from apis.errors import (
    ConversationLocked,
    ConversationLost,
    NotFound,
    QuotaExceeded,
    RateLimited,
    StackError,
    StoreUnavailable,
    Unauthorized,
    error_to_body,
)
from apis.telemetry import REQUEST_ID, TRACE_HEADERS
from providers.common.fair_turns import CURRENT_TURN, turn_of
from providers.common.held_bytes import HELD_PLACES
from stack.http.context import HttpContext, Services, set_context
from stack.http.request_record import RequestRecord
from stack.http.route_table import RouteTable
from stack.http.sse import response_to_json

_RESPONSES: Final = "/v1/responses"
_ROUTE: Final = "batch"
"""The route of these requests in the metrics."""
_TRANSIENT_STATUSES: Final = frozenset({429, 502, 503, 504})
_REUSED_STATUSES: Final = frozenset({"completed", "incomplete"})


class RouteLineExecutor:
    """Executes lines in this process. Each is counted and validated as a request of its endpoint is. Requests that are
    no lines of batches are executed in the same way, but for responses that exist: their senders look for these."""

    def __init__(
        self, services: Services, app: ASGIApp, table: RouteTable, *, is_batch: bool = True, name: str = _ROUTE
    ) -> None:
        """`name` is the route of the requests in the metrics."""
        self._is_batch = is_batch
        self._name = name
        self._services = services
        self._app = app
        self._table = table

    def interactive_requests(self) -> int:
        return self._services.metrics.requests_in_flight

    async def may_execute(self, owner: BatchOwner) -> bool:
        return await self._find_caller(owner) is not None

    async def execute(self, endpoint: str, body: bytes, *, owner: BatchOwner, response_id: str) -> LineAnswer:
        record = RequestRecord(f"req_{secrets.token_hex(16)}", "POST", self._name)
        REQUEST_ID.set(record.id)
        TRACE_HEADERS.set({})
        CURRENT_TURN.set(turn_of(owner.tenant))
        count_request = self._services.metrics.count_request
        context = HttpContext(
            record, count_request, {}, tenant=owner.tenant, response_id=response_id, is_batch_line=self._is_batch
        )
        HELD_PLACES.set(context.places)
        try:
            caller = await self._find_caller(owner)
            if caller is None:
                raise Unauthorized("The API key that created this batch was revoked or has expired.")
            context.caller = caller
            answer = await self._load_earlier(endpoint, record.id, context)
            if answer is None:
                answer = await self._handle(endpoint, body, context)
            record.status = answer.status
        except Exception as exc:  # the outer edge of a request without a connection: the line says that it failed
            error = context.fail(exc)
            record.status = error.status
            if isinstance(exc, StoreUnavailable):
                raise
            answer = _refused_line(error, context)
        finally:
            context.end()
        return answer

    async def _find_caller(self, owner: BatchOwner) -> Caller | None:
        """Return the caller with the rights and limits that the key of a batch has now; None if it is not valid."""
        return await self._services.stack.accounts.find_owner(owner.tenant, owner.key_id)

    async def _load_earlier(self, endpoint: str, request_id: str, context: HttpContext) -> LineAnswer | None:
        """Return the response that a worker stored before it ended, without its answer to the line."""
        if not self._is_batch or endpoint != _RESPONSES or context.response_id is None:
            return None
        try:
            response = await self._services.stack.responses.get(context.response_id, tenant=context.tenant)
        except NotFound:
            return None
        if response.status not in _REUSED_STATUSES:
            return None
        return LineAnswer(200, request_id, response_to_json(response, self._services.stack.config.server.dialect))

    async def _handle(self, endpoint: str, body: bytes, context: HttpContext) -> LineAnswer:
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
        }
        set_context(scope, context)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            # this client never leaves
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        if self._table.lacks(endpoint):
            await self._table.load_for(endpoint)
        route = self._table.find("POST", endpoint).route
        assert route is not None
        response = await route.handler(Request(scope, receive), context, self._services)
        return LineAnswer(response.status_code, context.request_id, bytes(response.body))


def _refused_line(error: StackError, context: HttpContext) -> LineAnswer:
    is_busy = error.status in _TRANSIENT_STATUSES or isinstance(error, ConversationLocked | ConversationLost)
    is_transient = is_busy and not error.repeats_work and not isinstance(error, QuotaExceeded)
    is_limited = is_transient and isinstance(error, RateLimited) and context.is_over_limit
    error_body = orjson.dumps(error_to_body(error))
    return LineAnswer(error.status, context.request_id, error_body, is_transient, error.retry_after_s, is_limited)
