"""The memo is bounded in tokens, forgets what was used longest ago, and takes the newest ids of a message."""

from providers.inference.harmony.token_cache import (
    ENTRY_OVERHEAD_TOKENS,
    TokenCache,
    call_to_key,
    name_to_recipient,
    text_to_key,
)


def test_the_cache_evicts_the_least_recently_used():
    a, b, d = (text_to_key("final", text) for text in "abd")
    memo = TokenCache(max_tokens=2 * (ENTRY_OVERHEAD_TOKENS + 3))
    memo.put(a, [1, 2, 3])
    memo.put(b, [4, 5, 6])
    assert list(memo.get(a) or ()) == [1, 2, 3]
    memo.put(d, [7, 8, 9])
    assert memo.get(b) is None
    assert memo.get(a) is not None
    assert memo.get(d) is not None


def test_the_newest_ids_of_a_message_count():
    key = text_to_key("final", "a")
    memo = TokenCache(max_tokens=ENTRY_OVERHEAD_TOKENS + 3)
    for _ in range(100):
        memo.put(key, [1, 2, 3])
    memo.put(key, [4])
    assert list(memo.get(key) or ()) == [4]


def test_a_message_larger_than_the_cache_is_not_stored_and_evicts_nothing():
    small, large = text_to_key("final", "a"), text_to_key("final", "b")
    memo = TokenCache(max_tokens=ENTRY_OVERHEAD_TOKENS + 3)
    memo.put(small, [1])
    memo.put(large, [1] * 100)
    assert memo.get(large) is None
    assert memo.get(small) is not None
    memo.put(small, [1] * 100)
    assert memo.get(small) is None


def test_the_models_own_tools_are_called_in_thought():
    assert call_to_key("python", "x", custom=True).channel == "analysis"
    assert call_to_key("browser.open", "{}", custom=False).content_type == "code"
    assert call_to_key("functions.f", "{}", custom=False).content_type == "<|constrain|>json"
    assert call_to_key("functions.f", "x", custom=True).content_type is None


def test_a_name_becomes_its_recipient():
    assert name_to_recipient("f", frozenset()) == "functions.f"
    assert name_to_recipient("crm.f", frozenset()) == "crm.f"
    assert name_to_recipient("python", frozenset()) == "functions.python"
    assert name_to_recipient("python", frozenset({"python"})) == "python"
    assert name_to_recipient("a b", frozenset()) == "functions.a_b"
