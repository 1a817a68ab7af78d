"""UseCounter: the use of one subject in the current minute, day and month, and its responses in progress."""

import time
from datetime import UTC, datetime
from typing import Final, Self

import msgspec

from apis.accounts.charges import Amounts, ReservedPart
from apis.accounts.limits import NANOS, NO_LIMIT, RateLimit
from apis.errors import QuotaExceeded, RateLimited, TokenRateLimited

MINUTE_S: Final = 60
_DAY_S: Final = 86_400


class Windows(msgspec.Struct, frozen=True):
    """The current windows by number: the minutes and days since 1970, and the months since the year 0."""

    minute: int
    day: int
    month: int

    @classmethod
    def at(cls, seconds: float) -> Self:
        """Return the windows of a moment in seconds of Unix time."""
        date = datetime.fromtimestamp(seconds, UTC)
        return cls(int(seconds) // MINUTE_S, int(seconds) // _DAY_S, date.year * 12 + date.month - 1)


class UseCounter(msgspec.Struct, frozen=True, omit_defaults=True):
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

    @classmethod
    def reserve(cls, windows: Windows, amounts: Amounts, *, is_background: bool) -> Self:
        """Return the reservation of one request."""
        return cls._of_request(windows, amounts, int(not is_background), int(is_background))

    @classmethod
    def of_part(cls, part: ReservedPart, *, is_background: bool) -> Self:
        """Return the reservation that a part of a charge is."""
        return cls.reserve(_windows_of(part), part.amounts, is_background=is_background)

    @classmethod
    def of_use(cls, part: ReservedPart, used: Amounts) -> Self:
        """Return the use with which one request ended, in the windows in which it was admitted."""
        return cls._of_request(_windows_of(part), used, 0, 0)

    @classmethod
    def _of_request(cls, windows: Windows, amounts: Amounts, concurrent: int, background: int) -> Self:
        tokens = amounts.tokens
        return cls(windows, 1, tokens, 1, tokens, tokens, amounts.tool_calls, amounts.cost, concurrent, background)

    @property
    def amounts(self) -> Amounts:
        """The amounts of a reservation."""
        return Amounts(self.month_tokens, self.day_tool_calls, self.month_cost)

    def to_part(self, counter_key: str) -> ReservedPart:
        """Return the part of a charge that the reservation is."""
        return ReservedPart(counter_key, self.amounts, self.windows.minute, self.windows.day, self.windows.month)

    def advance(self, now: Windows) -> Self:
        """Return the counter in the windows of now. A clock that is slow stays in the later window."""
        windows = self.windows
        if now == windows:
            return self
        later = Windows(max(windows.minute, now.minute), max(windows.day, now.day), max(windows.month, now.month))
        return type(self)(later).plus(self)

    def plus(self, other: "UseCounter", factor: int = 1) -> Self:
        """Return the sum, with `other` times `factor`. What it counts in windows that are not those of this counter is
        left out."""
        own, windows = self.windows, other.windows
        minute = factor if own.minute == windows.minute else 0
        day = factor if own.day == windows.day else 0
        month = factor if own.month == windows.month else 0
        return type(self)(
            own,
            self.minute_requests + minute * other.minute_requests,
            self.minute_tokens + minute * other.minute_tokens,
            self.day_requests + day * other.day_requests,
            self.day_tokens + day * other.day_tokens,
            self.month_tokens + month * other.month_tokens,
            self.day_tool_calls + day * other.day_tool_calls,
            self.month_cost + month * other.month_cost,
            self.concurrent_responses + factor * other.concurrent_responses,
            self.background_responses + factor * other.background_responses,
        )

    def minus(self, other: "UseCounter") -> Self:
        """Return the difference as `plus` does the sum, except that no amount of it is below zero."""
        difference = self.plus(other, -1)
        amounts = msgspec.structs.astuple(difference)[1:]
        return difference if min(amounts) >= 0 else type(self)(self.windows, *(max(0, each) for each in amounts))

    def fits(self, room: "UseCounter", limit: RateLimit) -> bool:
        """Return true if no amount that the limit bounds exceeds that of `room`."""
        # written out, because this is on the path of each request
        return (
            (limit.minute_requests is None or self.minute_requests <= room.minute_requests)
            and (limit.minute_tokens is None or self.minute_tokens <= room.minute_tokens)
            and (limit.day_requests is None or self.day_requests <= room.day_requests)
            and (limit.day_tokens is None or self.day_tokens <= room.day_tokens)
            and (limit.month_tokens is None or self.month_tokens <= room.month_tokens)
            and (limit.day_tool_calls is None or self.day_tool_calls <= room.day_tool_calls)
            and (limit.month_cost is None or self.month_cost <= room.month_cost)
            and (limit.concurrent_responses is None or self.concurrent_responses <= room.concurrent_responses)
            and (limit.background_responses is None or self.background_responses <= room.background_responses)
        )

    def find_free(self, limit: RateLimit, requested: "UseCounter", share: int) -> Self:
        """Return the part of `requested`, the sum of some requests, that the limit bounds, and of it no more than a
        `share`th of what is free; nothing if that is less than one of the requests."""
        bounds = {name: most for name in _AMOUNTS if (most := getattr(limit, name)) is not None}
        free = {
            name: max(0, min(getattr(requested, name), (most - getattr(self, name)) // share))
            for name, most in bounds.items()
        }
        if any(amount * requested.day_requests < getattr(requested, name) for name, amount in free.items()):
            free = {}
        return type(self)(self.windows, **free)

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
        minute_end, day_end = (self.windows.minute + 1) * MINUTE_S, (self.windows.day + 1) * _DAY_S
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


_AMOUNTS: Final = tuple(name for name in UseCounter.__struct_fields__ if name != "windows")
"""The fields that a limit of the same name bounds."""


def _windows_of(part: ReservedPart) -> Windows:
    return Windows(part.minute, part.day, part.month)


def add_headers(headers: dict[str, str], limit: RateLimit, total: UseCounter) -> None:
    """Add OpenAI's headers about the minute (limit, rest, and the time until the window ends), unless those of another
    limit with a smaller rest are there. `total` is the use under this limit."""
    for unit, most, used in (
        ("requests", limit.minute_requests, total.minute_requests),
        ("tokens", limit.minute_tokens, total.minute_tokens),
    ):
        if most is None or most >= NO_LIMIT:
            continue
        rest, other = max(0, most - used), headers.get(f"x-ratelimit-remaining-{unit}")
        if other is None or rest < int(other):
            headers[f"x-ratelimit-limit-{unit}"] = str(most)
            headers[f"x-ratelimit-remaining-{unit}"] = str(rest)
            reset_s = max(0, (total.windows.minute + 1) * MINUTE_S - int(time.time()))
            headers[f"x-ratelimit-reset-{unit}"] = f"{reset_s}s"


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
