"""Limits: how many requests and tokens a project, one of its keys or one of its models may use in a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import Field

from apis.accounts.directory import AccountPage
from apis.wire.base import Wire

WHOLE_PROJECT: Final = "*"
"""Subject of the limit of all of a project's requests together."""
KEY_SUBJECT_PREFIX: Final = "key:"
"""Before the id of a key, the subject of that key's requests; any other subject is a model."""
NO_LIMIT: Final = 1_000_000_000
"""Number that stands for no limit where OpenAI's objects require one."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The most requests and tokens of one subject in a minute, day or month of the clock (UTC); None is no bound."""

    minute_requests: int | None = None
    minute_tokens: int | None = None
    day_requests: int | None = None
    day_tokens: int | None = None
    month_tokens: int | None = None


LIMIT_FIELDS: Final[Mapping[str, str]] = {
    "max_requests_per_1_minute": "minute_requests",
    "max_tokens_per_1_minute": "minute_tokens",
    "max_requests_per_1_day": "day_requests",
    "max_tokens_per_1_day": "day_tokens",
    "max_tokens_per_1_month": "month_tokens",
}
"""The fields of RateLimit by their names in the API."""


class UpdateRateLimit(Wire):
    """Body that sets a limit; absent fields stay as they are. The last two are extensions of OpenAI's API."""

    max_requests_per_1_minute: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_minute: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_requests_per_1_day: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_day: int | None = Field(default=None, ge=0, le=NO_LIMIT)
    max_tokens_per_1_month: int | None = Field(default=None, ge=0, le=NO_LIMIT)


class RateLimitPage(AccountPage):
    """Query of the listing of a project's limits."""

    limit: int = Field(default=100, ge=1, le=100)
    before: str | None = Field(default=None, max_length=256)


class Reservation(ABC):
    """Tokens that a request may use, taken from all limits that apply to it before it begins."""

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """The `x-ratelimit-*` headers of the limit with the smallest remaining share."""

    @abstractmethod
    def settle(self, tokens: int) -> None:
        """Replace the reserved tokens by those that were used. Returns at once; the store is written soon after. A
        reservation that is never settled counts in full."""


class Limiter(ABC):
    """Counts requests and tokens in the store, in one atomic step for all limits of a request and all workers."""

    @abstractmethod
    async def reserve(self, project_id: str, limits: Mapping[str, RateLimit], requested_tokens: int) -> Reservation:
        """Count one request and reserve tokens under each of `limits`, by subject. Where a limit of tokens is smaller
        than `requested_tokens`, all of it is reserved.

        Raises RateLimited or QuotaExceeded, with nothing counted, and StoreUnavailable.
        """

    @abstractmethod
    async def list_limits(self, project_id: str) -> Mapping[str, RateLimit]:
        """Return the limits of the project by their subjects. Raises NotFound."""

    @abstractmethod
    async def set_limit(self, project_id: str, subject: str, update: UpdateRateLimit) -> RateLimit:
        """Change the limit of a subject; it holds everywhere within MAX_KEY_AGE_S. Raises NotFound, and InvalidRequest
        for more limits than a project may have."""
