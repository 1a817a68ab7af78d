"""The queries of listings, of usage and of costs, and the change of a limit, which only an organization has."""

from typing import Literal, Self

from pydantic import BaseModel, Field

from apis.accounts.limits import NO_BYTES_LIMIT, NO_LIMIT
from apis.accounts.usage import COSTS_MAX_BUCKETS, UsageGroup, UsageSubject
from apis.wire.base import Wire


class AccountPage(BaseModel):
    """Query of a listing, oldest first."""

    after: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=20, ge=1, le=100)


class UpdateRateLimit(Wire):
    """Body that sets a limit; absent fields stay as they are. The last six are extensions of OpenAI's API."""

    max_requests_per_1_minute: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_minute: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_requests_per_1_day: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_day: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_month: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tool_calls_per_1_day: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_concurrent_responses: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_background_responses: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_stored_bytes: int | None = Field(default=None, ge=0, le=NO_BYTES_LIMIT)


class RateLimitPage(AccountPage):
    """Query of the listing of a project's limits."""

    limit: int = Field(default=100, ge=1, le=100)
    before: str | None = Field(default=None, max_length=256)


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
