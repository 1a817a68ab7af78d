"""The cache of turns: bounded, and shared by tenants."""

import math
import tracemalloc

import msgspec

from apis.wire.base import value_to_kept_json
from providers.responses.store.history_cache import (
    CachedTurn,
    HistoryCache,
    LoadedHistory,
    StoredTurn,
    TurnPosition,
)


def turn(size: int) -> CachedTurn:
    return CachedTurn(
        LoadedHistory(),
        StoredTurn("r", 0.0, msgspec.Raw(b"x" * size), msgspec.Raw(b"")),
        TurnPosition("", 0),
    )


def test_a_tenant_that_fills_the_cache_evicts_its_own_turns() -> None:
    """One tenant made the unstored chains of all others unknown."""
    cache = HistoryCache(10_000, math.inf)
    for number in range(3):
        cache.put("quiet", f"q{number}", turn(100))
    for number in range(50):
        cache.put("loud", f"l{number}", turn(100))
    assert all(cache.get("quiet", f"q{number}") for number in range(3))
    assert [number for number in range(50) if cache.get("loud", f"l{number}")] == [*range(47, 50)]


def test_a_turn_that_is_too_large_for_the_cache_is_not_in_it() -> None:
    cache = HistoryCache(10_000, math.inf)
    cache.put("a", "small", turn(100))
    cache.put("b", "large", turn(20_000))
    assert cache.get("b", "large") is None
    assert cache.get("a", "small") is not None


def test_replaced_and_discarded_turns_free_their_bytes() -> None:
    cache = HistoryCache(10_000, math.inf)
    for _ in range(20):
        cache.put("a", "same", turn(9_000))
    cache.discard("a", "same")
    cache.discard("a", "same")
    cache.discard("b", None)
    cache.put("a", "x", turn(3_000))
    cache.put("a", "y", turn(3_000))
    assert cache.get("a", "x") is not None
    assert cache.get("a", "y") is not None


def test_many_small_turns_take_no_more_memory_than_the_cache_may() -> None:
    """A worker grew by 5 KiB with each stored response, far beyond the limit: only the bytes of items were counted, and
    the JSON of each item kept a buffer of 4 KiB."""
    limit_bytes = 4 * 1024 * 1024
    tracemalloc.start()
    try:
        cache = HistoryCache(limit_bytes, math.inf)
        for number in range(10_000):
            response_id = f"resp_{number:050}"
            input_items = value_to_kept_json([{"type": "message", "role": "user", "content": f"number {number}"}])
            answer = value_to_kept_json([{"type": "message", "role": "assistant", "content": f"answer {number}"}])
            stored = StoredTurn(response_id, float(number), msgspec.Raw(input_items), msgspec.Raw(answer))
            cache.put("a", response_id, CachedTurn(LoadedHistory(), stored, TurnPosition(response_id[5:], 0)))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert limit_bytes / 4 < used_bytes < limit_bytes
