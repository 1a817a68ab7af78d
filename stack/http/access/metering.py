"""Metering: the tokens that a request reserves under the limits of its key, and those that it has used in the end."""

from typing import Final

from pydantic import BaseModel

from apis.accounts.accounts import Accounts, Caller
from apis.accounts.limits import Reservation
from apis.accounts.usage import UsageCounts, UsageSubject
from stack.http.request_record import RequestRecord

_BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 1024
"""Tokens that are reserved for an output whose length the request does not bound."""


async def reserve_tokens(accounts: Accounts, caller: Caller, request: BaseModel, body_bytes: int) -> Reservation | None:
    """Count the request and reserve its tokens under all limits that apply, if any does. Raises RateLimited."""
    limits = caller.find_limits(getattr(request, "model", None))
    limiter = accounts.limiter() if limits else None
    if limiter is None:
        return None
    return await limiter.reserve(caller.tenant, limits, _estimate_tokens(request, body_bytes))


def settle_tokens(reservation: Reservation, record: RequestRecord) -> None:
    """Replace the reserved tokens by those of the request's record. A failed request gets them back. One whose client
    left keeps them, because its model has worked; so does a background response, which ends later."""
    if record.tokens is not None:
        reservation.settle(record.tokens.input + record.tokens.output)
    elif record.status >= 400 or record.outcome == "failed":
        reservation.settle(0)


def log_usage(accounts: Accounts, caller: Caller, record: RequestRecord) -> None:
    """Add the tokens and tool calls of a request, or of a response on a WebSocket, to the usage of its caller."""
    usage_log, tokens = accounts.usage_log(), record.tokens
    if usage_log is None or tokens is None:
        return
    counts = UsageCounts(1, tokens.input, tokens.cached, tokens.output, tokens.reasoning, dict(record.tool_calls))
    usage_log.add(UsageSubject(caller.tenant, caller.key_id, record.model), counts)


def _estimate_tokens(request: BaseModel, body_bytes: int) -> int:
    output = 0
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        if name in type(request).model_fields:
            output = getattr(request, name) or output or _DEFAULT_OUTPUT_TOKENS
    return body_bytes // _BYTES_PER_TOKEN + output
