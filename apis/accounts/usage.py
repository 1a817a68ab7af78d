"""Usage: the tokens, requests and tool calls of each project, key and model, hour by hour."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal, Self

import msgspec
from openai.types.responses import Response

from apis.deltas import Usage, usage_from_wire
from apis.wire.item_types import ITEM_TYPES

if TYPE_CHECKING:  # for the routes of an organization
    from apis.accounts.requests import UsageQuery

HOUR_S: Final = 3600
MAX_BUCKETS: Final[Mapping[str, int]] = {"1h": 168, "1d": 31}
"""The most buckets of one page, by their width."""
COSTS_MAX_BUCKETS: Final = 180


class UsageCounts(msgspec.Struct, frozen=True):
    """Sums over requests whose tokens are known. Cached tokens are a part of the input, reasoning of the output."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    tool_calls: dict[str, int] = {}
    """Calls of hosted tools by the type of their item, such as `web_search_call`."""
    tool_requests: dict[str, int] = {}
    """Requests with at least one such call, by the type of the item."""
    cost: int = 0
    """The price of all of it when it was counted, in NANOS of the currency."""

    def plus(self, other: Self) -> Self:
        """Return the sums of both."""
        return type(self)(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            _add(self.tool_calls, other.tool_calls),
            _add(self.tool_requests, other.tool_requests),
            self.cost + other.cost,
        )


class UsageSubject(msgspec.Struct, frozen=True):
    """Who used which model, and how; empty fields stand for all of them. `category` is `embeddings`, `decisions`,
    `moderations` or `images`, or empty for all requests that generate."""

    project_id: str = ""
    key_id: str = ""
    model: str = ""
    category: str = ""
    service_tier: str = ""
    is_batch: bool = False


class UsageEntry(msgspec.Struct, frozen=True):
    """The use by one subject in one hour, which begins at `start_time` (seconds of Unix time)."""

    start_time: int
    subject: UsageSubject
    counts: UsageCounts


UsageGroup = Literal["project_id", "api_key_id", "model", "batch", "service_tier"]


def count_hosted_calls(response: Response) -> dict[str, int]:
    """Return the numbers of calls of hosted tools by the type of their item."""
    calls = [item.type for item in response.output if ITEM_TYPES[item.type].counts(item)]
    return dict(Counter(calls)) if calls else {}


def count_one_request(usage: Usage, tool_calls: Mapping[str, int]) -> UsageCounts:
    """Return the counts of one request."""
    return UsageCounts(
        1,
        usage.input_tokens,
        usage.cached_tokens,
        usage.output_tokens,
        usage.reasoning_tokens,
        dict(tool_calls),
        dict.fromkeys(tool_calls, 1),
    )


def count_response(response: Response) -> UsageCounts:
    """Return the usage of one response that has ended."""
    if response.usage is None:
        return UsageCounts()
    return count_one_request(usage_from_wire(response.usage), count_hosted_calls(response))


def sum_by_group(entries: Iterable[UsageEntry], query: "UsageQuery") -> dict[UsageSubject, UsageCounts]:
    """Return the sums of the entries that the query admits, by its groups."""
    sums: dict[UsageSubject, UsageCounts] = {}
    for entry in entries:
        if query.admits(entry.subject):
            group = query.group(entry.subject)
            sums[group] = sums.get(group, UsageCounts()).plus(entry.counts)
    return sums


def _add(counts: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + other.get(name, 0) for name in {**counts, **other}}
