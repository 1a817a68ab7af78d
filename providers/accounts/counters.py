"""UseCounter: the use of one subject in the current minute, day and month, and its responses in progress."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from apis.accounts.charges import Amounts, ReservedPart
from apis.accounts.limits import NANOS, NO_LIMIT, RateLimit
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
    """Use within the windows; amounts are those used and those reserved. The last two count the responses that have
    begun and not ended."""

    windows: Windows
    minute_requests: int = 0
    minute_tokens: int = 0
    day_requests: int = 0
    day_tokens: int = 0
    month_tokens: int = 0
    day_tool_calls: int = 0
    month_cost: int = 0
    concurrent_responses: int = 0
    background_responses: int = 0

    def advance(self, now: Windows) -> Self:
        """Return the counter in the windows of now. A clock that is slow stays in the later window."""
        if now == self.windows:
            return self
        windows = Windows(
            max(self.windows.minute, now.minute),
            max(self.windows.day, now.day),
            max(self.windows.month, now.month),
        )
        same_minute, same_day = windows.minute == self.windows.minute, windows.day == self.windows.day
        same_month = windows.month == self.windows.month
        return replace(
            self,
            windows=windows,
            minute_requests=self.minute_requests if same_minute else 0,
            minute_tokens=self.minute_tokens if same_minute else 0,
            day_requests=self.day_requests if same_day else 0,
            day_tokens=self.day_tokens if same_day else 0,
            month_tokens=self.month_tokens if same_month else 0,
            day_tool_calls=self.day_tool_calls if same_day else 0,
            month_cost=self.month_cost if same_month else 0,
        )

    def begin(self, amounts: Amounts, *, is_background: bool) -> Self:
        """Return the counter after a request began."""
        return replace(
            self,
            minute_requests=self.minute_requests + 1,
            minute_tokens=self.minute_tokens + amounts.tokens,
            day_requests=self.day_requests + 1,
            day_tokens=self.day_tokens + amounts.tokens,
            month_tokens=self.month_tokens + amounts.tokens,
            day_tool_calls=self.day_tool_calls + amounts.tool_calls,
            month_cost=self.month_cost + amounts.cost,
            concurrent_responses=self.concurrent_responses + (not is_background),
            background_responses=self.background_responses + is_background,
        )

    def reserve(self, subject: str, amounts: Amounts) -> ReservedPart:
        """Return the part of a charge that these amounts are, in the windows of this counter."""
        return ReservedPart(subject, amounts, self.windows.minute, self.windows.day, self.windows.month)

    def end(self, *, is_background: bool) -> Self:
        """Return the counter with one response fewer in progress."""
        return replace(
            self,
            concurrent_responses=max(0, self.concurrent_responses - (not is_background)),
            background_responses=max(0, self.background_responses - is_background),
        )

    def settle(self, part: ReservedPart, used: Amounts, reserved: Amounts) -> Self:
        """Return the counter with `used` instead of `reserved`, in those windows in which the part was reserved."""
        tokens, calls, cost = (
            used.tokens - reserved.tokens,
            used.tool_calls - reserved.tool_calls,
            used.cost - reserved.cost,
        )
        in_day, in_month = part.day == self.windows.day, part.month == self.windows.month
        return replace(
            self,
            minute_tokens=max(0, self.minute_tokens + tokens * (part.minute == self.windows.minute)),
            day_tokens=max(0, self.day_tokens + tokens * in_day),
            month_tokens=max(0, self.month_tokens + tokens * in_month),
            day_tool_calls=max(0, self.day_tool_calls + calls * in_day),
            month_cost=max(0, self.month_cost + cost * in_month),
        )

    def require_room(self, limit: RateLimit, amounts: Amounts, subject: str, *, is_background: bool) -> None:
        """Raise RateLimited or QuotaExceeded if one more request of these amounts exceeds the limit."""
        self._require_budget(limit, amounts, subject)
        running, most, name = (
            (self.background_responses, limit.background_responses, "background_responses")
            if is_background
            else (self.concurrent_responses, limit.concurrent_responses, "concurrent_responses")
        )
        if most is not None and running >= most:
            raise RateLimited(
                f"Rate limit reached for {subject} on {name.replace('_', ' ')} (`max_{name}`): limit {most}, "
                f"{running} are in progress. Try again when one has ended.",
                retry_after_s=1,
            )
        minute_end, day_end = (self.windows.minute + 1) * _MINUTE_S, (self.windows.day + 1) * _DAY_S
        for used, most, unit, window_end in (
            (self.day_requests + 1, limit.day_requests, "requests per day", day_end),
            (self.minute_requests + 1, limit.minute_requests, "requests per min", minute_end),
            (self.day_tokens + amounts.tokens, limit.day_tokens, "tokens per day", day_end),
            (self.minute_tokens + amounts.tokens, limit.minute_tokens, "tokens per min", minute_end),
        ):
            if most is not None and used > most:
                raise _window_error(subject, unit, f"limit {most}, this request would be {used}", window_end)
        most_calls = limit.day_tool_calls
        if most_calls is not None and amounts.tool_calls and self.day_tool_calls + amounts.tool_calls > most_calls:
            counts = f"limit {most_calls}, {self.day_tool_calls} are used or reserved"
            raise _window_error(subject, "tool calls per day", counts, day_end)

    def _require_budget(self, limit: RateLimit, amounts: Amounts, subject: str) -> None:
        if limit.month_tokens is not None and self.month_tokens + amounts.tokens > limit.month_tokens:
            raise QuotaExceeded(
                f"The budget of {subject} is {limit.month_tokens} tokens a month, and {self.month_tokens} are used or "
                "reserved. Ask the administrator of this server for more."
            )
        if limit.month_cost is not None and self.month_cost + amounts.cost > limit.month_cost:
            raise QuotaExceeded(
                f"The budget of {subject} is {limit.month_cost / NANOS:.2f} a month, and "
                f"{self.month_cost / NANOS:.4f} are spent or reserved. Ask the administrator of this server for more."
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


def cap_amounts(limit: RateLimit, requested: Amounts) -> Amounts:
    """Return the amounts to reserve: no more than the smallest limit, so that a large request needs an empty window."""
    token_bounds = [most for most in (limit.minute_tokens, limit.day_tokens, limit.month_tokens) if most is not None]
    cost = requested.cost if limit.month_cost is None else min(requested.cost, limit.month_cost)
    return Amounts(
        max(1, min([requested.tokens, *token_bounds])), requested.tool_calls, max(cost, int(requested.cost > 0))
    )


def _window_error(subject: str, unit: str, counts: str, window_end: int) -> RateLimited:
    wait_s = max(1.0, window_end - time.time())
    error_type = TokenRateLimited if unit.startswith("tokens") else RateLimited
    return error_type(
        f"Rate limit reached for {subject} on {unit}: {counts}. Please try again in {wait_s:.0f}s.",
        retry_after_s=wait_s,
    )
