"""Figures of a run, in memory that does not grow with it: distributions of times, counts, errors by kind."""

import math
from collections import Counter
from typing import Any, Final

_LOWEST_S: Final = 1e-6
_BUCKETS_PER_FACTOR_E: Final = 50
"""Buckets for a factor of e: each is 2 % wide, and so is the error of a quantile."""
_BUCKET_COUNT: Final = int(math.log(1e5 / _LOWEST_S) * _BUCKETS_PER_FACTOR_E) + 2
_MAX_ERROR_KINDS: Final = 32
_OTHER_ERRORS: Final = "other errors"


class Distribution:
    """Distribution of times from a microsecond to a day; 10 KiB for any number of times."""

    __slots__ = ("_buckets", "count", "highest_s", "sum_s")

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKET_COUNT
        self.count = 0
        self.sum_s = 0.0
        self.highest_s = 0.0

    def record(self, seconds: float) -> None:
        at = 0 if seconds <= _LOWEST_S else int(math.log(seconds / _LOWEST_S) * _BUCKETS_PER_FACTOR_E) + 1
        self._buckets[at if at < _BUCKET_COUNT else -1] += 1
        self.count += 1
        self.sum_s += seconds
        self.highest_s = max(self.highest_s, seconds)

    def quantile_s(self, share: float) -> float | None:
        """Return the time that `share` of the counted ones do not exceed, within 2 %; None if there are none."""
        rank = math.ceil(self.count * share)
        seen_count = 0
        for at, count in enumerate(self._buckets):
            seen_count += count
            if count and seen_count >= rank:
                return min(self.highest_s, _LOWEST_S * math.exp(at / _BUCKETS_PER_FACTOR_E))
        return None

    def to_json(self) -> dict[str, Any] | None:
        """Return the figures in milliseconds; None if nothing was counted."""
        if not self.count:
            return None
        quantiles = {f"p{share * 100:g}": self.quantile_s(share) for share in (0.5, 0.9, 0.99)}
        figures = {**quantiles, "mean": self.sum_s / self.count, "max": self.highest_s}
        return {name: round((seconds or 0.0) * 1e3, 3) for name, seconds in figures.items()}


class RequestFailed(Exception):
    """A request of the load did not succeed; `kind` is what it is counted as."""

    def __init__(self, kind: str, message: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message or kind)
        self.kind = kind
        self.message = message or kind
        self.retry_after_s = retry_after_s


class Tally:
    """Counts of one run."""

    def __init__(self) -> None:
        self.responses = 0
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.errors: Counter[str] = Counter()
        self.first_token = Distribution()
        self.inter_token = Distribution()
        self.whole = Distribution()

    def count_response(self, usage: dict[str, Any] | None) -> None:
        """Count a response that ended as `completed` or `incomplete`, with the `usage` of its object."""
        self.responses += 1
        if usage:
            self.input_tokens += int(usage.get("input_tokens") or 0)
            self.output_tokens += int(usage.get("output_tokens") or 0)
            details: Any = usage.get("input_tokens_details") or {}
            self.cached_tokens += int(details.get("cached_tokens") or 0)

    def count_error(self, kind: str, count: int = 1) -> None:
        if kind not in self.errors and len(self.errors) >= _MAX_ERROR_KINDS:
            kind = _OTHER_ERRORS
        self.errors[kind] += count
