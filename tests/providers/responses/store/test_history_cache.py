"""The cache of turns: bounded, and shared by tenants."""

import math

import msgspec

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
    """S18: one tenant made the unstored chains of all others unknown."""
    cache = HistoryCache(1000, math.inf)
    for number in range(3):
        cache.put("quiet", f"q{number}", turn(100))
    for number in range(50):
        cache.put("loud", f"l{number}", turn(100))
    assert all(cache.get("quiet", f"q{number}") for number in range(3))
    assert [number for number in range(50) if cache.get("loud", f"l{number}")] == [*range(43, 50)]


def test_a_turn_that_is_too_large_for_the_cache_is_not_in_it() -> None:
    cache = HistoryCache(1000, math.inf)
    cache.put("a", "small", turn(100))
    cache.put("b", "large", turn(2000))
    assert cache.get("b", "large") is None
    assert cache.get("a", "small") is not None


def test_replaced_and_discarded_turns_free_their_bytes() -> None:
    cache = HistoryCache(1000, math.inf)
    for _ in range(20):
        cache.put("a", "same", turn(900))
    cache.discard("a", "same")
    cache.discard("a", "same")
    cache.discard("b", None)
    cache.put("a", "x", turn(500))
    cache.put("a", "y", turn(500))
    assert cache.get("a", "x") is not None
    assert cache.get("a", "y") is not None
