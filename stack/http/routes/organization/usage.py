"""/v1/organization/usage/completions: tokens, requests and tool calls by project, key and model."""

import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.usage import HOUR_S, MAX_BUCKETS, UsageCounts, UsageEntry, UsageQuery, UsageSubject, sum_by_group
from apis.errors import InvalidRequest
from stack.http.answers import value_response
from stack.http.context import HttpContext, Route, Services
from stack.http.routes.organization.objects import JsonObject, require_directory
from stack.http.uploads import read_query

_DEFAULT_BUCKETS: Final = {"1h": 24, "1d": 7}
_WIDTHS_S: Final = {"1h": HOUR_S, "1d": 24 * HOUR_S}


async def list_completions_usage(http: Request, _context: HttpContext, services: Services) -> Response:
    """Return one page of buckets. The cursor is the time at which the next page begins."""
    require_directory(services)
    query = read_query(http, UsageQuery)
    width_s, most = _WIDTHS_S[query.bucket_width], MAX_BUCKETS[query.bucket_width]
    count = query.limit or _DEFAULT_BUCKETS[query.bucket_width]
    if count > most:
        raise InvalidRequest(
            f"'limit' is at most {most} buckets of {query.bucket_width}.", param="limit", code="integer_above_max_value"
        )
    range_end = query.end_time or int(time.time()) + 1
    start = int(query.page) if query.page else query.start_time
    start -= start % width_s
    end = min(start + count * width_s, -(-range_end // width_s) * width_s)
    usage_log = services.stack.accounts.usage_log()
    assert usage_log is not None  # a provider with a directory has one
    # a range that begins within an hour begins with the next one: hours are the finest there is
    entries = await usage_log.read(max(start, query.start_time), min(end, range_end))
    starts = range(start, max(start, end), width_s)
    buckets = [_bucket_to_json(bucket_start, width_s, entries, query) for bucket_start in starts]
    has_more = end < range_end
    next_page = str(end) if has_more else None
    return value_response({"object": "page", "data": buckets, "has_more": has_more, "next_page": next_page})


USAGE_ROUTES: Final = (Route("GET", "/organization/usage/completions", list_completions_usage, query=UsageQuery),)


def _bucket_to_json(start: int, width_s: int, entries: list[UsageEntry], query: UsageQuery) -> JsonObject:
    end = start + width_s
    sums = sum_by_group((entry for entry in entries if start <= entry.start_time < end), query)
    results = [_result_to_json(group, counts, query) for group, counts in sums.items()]
    return {"object": "bucket", "start_time": start, "end_time": end, "results": results}


def _result_to_json(group: UsageSubject, counts: UsageCounts, query: UsageQuery) -> JsonObject:
    """Return an `organization.usage.completions.result`. The last two fields are extensions."""
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": counts.input_tokens,
        "input_cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "num_model_requests": counts.requests,
        "project_id": group.project_id or None,
        "api_key_id": group.key_id or None,
        "model": group.model or None,
        "user_id": None,
        "batch": group.is_batch if "batch" in query.group_by else None,
        "service_tier": group.service_tier or None,
        "output_reasoning_tokens": counts.reasoning_tokens,
        "tool_calls": counts.tool_calls,
    }
