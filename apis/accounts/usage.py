"""Usage: the tokens, requests and tool calls of each project, key and model, hour by hour."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from pydantic import Field

from apis.wire.base import Wire

HOUR_S: Final = 3600
MAX_BUCKETS: Final[Mapping[str, int]] = {"1h": 168, "1d": 31}
"""The most buckets of one page, by their width."""


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Sums over requests whose tokens are known. Cached tokens are a part of the input, reasoning of the output."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    tool_calls: dict[str, int] = field(default_factory=dict[str, int])
    """Calls of hosted tools by the type of their item, such as `web_search_call`."""

    def plus(self, other: Self) -> Self:
        """Return the sums of both."""
        return type(self)(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            dict(Counter(self.tool_calls) + Counter(other.tool_calls)),
        )


@dataclass(frozen=True, slots=True)
class UsageSubject:
    """Who used which model; empty fields stand for all of them."""

    project_id: str = ""
    key_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """The use by one subject in one hour, which begins at `start_time` (seconds of Unix time)."""

    start_time: int
    subject: UsageSubject
    counts: UsageCounts


class UsageQuery(Wire):
    """Query of the usage in a range of time. Buckets begin at whole hours or days (UTC)."""

    start_time: int = Field(ge=0, le=2**40, strict=False)
    end_time: int | None = Field(default=None, ge=0, le=2**40, strict=False)
    bucket_width: Literal["1h", "1d"] = "1d"
    group_by: list[Literal["project_id", "api_key_id", "model"]] = Field(default=[], max_length=3)
    project_ids: list[str] = Field(default=[], max_length=1000)
    api_key_ids: list[str] = Field(default=[], max_length=1000)
    models: list[str] = Field(default=[], max_length=1000)
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
        )

    def group(self, subject: UsageSubject) -> UsageSubject:
        """Return the subject by those of its fields that results are grouped by."""
        return UsageSubject(
            subject.project_id if "project_id" in self.group_by else "",
            subject.key_id if "api_key_id" in self.group_by else "",
            subject.model if "model" in self.group_by else "",
        )


def sum_by_group(entries: Iterable[UsageEntry], query: UsageQuery) -> dict[UsageSubject, UsageCounts]:
    """Return the sums of the entries that the query admits, by its groups."""
    sums: dict[UsageSubject, UsageCounts] = {}
    for entry in entries:
        if query.admits(entry.subject):
            group = query.group(entry.subject)
            sums[group] = sums.get(group, UsageCounts()).plus(entry.counts)
    return sums


class UsageLog(ABC):
    """Sums of what was used, in the store: shared by all workers, and lost of a killed process for a second at most."""

    @abstractmethod
    def add(self, subject: UsageSubject, counts: UsageCounts) -> None:
        """Add to the sums of this hour. Returns at once; the store is written within a second."""

    @abstractmethod
    async def read(self, start_time: int, end_time: int) -> list[UsageEntry]:
        """Return the entries of the hours from `start_time` on and before `end_time`, oldest first."""
