"""Limits: how much a project, one of its keys or one of its models may use in a time, and at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WHOLE_PROJECT: Final = "*"
"""Subject of the limit of all of a project's requests together."""
KEY_SUBJECT_PREFIX: Final = "key:"
"""Before the id of a key, the subject of that key's requests; any other subject is a model."""
ORGANIZATION: Final = "@organization"
"""Subject of the limit of all projects together, which is of money only."""
NO_LIMIT: Final = 1_000_000_000
"""Number that stands for no limit where OpenAI's objects require one."""
NO_BYTES_LIMIT: Final = 2**53
"""Number of bytes that stands for no limit."""
NANOS: Final = 1_000_000_000
"""Parts of one unit of the currency in which costs are counted, so that sums are exact."""
NANOS_PER_CENT: Final = NANOS // 100


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The most of one subject in a minute, day or month of the clock (UTC), and of responses at a time; None is no
    bound. `month_cost` is in NANOS of the currency; `stored_bytes` are of the whole project only."""

    minute_requests: int | None = None
    minute_tokens: int | None = None
    day_requests: int | None = None
    day_tokens: int | None = None
    month_tokens: int | None = None
    day_tool_calls: int | None = None
    concurrent_responses: int | None = None
    background_responses: int | None = None
    stored_bytes: int | None = None
    month_cost: int | None = None


LIMIT_FIELDS: Final[Mapping[str, str]] = {
    "max_requests_per_1_minute": "minute_requests",
    "max_tokens_per_1_minute": "minute_tokens",
    "max_requests_per_1_day": "day_requests",
    "max_tokens_per_1_day": "day_tokens",
    "max_tokens_per_1_month": "month_tokens",
    "max_tool_calls_per_1_day": "day_tool_calls",
    "max_concurrent_responses": "concurrent_responses",
    "max_background_responses": "background_responses",
    "max_stored_bytes": "stored_bytes",
}
"""The fields of RateLimit by their names in the API; money has objects of its own."""


def is_model_subject(subject: str) -> bool:
    """Return true if a limit of this subject is one of a model. No model is reached by the name of another subject."""
    return subject not in (WHOLE_PROJECT, ORGANIZATION) and not subject.startswith(KEY_SUBJECT_PREFIX)


def unbounded_value(field: str) -> int:
    """Return the number that stands for no bound of a field of RateLimit."""
    return NO_BYTES_LIMIT if field == "stored_bytes" else NO_LIMIT
