"""A sealed text comes back whole, and only to its owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.responses.context.sealing import TOKEN_PREFIX, Purpose, Sealer, UnsealError, generate_key

KEY = b"k" * 32
ANY_TEXT = st.text(st.characters(exclude_categories=()))


def reason(sealer: Sealer, token: str, tenant: str = "a", model: str = "m") -> str:
    with pytest.raises(UnsealError) as raised:
        sealer.unseal(token, tenant=tenant, model=model, purpose="reasoning")
    return raised.value.reason


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_what_was_sealed_is_opened(text: str, tenant: str, model: str) -> None:
    sealer = Sealer([KEY])
    token = sealer.seal(text, tenant=tenant, model=model, purpose="reasoning")
    assert sealer.unseal(token, tenant=tenant, model=model, purpose="reasoning") == text
    assert token.isascii()
    assert token.isprintable()


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_token_says_nothing(at: int, change: int) -> None:
    sealer = Sealer([KEY])
    token = sealer.seal("a thought", tenant="a", model="m", purpose="reasoning").encode()
    at %= len(token) - 3  # the last characters may carry bits that mean nothing
    changed = token[:at] + bytes([token[at] ^ change]) + token[at + 1 :]
    assert reason(sealer, changed.decode("latin-1"))
    assert reason(sealer, token[:at].decode())


@pytest.mark.parametrize(
    ("tenant", "model", "why"),
    [
        ("b", "m", "organization_mismatch"),
        ("a", "n", "model_mismatch"),
        ("am", "", "model_mismatch"),
        ("", "m", "organization_mismatch"),
    ],
)
def test_a_token_is_its_tenants_and_its_models(tenant: str, model: str, why: str) -> None:
    sealer = Sealer([KEY])
    assert reason(sealer, sealer.seal("a thought", tenant="a", model="m", purpose="reasoning"), tenant, model) == why


def test_a_key_is_retired_after_its_successor_has_come() -> None:
    old, new = generate_key(), generate_key()
    token = Sealer([old]).seal("a thought", tenant="a", model="m", purpose="reasoning")
    assert Sealer([new, old]).unseal(token, tenant="a", model="m", purpose="reasoning") == "a thought"
    assert reason(Sealer([new]), token) == "organization_mismatch"
    fresh = Sealer([new, old]).seal("a thought", tenant="a", model="m", purpose="reasoning")
    assert Sealer([new]).unseal(fresh, tenant="a", model="m", purpose="reasoning") == "a thought"


@pytest.mark.parametrize(
    "token",
    ["", TOKEN_PREFIX, f"{TOKEN_PREFIX}AAAA", "gAAAAABforeign", f"{TOKEN_PREFIX}ä", f"{TOKEN_PREFIX}{'A' * 200}"],
)
def test_what_is_foreign_says_nothing(token: str) -> None:
    assert reason(Sealer([KEY]), token) == "organization_mismatch"


def test_no_two_tokens_are_alike() -> None:
    sealer = Sealer([KEY])
    assert len({sealer.seal("a thought", tenant="a", model="m", purpose="reasoning") for _ in range(100)}) == 100


@pytest.mark.parametrize("keys", [[], [b"short"], [KEY, b""]])
def test_a_key_that_is_too_short_is_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(keys)


@pytest.mark.parametrize("purpose", ["compaction", "tool result"])
def test_a_token_is_of_one_purpose(purpose: Purpose) -> None:
    """Reasoning, compactions and tool results have keys of their own."""
    sealer = Sealer([KEY])
    token = sealer.seal("a thought", tenant="a", model="m", purpose=purpose)
    assert reason(sealer, token) == "organization_mismatch"
    assert sealer.unseal(token, tenant="a", model="m", purpose=purpose) == "a thought"
