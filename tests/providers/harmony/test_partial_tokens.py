"""PartialTokens: the ids of tokens that end within a character, from their text and their number."""

import random

import pytest

from providers.inference.harmony.partial_tokens import PartialTokens
from providers.inference.harmony.vocabulary import load_vocabulary


@pytest.fixture(scope="module")
def partial_tokens() -> PartialTokens:
    return PartialTokens(load_vocabulary())


def is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def steps(ids: list[int]) -> list[tuple[str, int, int]]:
    """Return what an engine sends that waits for whole characters: text, number of tokens before the last, the last."""
    vocabulary = load_vocabulary()
    sent: list[tuple[str, int, int]] = []
    waiting, count = b"", 0
    for token in ids:
        waiting += vocabulary.decode_bytes(token)
        if is_whole(waiting):
            sent.append((waiting.decode(), count, token))
            waiting, count = b"", 0
        else:
            count += 1
    assert not waiting
    return sent


def test_every_character_is_found_again(partial_tokens: PartialTokens) -> None:
    """Characters of all planes, as the tokenizer writes them."""
    chance = random.Random(3)
    vocabulary = load_vocabulary()
    planes = [(0x80, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x1FFFF), (0x20000, 0x2FFFF), (0xE0000, 0x10FFFF)]
    partial = 0
    for _ in range(2_000):
        ids = vocabulary.encode("".join(chr(chance.randint(*chance.choice(planes))) for _ in range(3)) + " x")
        for text, count, last in steps(ids):
            if count:
                partial += 1
                ids_found = partial_tokens.find_ids(text, count, last)
                assert ids_found[-1] == last
                assert b"".join(map(vocabulary.decode_bytes, ids_found)).decode() == text
                assert len(ids_found) == count + 1
    assert partial > 1_000


def test_an_unusual_way_to_write_a_character_has_its_bytes_and_number(partial_tokens: PartialTokens) -> None:
    """One byte for each token, which the tokenizer itself would join."""
    vocabulary = load_vocabulary()
    single = {vocabulary.decode_bytes(token): token for token in range(256)}
    for text in ("é", "龘", "\U0001fae0"):
        ids = [single[bytes([byte])] for byte in text.encode()]
        assert partial_tokens.find_ids(text, len(ids) - 1, ids[-1]) == ids


def test_text_with_replacement_characters_keeps_its_last_token(partial_tokens: PartialTokens) -> None:
    (last,) = load_vocabulary().encode(" x")
    ids = partial_tokens.find_ids("\ufffd\ufffd x", 2, last)
    assert ids[-1] == last
    assert b"".join(map(load_vocabulary().decode_bytes, ids)).decode() == "\ufffd\ufffd x"
