"""/v1/organization/usage and /v1/organization/costs: what was used in each hour or day, in pages of buckets."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.limits import NANOS
from apis.accounts.requests import CostsQuery, FileSearchUsageQuery, ImagesUsageQuery, UsageQuery, WebSearchUsageQuery
from apis.accounts.usage import (
    COSTS_MAX_BUCKETS,
    HOUR_S,
    MAX_BUCKETS,
    UsageCounts,
    UsageEntry,
    UsageSubject,
    sum_by_group,
)
from apis.errors import InvalidRequest, Unsupported
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_query
from stack.http.route import ADMINISTRATION, Handler, Route
from stack.http.routes.absences import refuse_route
from stack.http.routes.organization.objects import JsonObject, require_organization

if TYPE_CHECKING:
    from providers.accounts.usage_log import StoredUsageLog

_DEFAULT_BUCKETS: Final = {"1h": 24, "1d": 7}
_WIDTHS_S: Final = {"1h": HOUR_S, "1d": 24 * HOUR_S}
_EMBEDDINGS: Final = "embeddings"
_DECISIONS: Final = "decisions"
_MODERATIONS: Final = "moderations"
_UNCOUNTED: Final = {
    "audio_speeches": "The models here write text.",
    "audio_transcriptions": "Seconds of audio are not counted; tokens of transcripts are in 'usage.completions'.",
    "code_interpreter_sessions": "Its calls are counted, by 'usage.completions'.",
    "vector_stores": "The size of a vector store is 'usage_bytes' of its object, and its history is not stored.",
}
"""The kinds of usage that are not counted here, each with the reason."""


@dataclass(frozen=True, slots=True)
class _UsageKind:
    """One method of the SDK's `usage`. `fields` returns the numbers of a result, None where there are none."""

    object_name: str
    query: type[UsageQuery]
    fields: Callable[[UsageCounts], JsonObject | None]
    category: str | None = None
    """The category of the entries; None for all of them."""
    group_fields: tuple[str, ...] = ("api_key_id", "model", "user_id")


@dataclass(frozen=True, slots=True)
class _Page:
    """The buckets of one page: the range of their starts, and where the range of the query ends."""

    starts: range
    range_start: int
    range_end: int

    @property
    def end(self) -> int:
        return self.starts.stop

    async def read(self, usage_log: "StoredUsageLog") -> list[UsageEntry]:
        """Return the entries. A range that begins within an hour begins with the next one: hours are the finest."""
        start = max(self.starts.start, self.range_start)
        return await usage_log.read(start, min(self.end, self.range_end))

    def to_json(
        self, build_results: Callable[[Iterator[UsageEntry]], list[JsonObject]], entries: list[UsageEntry]
    ) -> JsonObject:
        """Return the page. The cursor is the time at which the next page begins."""
        width_s, buckets = self.starts.step, list[JsonObject]()
        for start in self.starts:
            own = (entry for entry in entries if start <= entry.start_time < start + width_s)
            results = build_results(own)
            buckets.append({"object": "bucket", "start_time": start, "end_time": start + width_s, "results": results})
        has_more = self.end < self.range_end
        next_page = str(self.end) if has_more else None
        return {"object": "page", "data": buckets, "has_more": has_more, "next_page": next_page}


def _list_usage(kind: _UsageKind) -> Handler:
    async def list_usage(http: Request, _context: HttpContext, services: Services) -> Response:
        usage_log = require_organization(services).usage_log
        return value_response(await _read_usage(kind, usage_log, read_query(http, kind.query)))

    return list_usage


async def _read_usage(kind: _UsageKind, usage_log: "StoredUsageLog", query: UsageQuery) -> JsonObject:
    page = _find_page(query, query.bucket_width, MAX_BUCKETS[query.bucket_width])
    entries = [entry for entry in await page.read(usage_log) if kind.category in (None, entry.subject.category)]

    def build_results(own: Iterator[UsageEntry]) -> list[JsonObject]:
        return [
            {"object": f"organization.usage.{kind.object_name}.result", **fields, **_group_fields(kind, group, query)}
            for group, counts in sum_by_group(own, query).items()
            if (fields := kind.fields(counts)) is not None
        ]

    return page.to_json(build_results, entries)


async def read_completions_usage(usage_log: "StoredUsageLog", query: UsageQuery) -> JsonObject:
    """Return the page of buckets of `usage.completions`. Raises InvalidRequest and StoreUnavailable."""
    return await _read_usage(_KINDS["completions"], usage_log, query)


