"""Chunks: bounded, overlapping, ending where sentences end, and together the whole text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from providers.reader.chunks import count_tokens, find_chunks

PROSE = " ".join(f"This is sentence number {i} of a longer text." for i in range(400))


def split(text: str, max_tokens: int, overlap_tokens: int) -> list[str]:
    return [text[start:end] for start, end in find_chunks(text, max_tokens, overlap_tokens)]


@settings(max_examples=100)
@given(st.text(max_size=3000), st.integers(100, 200))
def test_chunks_hold_the_whole_text_in_order_and_in_bounds(text: str, size: int) -> None:
    chunks = split(text, size, 0)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    overlapping = split(text, size, size // 2)
    assert len(overlapping) >= len(chunks)
    for chunk in (*chunks, *overlapping):
        assert chunk == chunk.strip()
        assert chunk in text
        # What is cut off at its ends may make the rest fall into other pieces.
        assert count_tokens(chunk) <= size + 1


def test_chunks_cover_and_overlap() -> None:
    chunks = split(PROSE, 200, 100)
    places = [PROSE.index(chunk) for chunk in chunks]
    assert places == sorted(set(places))
    assert places[0] == 0
    assert PROSE.endswith(chunks[-1])
    for (begin, chunk), after in zip(zip(places, chunks, strict=True), places[1:], strict=False):
        assert begin < after <= begin + len(chunk)
        shared = count_tokens(PROSE[after : begin + len(chunk)])
        assert 90 <= shared <= 101
    assert all(chunk.endswith(".") for chunk in chunks)


@pytest.mark.parametrize("text", ["", " \n ", "\u2028"])
def test_nothing_gives_no_chunk(text: str) -> None:
    assert split(text, 100, 50) == []


def test_short_text_is_one_chunk() -> None:
    assert split(" short \n", 800, 400) == ["short"]


def test_a_text_without_spaces_is_cut_all_the_same() -> None:
    for text in ("x" * 100_000, "鯨" * 10_000, "=" * 50_000, "1" * 20_000):
        chunks = split(text, 800, 400)
        assert len(chunks) > 5
        assert max(map(count_tokens, chunks)) <= 801


@pytest.mark.parametrize("char", [" ", "\t", "\n", "x", "1", "_", "(", "\\", "\x1b", "【", "鯨"])
@pytest.mark.parametrize("tail", ["", "a"])
def test_a_run_of_one_character_takes_linear_time(char: str, tail: str) -> None:
    """Half a million of one character are split within the time of a few thousand matches of the old pattern."""
    began = time.process_time()
    split(f"a{char * 500_000}{tail}", 800, 400)
    assert time.process_time() - began < 3


def test_the_estimate_is_near_the_truth() -> None:
    english = "The sea was calm, and the captain looked at the horizon for a long time before he said anything."
    assert 0.85 < count_tokens(english) / 21 < 1.15
