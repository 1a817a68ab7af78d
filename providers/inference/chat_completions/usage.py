"""Counts of tokens as servers report them: each becomes a whole number that every client can read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.deltas import Usage

MAX_COUNT: Final = 2**31 - 1
"""The largest count that is passed on. Sums over the turns of a response stay exact in a client's JSON numbers."""
_MAX_DIGITS: Final = 32
# Names of the counts, in the order in which they are looked for: those of chat completions come first.
_INPUT: Final = ("prompt_tokens", "input_tokens", "prompt_eval_count")
_OUTPUT: Final = ("completion_tokens", "output_tokens", "predicted_n", "eval_count")
_CACHED: Final = (
    *("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"),
    *("prompt_cache_hit_tokens", "cached_tokens", "cache_n"),
)
_REASONING: Final = (
    *("completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens"),
    "reasoning_tokens",
)


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
    """Return the usage that a server reports, by any of the names that are in use. The details are parts of their
    totals, so they are at most these."""
    usage = _as_mapping(value)
    input_tokens, output_tokens = _find_count(usage, _INPUT), _find_count(usage, _OUTPUT)
    cached_tokens, reasoning_tokens = _find_count(usage, _CACHED), _find_count(usage, _REASONING)
    if "prompt_n" in usage:  # the timings of llama.cpp count what was computed
        input_tokens = parse_count(usage["prompt_n"]) + cached_tokens
    return Usage(input_tokens, output_tokens, min(cached_tokens, input_tokens), min(reasoning_tokens, output_tokens))


def find_usage(usage: object, x_groq: object, timings: object) -> object:
    """Return the usage of a chunk, from the first of its places that has one."""
    return usage or _as_mapping(x_groq).get("usage") or timings


def _find_count(usage: Mapping[str, Any], paths: Sequence[str]) -> int:
    """Return the first count that is there; a name after a dot is within an object."""
    for path in paths:
        outer, _, inner = path.partition(".")
        value = usage.get(outer)
        if (count := _as_mapping(value).get(inner) if inner else value) is not None:
            return parse_count(count)
    return 0


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType] - read as it is
