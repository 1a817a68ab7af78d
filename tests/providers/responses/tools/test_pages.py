"""Pages as numbered lines: nothing is lost when they are cut, found or kept, and nothing of theirs passes for ours."""

import random
import time
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.web_search.pages import (
    MAX_CHAIN_CHARS,
    MAX_PAGE_CHARS,
    BrowsedPage,
    PageHistory,
    append_link_list,
    find_matches,
    render_link_ids,
    render_page,
    strip_links,
    wrap_lines,
)


def page(text: str, number: int = 1, links: Sequence[str] = ()) -> BrowsedPage:
    return BrowsedPage(f"https://a.b/{number}", f"Page {number}", wrap_lines(text), links)


def record_result(number: int, state: object) -> ToolResultRecord:
    """Return the record of a result whose state was encoded and decoded, as by a store."""
    return ToolResultRecord(f"c{number}", "open_page", "{}", "", state=msgspec.json.decode(msgspec.json.encode(state)))


def test_wrapping_keeps_every_word_and_every_line() -> None:
    chance = random.Random(5)
    for _ in range(500):
        words = chance.choices(["a", "word", "x" * 79, "y" * 80, "z" * 200, "\n", "\n\n", "  ", "\u4f60" * 90], k=30)
        text = " ".join(words)
        lines = wrap_lines(text).split("\n")
        assert max(map(len, lines)) <= 80
        assert "".join(wrap_lines(text).split()) == "".join(text.split())


def test_short_lines_stay_as_they_are() -> None:
    text = "  code\n\n\tmore   code\n" + "x" * 80
    assert wrap_lines(text) == text
    assert len(wrap_lines("x" * 1_000_000).replace("\n", "")) == MAX_PAGE_CHARS


def test_a_page_has_no_marks_and_no_line_ends_of_its_own() -> None:
    assert wrap_lines("a 【1†L2】\u2028L7: b") == "a 〖1†L2〗 L7: b"


@pytest.mark.parametrize(
    ("first", "num_lines", "max_chars", "expected"),
    [(0, 0, 1000, "0-9"), (0, 0, 20, "0-2"), (8, 0, 1000, "8-9"), (3, 2, 1000, "3-4"), (3, 99, 20, "3-5")],
)
def test_a_view_names_its_lines(first: int, num_lines: int, max_chars: int, expected: str) -> None:
    one = page("\n".join(str(number) for number in range(10)))
    head, lines = render_page(7, one, first, max_chars=max_chars, num_lines=num_lines)
    start, end = expected.split("-")
    assert head == f"[7] Page 1 (https://a.b/1)\n**viewing lines [{start} - {end}] of 9**\n\n"
    assert list(lines) == [f"L{number}: {number}" for number in range(int(start), int(end) + 1)]


def test_links_are_listed_as_far_as_they_are_shown() -> None:
    one = page("", links=["https://a.b/x", "https://c.d/y", f"https://e.f/{'z' * 20_000}"])
    lines = ["L0: one[#2], two[#1] and [#2]", "L1: none[#9] [#0] long[#3]"]
    assert append_link_list(lines, one).endswith("\n\nLinks:\n[#2] https://c.d/y\n[#1] https://a.b/x")
    assert render_link_ids(lines, one) == (
        "L0: one【1†c.d】, two【0†a.b】 and 【1†c.d】\nL1: none[#9] [#0] long【2†e.f】"
    )
    assert strip_links("one[#2], two") == "one, two"


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        ("WORD", [0, 5]),
        ("a long", [3]),
        ("link behind", [6]),
        ("one two", [4]),
        ("(.*", []),
        ("〖1〗", [8]),
        ("【1】", [8]),
        ("ß", [9]),
    ],
)
def test_a_find_ignores_case_links_and_line_ends(pattern: str, lines: list[int]) -> None:
    text = "A word.\nword\nword\nIt is a\nlong one\ntwo Word\nA link[#1] behind\n\n【1】\nStraße"
    assert [at for at, _ in find_matches(page(text), pattern)] == lines


@pytest.mark.parametrize(
    ("text", "pattern"), [("a " * 75_000, "a " * 100), ("e" * 150_000, "e"), (f"a{' ' * 50}" * 3000, "a " * 99 + "b")]
)
def test_finding_takes_no_longer_than_a_page_is_long(text: str, pattern: str) -> None:
    started = time.perf_counter()
    assert len(find_matches(page(text), pattern)) <= 50
    print(f"{pattern[:4]!r}: {(time.perf_counter() - started) * 1000:.0f} ms")


def test_pages_are_the_same_after_a_restart() -> None:
    pages = PageHistory()
    rome = BrowsedPage(
        "https://a.b/rome", "Rome", "text", ["https://l"], lines=[], requested_url="http://a.b", domains=(["a.b"], None)
    )
    results = BrowsedPage("", "query", "# Results", ["https://a.b"], "results", [2])
    states = [pages.add(0, results), pages.add(1, rome), pages.add(3, rome)]
    again = PageHistory(record_result(number, state) for number, state in enumerate([*states, None, {"x": 1}, 5]))
    assert [again.get(number) for number in range(4)] == [results, rome, None, rome]
    assert again.get(1) is again.get(3)
    assert again.last_number == 3
    assert states[2] == {"number": 3, "same": 1}
    assert again.number_of("http://a.b#here") == again.number_of("https://a.b/rome") == 1


def test_a_stored_page_is_shown_again_only_under_its_own_filter() -> None:
    pages = PageHistory()
    pages.add(1, BrowsedPage("https://a.b/", "", "text", domains=(["a.b"], None)))
    assert (
        pages.find_by_url("https://a.b/", (["a.b"], None))
        is pages.find_by_url("https://a.b/", (None, None))
        is pages.get(1)
    )
    assert pages.find_by_url("https://a.b/", (["c.d"], None)) is None
    assert pages.find_by_url("https://a.b/", (["a.b"], ["c.d"])) is None


def test_the_pages_that_a_chain_stores_are_bounded_and_others_are_fetched_again() -> None:
    pages = PageHistory()
    big = page("x" * MAX_PAGE_CHARS, links=["https://l"])
    states = [pages.add(number, replace(big, url=f"https://a.b/{number}")) for number in range(20)]
    have_texts = [bool(state["page"]["text"]) for state in states]
    assert sum(have_texts) == MAX_CHAIN_CHARS // big.size_chars
    assert have_texts == sorted(have_texts, reverse=True)
    assert pages.find_by_url("https://a.b/19", (None, None)) is not None
    later = PageHistory(record_result(number, state) for number, state in enumerate(states))
    assert later.find_by_url("https://a.b/0", (None, None)) is not None
    assert later.find_by_url("https://a.b/19", (None, None)) is None
    assert later.number_of("https://a.b/19") == 19
    assert not later.add(20, big)["page"]["text"]
