"""Citation marks in streamed text: found wherever the stream is cut, and nothing else touched."""

import random
import time

import pytest

from apis.tool_runtime import Source
from providers.responses.citations import CitationScanner

SOURCES = {
    1: Source("https://a.b/1", "One"),
    2: Source("https://a.b/2", ""),
    12: Source("https://a.b/12", "A [tricky] title"),
}
LINKS = {1: "([One](https://a.b/1))", 2: "([https://a.b/2](https://a.b/2))", 12: "([A (tricky) title](https://a.b/12))"}


def scan(*pieces: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The final text, and where in it which source is cited."""
    scanner = CitationScanner(SOURCES)
    text = ""
    cited: list[tuple[int, int, int]] = []
    for found in (*(scanner.feed(piece) for piece in pieces), scanner.flush()):
        for piece, number in found:
            if number is not None:
                cited.append((number, len(text), len(text) + len(piece)))
            text += piece
    return text, cited


@pytest.mark.parametrize(
    ("given", "text", "numbers"),
    [
        ("", "", []),
        ("plain", "plain", []),
        ("【1】", LINKS[1], [1]),
        ("a【1】b【2】c", f"a{LINKS[1]}b{LINKS[2]}c", [1, 2]),
        ("【1】【1】", LINKS[1] * 2, [1, 1]),
        ("【12】", LINKS[12], [12]),
        ("【1†L1-L5】", LINKS[1], [1]),
        ("【1†】", LINKS[1], [1]),
        ("【3】", "【3】", []),
        ("【】", "【】", []),
        ("【one】", "【one】", []),
        ("【-1】", "【-1】", []),
        ("【1", "【1", []),
        ("1】", "1】", []),
        ("【【1】", f"【{LINKS[1]}", [1]),
        ("【1【1】", f"【1{LINKS[1]}", [1]),
        ("【1†a【1】", f"【1†a{LINKS[1]}", [1]),
        ("【1\n】", "【1\n】", []),
        ("【1†a\nb】", "【1†a\nb】", []),
        ("【0000001】", "【0000001】", []),
        ("【000001】", LINKS[1], [1]),
        ("[1]", "[1]", []),
        (f"【1†{'x' * 253}】", LINKS[1], [1]),
        (f"【1†{'x' * 254}】", f"【1†{'x' * 254}】", []),
        ("😀【1】", f"😀{LINKS[1]}", [1]),
    ],
)
def test_marks_of_known_sources_become_links(given: str, text: str, numbers: list[int]) -> None:
    for pieces in ((given,), tuple(given)):
        found, cited = scan(*pieces)
        assert found == text
        assert [number for number, _, _ in cited] == numbers
        assert [found[start:end] for _, start, end in cited] == [LINKS[number] for number in numbers]


def test_where_the_stream_is_cut_makes_no_difference() -> None:
    chance = random.Random(7)
    alphabet = [
        "【",
        "】",
        "†",
        "1",
        "2",
        "3",
        "12",
        "L",
        "\n",
        " ",
        "word",
        "😀",
        "【1】",
        "【2†x】",
        "【12",
        "x" * 83,
    ]
    for _ in range(2_000):
        text = "".join(chance.choices(alphabet, k=chance.randint(0, 40)))
        cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, 12)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert scan(*pieces) == scan(text), (text, pieces)


def test_only_what_may_become_a_mark_is_held_back() -> None:
    scanner = CitationScanner(SOURCES)
    assert scanner.feed("plain ") == [("plain ", None)]
    assert scanner.feed("and 【1") == [("and ", None)]
    assert scanner.feed("2") == []
    assert scanner.feed("†") == []
    long = "x" * 300
    assert "".join(piece for piece, _ in scanner.feed(long)) == f"【12†{long}"
    assert scanner.feed("after") == [("after", None)]
    assert scanner.flush() == []


def test_its_time_grows_with_the_text_and_no_faster() -> None:
    for text in ("word " * 10_000, "【" * 20_000, "【1】" * 10_000, "【1†" + "x" * 50_000):
        took: list[float] = []
        for size in (1, 4):
            scanner = CitationScanner(SOURCES)
            started = time.perf_counter()
            for character in text * size:
                scanner.feed(character)
            took.append(time.perf_counter() - started)
        print(f"{text[:4]!r}: {took[0] * 1000:.0f} ms, four times the text {took[1] * 1000:.0f} ms")