async def list_costs(http: Request, _context: HttpContext, services: Services) -> Response:
    """Return the costs by the prices in the run config when each request ended."""
    usage_log = require_organization(services).usage_log
    query = read_query(http, CostsQuery)
    page = _find_page(query, "1d", COSTS_MAX_BUCKETS)
    usage_query, currency = query.to_usage_query(), require_organization(services).currency

    def build_results(own: Iterator[UsageEntry]) -> list[JsonObject]:
        return [
            {
                "object": "organization.costs.result",
                "amount": {"value": counts.cost / NANOS, "currency": currency},
                "line_item": group.model or None,
                "project_id": group.project_id or None,
                "api_key_id": group.key_id or None,
                "user_id": None,
                "quantity": counts.input_tokens + counts.output_tokens if group.model else None,
                "quantity_unit": "tokens" if group.model else None,
            }
            for group, counts in sum_by_group(own, usage_query).items()
        ]

    return value_response(page.to_json(build_results, await page.read(usage_log)))


def _uncounted_error(kind: str, reason: str) -> Unsupported:
    return Unsupported(f"'usage.{kind}' is not counted by this server. {reason}", code="unsupported_usage")


def _count_generated(counts: UsageCounts) -> JsonObject:
    """Return the numbers of an `organization.usage.completions.result`. The last two fields are extensions."""
    extensions = {"output_reasoning_tokens": counts.reasoning_tokens, "tool_calls": counts.tool_calls}
    return {**_count_decided(counts), **extensions}


def _count_decided(counts: UsageCounts) -> JsonObject:
    return {
        "input_tokens": counts.input_tokens,
        "input_cached_tokens": counts.cached_tokens,
        "input_uncached_tokens": counts.input_tokens - counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "num_model_requests": counts.requests,
    }


def _count_embedded(counts: UsageCounts) -> JsonObject:
    return {"input_tokens": counts.input_tokens, "num_model_requests": counts.requests}


def _count_calls(item_type: str, name: str, *, with_requests: bool) -> Callable[[UsageCounts], JsonObject | None]:
    def count(counts: UsageCounts) -> JsonObject | None:
        calls = counts.tool_calls.get(item_type, 0)
        requests = {"num_model_requests": counts.tool_requests.get(item_type, 0)} if with_requests else {}
        return {name: calls, **requests} if calls else None

    return count


_count_images = _count_calls("image_generation_call", "images", with_requests=True)
_count_web_searches = _count_calls("web_search_call", "num_requests", with_requests=True)
_count_file_searches = _count_calls("file_search_call", "num_requests", with_requests=False)
_KINDS: Final = {
    "completions": _UsageKind(
        "completions",
        UsageQuery,
        _count_generated,
        "",
        ("api_key_id", "model", "user_id", "batch", "service_tier"),
    ),
    "decisions": _UsageKind(
        "decisions",
        UsageQuery,
        _count_decided,
        _DECISIONS,
        ("api_key_id", "model", "user_id", "batch", "service_tier"),
    ),
    "embeddings": _UsageKind("embeddings", UsageQuery, _count_embedded, _EMBEDDINGS),
    "moderations": _UsageKind("moderations", UsageQuery, _count_embedded, _MODERATIONS),
    "images": _UsageKind("images", ImagesUsageQuery, _count_images),
    "web_search_calls": _UsageKind("web_searches", WebSearchUsageQuery, _count_web_searches),
    "file_search_calls": _UsageKind(
        "file_searches", FileSearchUsageQuery, _count_file_searches, group_fields=("api_key_id", "user_id")
    ),
}
USAGE_ROUTES: Final = (
    *(
        Route("GET", f"/organization/usage/{name}", ADMINISTRATION, _list_usage(kind), query=kind.query)
        for name, kind in _KINDS.items()
    ),
    Route("GET", "/organization/costs", ADMINISTRATION, list_costs, query=CostsQuery),
)
REFUSED_USAGE_ROUTES: Final = tuple(
    Route(
        "GET",
        f"/organization/usage/{name}",
        ADMINISTRATION,
        refuse_route(partial(_uncounted_error, name, reason)),
    )
    for name, reason in _UNCOUNTED.items()
)


def _find_page(query: UsageQuery | CostsQuery, width: Literal["1h", "1d"], most: int) -> _Page:
    """Return the page of buckets that a query is about. Raises InvalidRequest."""
    width_s = _WIDTHS_S[width]
    count = query.limit or _DEFAULT_BUCKETS[width]
    if count > most:
        raise InvalidRequest(
            f"'limit' is at most {most} buckets of {width}.", param="limit", code="integer_above_max_value"
        )
    range_end = query.end_time or int(time.time()) + 1
    start = int(query.page) if query.page else query.start_time
    start -= start % width_s
    end = max(start, min(start + count * width_s, -(-range_end // width_s) * width_s))
    return _Page(range(start, end, width_s), query.start_time, range_end)


def _group_fields(kind: _UsageKind, group: UsageSubject, query: UsageQuery) -> JsonObject:
    values: JsonObject = {
        "api_key_id": group.key_id or None,
        "model": group.model or None,
        "user_id": None,
        "batch": group.is_batch if "batch" in query.group_by else None,
        "service_tier": group.service_tier or None,
    }
    return {"project_id": group.project_id or None, **{name: values[name] for name in kind.group_fields}}
