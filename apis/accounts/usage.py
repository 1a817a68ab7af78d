"""Usage: the tokens, requests and tool calls of each project, key and model, hour by hour."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Self

import msgspec
from openai.types.responses import Response
from pydantic import Field

from apis.deltas import Usage, usage_from_wire
from apis.wire.base import Wire
from apis.wire.item_types import ITEM_TYPES

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


class UsageQuery(Wire):
    """Query of the usage in a range of time. Buckets begin at whole hours or days (UTC)."""

    start_time: int = Field(ge=0, le=2**40, strict=False)
    end_time: int | None = Field(default=None, ge=0, le=2**40, strict=False)
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[UsageGroup] = Field(default=[], max_length=5)
    project_ids: list[str] = Field(default=[], max_length=1000)
    api_key_ids: list[str] = Field(default=[], max_length=1000)
    models: list[str] = Field(default=[], max_length=1000)
    batch: bool | None = Field(default=None, strict=False)
    limit: int | None = Field(default=None, ge=1, le=168)
    page: str | None = Field(default=None, max_length=20, pattern=r"^\d+$")

    def of_key(self, project_id: str, key_id: str) -> Self:
        """Return the query for the usage of one key in place of those that it names."""
        return self.model_copy(update={"project_ids": [project_id], "api_key_ids": [key_id]})

    def admits(self, subject: UsageSubject) -> bool:
        """Return true if the filters admit the subject."""
        return (
            (not self.project_ids or subject.project_id in self.project_ids)
            and (not self.api_key_ids or subject.key_id in self.api_key_ids)
            and (not self.models or subject.model in self.models)
            and self.batch in (None, subject.is_batch)
        )

    def group(self, subject: UsageSubject) -> UsageSubject:
        """Return the subject by those of its fields that results are grouped by."""
        return UsageSubject(
            subject.project_id if "project_id" in self.group_by else "",
            subject.key_id if "api_key_id" in self.group_by else "",
            subject.model if "model" in self.group_by else "",
            service_tier=subject.service_tier if "service_tier" in self.group_by else "",
            is_batch=subject.is_batch and "batch" in self.group_by,
        )


class ImagesUsageQuery(UsageQuery):
    """Query of the usage of generated images."""


class WebSearchUsageQuery(UsageQuery):
    """Query of the usage of web searches."""


class FileSearchUsageQuery(UsageQuery):
    """Query of the usage of file searches."""


class CostsQuery(Wire):
    """Query of the costs in a range of time; a line item is a model."""

    start_time: int = Field(ge=0, le=2**40, strict=False)
    end_time: int | None = Field(default=None, ge=0, le=2**40, strict=False)
    bucket_width: Literal["1d"] = "1d"
    group_by: list[Literal["project_id", "api_key_id", "line_item"]] = Field(default=[], max_length=3)
    project_ids: list[str] = Field(default=[], max_length=1000)
    api_key_ids: list[str] = Field(default=[], max_length=1000)
    line_items: list[str] = Field(default=[], max_length=1000)
    limit: int | None = Field(default=None, ge=1, le=COSTS_MAX_BUCKETS)
    page: str | None = Field(default=None, max_length=20, pattern=r"^\d+$")

    def to_usage_query(self) -> UsageQuery:
        """Return the query of the usage that these are the costs of."""
        groups = ["model" if group == "line_item" else group for group in self.group_by]
        return UsageQuery.model_validate(
            {
                "start_time": self.start_time,
                "group_by": groups,
                "project_ids": self.project_ids,
                "api_key_ids": self.api_key_ids,
                "models": self.line_items,
            }
        )


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


def sum_by_group(entries: Iterable[UsageEntry], query: UsageQuery) -> dict[UsageSubject, UsageCounts]:
    """Return the sums of the entries that the query admits, by its groups."""
    sums: dict[UsageSubject, UsageCounts] = {}
    for entry in entries:
        if query.admits(entry.subject):
            group = query.group(entry.subject)
            sums[group] = sums.get(group, UsageCounts()).plus(entry.counts)
    return sums


def _add(counts: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + other.get(name, 0) for name in {**counts, **other}}
