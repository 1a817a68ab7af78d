"""UseCounter: the requests and tokens of one subject in the current minute, day and month."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from apis.accounts.limits import NO_LIMIT, RateLimit
from apis.errors import QuotaExceeded, RateLimited, TokenRateLimited

_MINUTE_S: Final = 60
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Windows:
    """The current windows by number: the minutes and days since 1970, and the months since the year 0."""

    minute: int
    day: int
    month: int

    @classmethod
    def at(cls, seconds: float) -> Self:
        """Return the windows of a moment in seconds of Unix time."""
        date = datetime.fromtimestamp(seconds, UTC)
        return cls(int(seconds) // _MINUTE_S, int(seconds) // _DAY_S, date.year * 12 + date.month - 1)


@dataclass(frozen=True, slots=True)
class UseCounter:
    """Use within the windows; tokens are those used and those reserved."""

    windows: Windows
    minute_requests: int = 0
    minute_tokens: int = 0
    day_requests: int = 0
    day_tokens: int = 0
    month_tokens: int = 0

    def advance(self, now: Windows) -> Self:
        """Return the counter in the windows of now. A clock that is slow stays in the later window."""
        windows = Windows(
            max(self.windows.minute, now.minute),
            max(self.windows.day, now.day),
            max(self.windows.month, now.month),
        )
        same_minute, same_day = windows.minute == self.windows.minute, windows.day == self.windows.day
        return replace(
            self,
            windows=windows,
            minute_requests=self.minute_requests if same_minute else 0,
            minute_tokens=self.minute_tokens if same_minute else 0,
            day_requests=self.day_requests if same_day else 0,
            day_tokens=self.day_tokens if same_day else 0,
            month_tokens=self.month_tokens if windows.month == self.windows.month else 0,
        )

    def add(self, requests: int, tokens: int) -> Self:
        """Return the counter after a request."""
        return replace(
            self,
            minute_requests=self.minute_requests + requests,
            minute_tokens=self.minute_tokens + tokens,
            day_requests=self.day_requests + requests,
            day_tokens=self.day_tokens + tokens,
            month_tokens=self.month_tokens + tokens,
        )

    def settle(self, difference: int, reserved_in: Windows) -> Self:
        """Return the counter with `difference` tokens more or fewer in those windows in which they were reserved."""
        in_minute, in_day = reserved_in.minute == self.windows.minute, reserved_in.day == self.windows.day
        in_month = reserved_in.month == self.windows.month
        return replace(
            self,
            minute_tokens=max(0, self.minute_tokens + difference * in_minute),
            day_tokens=max(0, self.day_tokens + difference * in_day),
            month_tokens=max(0, self.month_tokens + difference * in_month),
        )

    def require_room(self, limit: RateLimit, tokens: int, subject: str) -> None:
        """Raise RateLimited or QuotaExceeded if one more request of so many tokens exceeds the limit."""
        if limit.month_tokens is not None and self.month_tokens + tokens > limit.month_tokens:
            raise QuotaExceeded(
                f"The budget of {subject} is {limit.month_tokens} tokens a month, and {self.month_tokens} are used or "
                "reserved. Ask the administrator of this server for more."
            )
        minute_end, day_end = (self.windows.minute + 1) * _MINUTE_S, (self.windows.day + 1) * _DAY_S
        for used, most, unit, window_end in (
            (self.day_requests + 1, limit.day_requests, "requests per day", day_end),
            (self.minute_requests + 1, limit.minute_requests, "requests per min", minute_end),
            (self.day_tokens + tokens, limit.day_tokens, "tokens per day", day_end),
            (self.minute_tokens + tokens, limit.minute_tokens, "tokens per min", minute_end),
        ):
            if most is not None and used > most:
                wait_s = max(1.0, window_end - time.time())
                error_type = TokenRateLimited if unit.startswith("tokens") else RateLimited
                raise error_type(
                    f"Rate limit reached for {subject} on {unit}: limit {most}, this request would be {used}. "
                    f"Please try again in {wait_s:.0f}s.",
                    retry_after_s=wait_s,
                )

    def headers(self, limit: RateLimit) -> dict[str, str]:
        """Return OpenAI's headers about the minute: limit, rest, and the time until the window ends."""
        reset = timedelta(seconds=max(0, (self.windows.minute + 1) * _MINUTE_S - int(time.time())))
        headers: dict[str, str] = {}
        for name, most, used in (
            ("requests", limit.minute_requests, self.minute_requests),
            ("tokens", limit.minute_tokens, self.minute_tokens),
        ):
            if most is not None and most < NO_LIMIT:
                headers[f"x-ratelimit-limit-{name}"] = str(most)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, most - used))
                headers[f"x-ratelimit-reset-{name}"] = f"{int(reset.total_seconds())}s"
        return headers


def cap_tokens(limit: RateLimit, requested_tokens: int) -> int:
    """Return the tokens to reserve: no more than the smallest limit, so that a large request needs an empty window."""
    bounds = [most for most in (limit.minute_tokens, limit.day_tokens, limit.month_tokens) if most is not None]
    return max(1, min([requested_tokens, *bounds]))
