"""Counts of tokens as servers report them: each becomes a whole number that every client can read."""

import math
from collections.abc import Mapping
from typing import Any, Final

from apis.deltas import Usage

MAX_COUNT: Final = 2**31 - 1
"""The largest count that is passed on. Sums over the turns of a response stay exact in a client's JSON numbers."""
_MAX_DIGITS: Final = 32


def parse_count(value: object) -> int:
    """Return a count between 0 and MAX_COUNT; 0 for anything that is not a number."""
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # noqa: PLR0124 - NaN
        return 0
    if isinstance(value, float) and not math.isfinite(value):
        return MAX_COUNT if value > 0 else 0
    return int(min(max(value, 0), MAX_COUNT))


def parse_usage(value: object) -> Usage:
    """Return the `usage` of a chunk. The details are parts of their totals, so they are at most these."""
    usage = _as_mapping(value)
    input_tokens = parse_count(usage.get("prompt_tokens"))
    output_tokens = parse_count(usage.get("completion_tokens"))
    cached_tokens = parse_count(_as_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    reasoning_tokens = parse_count(_as_mapping(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    return Usage(input_tokens, output_tokens, min(cached_tokens, input_tokens), min(reasoning_tokens, output_tokens))


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType] - read as it is
