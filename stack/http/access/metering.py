"""Metering: what a request reserves under the limits of its key, and the usage with which it ends."""

from functools import cache
from typing import Final, cast

from pydantic import BaseModel

from apis.accounts.accounts import CLIENT_TOOLS, Accounts, Caller
from apis.accounts.charges import RELEASED_USE, UNKNOWN_USE, Charge, Demand, Use
from apis.accounts.usage import count_one_request
from stack.http.request_record import RequestRecord

_BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 1024
"""Tokens that are reserved for an output whose length the request does not bound."""
_CLIENT_RUN_TOOLS: Final = CLIENT_TOOLS | {"local_shell", "apply_patch", "computer_use_preview", "computer"}


async def open_charge(
    accounts: Accounts, caller: Caller, request: BaseModel, body_bytes: int, *, is_batch: bool = False
) -> Charge | None:
    """Count the request and reserve what it may use under all limits that apply. Returns None where nothing is counted.
    Raises RateLimited."""
    meter = accounts.meter()
    if meter is None:
        return None
    limits = caller.find_limits(getattr(request, "model", None))
    demand = _estimate(request, body_bytes, is_batch=is_batch) if limits else Demand(is_batch=is_batch)
    return await meter.open_charge((caller.tenant, caller.key_id), limits, demand)


def end_charge(charge: Charge | None, record: RequestRecord) -> None:
    """Count what the record of a request says that it has used, unless the response that it created was stored with
    its usage. A failed request gets back what it has reserved. One whose client left does not, because its model has
    worked."""
    if charge is None:
        return
    if record.tokens is not None:
        tokens = record.tokens
        token_counts = (tokens.input, tokens.cached, tokens.output, tokens.reasoning)
        counts = count_one_request(token_counts, record.tool_calls)
        charge.end(Use(record.model, counts, category=record.usage_category, service_tier=record.service_tier))
    elif record.status >= 400 or record.outcome == "failed":
        charge.end(RELEASED_USE)
    else:
        charge.end(UNKNOWN_USE)


@cache
def _output_bounds(request_type: type[BaseModel]) -> tuple[str, ...]:
    names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
    return tuple(name for name in names if name in request_type.model_fields)


def _estimate(request: BaseModel, body_bytes: int, *, is_batch: bool) -> Demand:
    output = 0
    for name in _output_bounds(type(request)):
        output = getattr(request, name) or output or _DEFAULT_OUTPUT_TOKENS
    tools = cast("list[object]", getattr(request, "tools", None) or [])
    has_hosted_tools = any(getattr(tool, "type", "function") not in _CLIENT_RUN_TOOLS for tool in tools)
    return Demand(
        getattr(request, "model", None) or "",
        body_bytes // _BYTES_PER_TOKEN,
        output,
        int(has_hosted_tools),
        bool(getattr(request, "background", None)),
        is_batch,
    )
