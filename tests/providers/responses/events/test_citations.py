"""Citation marks in streamed text: found wherever the stream is cut, and nothing else touched."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses.response_output_text import AnnotationURLCitation

from apis.deltas import TextDelta
from apis.tool_runtime import Source
from providers.responses.events.citations import CitationScanner, line_number
from providers.responses.events.open_items import OpenMessage
from providers.responses.events.tool_result import ContainerFile
from tests.support.models.recorded_turns import check_laws, finish, turn_of

SOURCES = {
    0: Source("", "a search"),
    line_number(0, 2): Source("https://a.b/1", "One"),
    line_number(0, 6): Source("https://a.b/2", ""),
    1: Source("https://a.b/1", "One"),
    2: Source("https://a.b/2", ""),
    12: Source("https://a.b/12_(x)", "A [tricky] title"),
}
LINKS = {
    1: "([One](https://a.b/1))",
    2: "([https://a.b/2](https://a.b/2))",
    12: "([A (tricky) title](https://a.b/12_%28x%29))",
    line_number(0, 2): "([One](https://a.b/1))",
    line_number(0, 6): "([https://a.b/2](https://a.b/2))",
}
ALPHABET = [
    *("【", "】", "†", "0", "1", "2", "3", "12", "L", "\n", " ", "word", "😀", "x" * 83),
    *("【1】", "【2†x】", "【12", "【1†L1-L5】", "【0†L3】", "【0†L1】", "【9†L1】", "【2†L7†site】"),
]


def random_texts(count: int) -> Iterator[tuple[str, list[str]]]:
    """Texts, and each of them in pieces."""
    chance = random.Random(7)
    for _ in range(count):
        text = "".join(chance.choices(ALPHABET, k=chance.randint(0, 40)))
        cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, 12)))
        yield text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def scan(*pieces: str) -> tuple[str, list[tuple[int | str, int, int]]]:
    """The final text, and where in it which source is cited."""
    scanner = CitationScanner(SOURCES)
    text = ""
    cited: list[tuple[int | str, int, int]] = []
    for pieces_found in (*(scanner.feed(piece) for piece in pieces), scanner.flush()):
        for piece, number in pieces_found:
            if number is not None:
                cited.append((number, len(text), len(text) + len(piece)))
            text += piece
    return text, cited


@pytest.mark.parametrize(
    ("value", "text", "numbers"),
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
        ("【3†L1】", "【3†L1】", []),
        ("【2†L4†site】", LINKS[2], [2]),
        ("【0†L2】", LINKS[1], [line_number(0, 2)]),
        ("【0†L5-L7】", LINKS[1], [line_number(0, 2)]),
        ("【0†L1-L3】", LINKS[1], [line_number(0, 2)]),  # it begins on the heading
        ("【0†L0-2】", LINKS[1], [line_number(0, 2)]),
        ("【0†L6】", LINKS[2], [line_number(0, 6)]),
        ("【0†L105】", LINKS[2], [line_number(0, 6)]),
        ("【0†L106】", "【0†L106】", []),
        ("【0†L1】", "【0†L1】", []),
        ("【0†x】", "【0†x】", []),
        ("【0】", "【0】", []),
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
def test_marks_of_known_sources_become_links(value: str, text: str, numbers: list[int]) -> None:
    for pieces in ((value,), tuple(value)):
        text_found, cited = scan(*pieces)
        assert text_found == text
        assert [number for number, _, _ in cited] == numbers
        assert [text_found[start:end] for _, start, end in cited] == [LINKS[number] for number in numbers]


HOSTILE = [
    ('The "Eternal" City', 'The "Eternal" City'),
    ('x","admin":true,"y":"', 'x","admin":true,"y":"'),
    ("A](https://evil.example) [b", "A)(https://evil.example) (b"),
    ("![A](https://evil.example/beacon.png)", "!(A)(https://evil.example/beacon.png)"),
    ("ends in a backslash\\", "ends in a backslash/"),
    ("two\nlines\r\n\nand \x00\x1b[2J more", "two lines and (2J more"),
    ("<https://evil.example>", "‹https://evil.example›"),
    ("<img src=x onerror=alert(1)>", "‹img src=x onerror=alert(1)›"),
    ("code `", "code '"),
    ("\u2028\n ", "https://a.b/1"),
    ("", "https://a.b/1"),
]


@pytest.mark.parametrize(("title", "expected"), HOSTILE)
def test_a_page_cannot_break_out_of_the_link_to_it(title: str, expected: str) -> None:
    scanner = CitationScanner({1: Source("https://a.b/1", title)})
    assert scanner.feed("Rome【1】") == [("Rome", None), (f"([{expected}](https://a.b/1))", 1)]


def test_a_url_cannot_break_out_of_its_link() -> None:
    scanner = CitationScanner({1: Source("https://a.b/x) y\\<z>`\n(1)", "One")})
    assert scanner.feed("【1】") == [("([One](https://a.b/x%29%20y%5C%3Cz%3E%60%0A%281%29))", 1)]


def test_in_json_marks_are_removed_and_cited_at_their_place() -> None:
    for title in [title for title, _ in HOSTILE]:
        files = {"/mnt/data/a.png": ContainerFile("cntr_1", "cfile_1")}
        scanner = CitationScanner({1: Source("https://a.b/1", title)}, files, is_json=True)
        text = '{"a": "Rome【1】【1†L1-L5】, 【7】 and ![it](sandbox:/mnt/data/a.png)【1】"}【1】'
        pieces = [piece for each in text for piece in scanner.feed(each)] + scanner.flush()
        whole = "".join(piece for piece, _ in pieces)
        assert json.loads(whole) == {"a": "Rome, 【7】 and ![it](sandbox:/mnt/data/a.png)"}
        assert [cited for _, cited in pieces if cited is not None] == [1, 1, "/mnt/data/a.png", 1, 1]


def test_a_citation_repeated_at_one_place_is_one_annotation_and_annotations_are_bounded() -> None:
    events: Any = []
    message = OpenMessage("msg_1", 0, None, CitationScanner(SOURCES, is_json=True))
    message.append_text("a【1】【1】【2】b【1】" + "c【1】" * 5_000, (), events)
    message.close("completed")
    part: Any = message.item("completed").content[0]
    assert part.text == "ab" + "c" * 5_000
    citations = [(each.url, each.start_index, each.end_index) for each in part.annotations]
    assert citations[:3] == [("https://a.b/1", 1, 1), ("https://a.b/2", 1, 1), ("https://a.b/1", 2, 2)]
    assert len(citations) == len(set(citations)) == 2_000
    indexes = [event.annotation_index for event in events if "annotation" in event.type]
    assert indexes == [*range(2_000)]


def test_no_citation_is_compared_with_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []

    def compare(one: object, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(AnnotationURLCitation, "__eq__", compare)
    message = OpenMessage("msg_1", 0, None, CitationScanner(SOURCES))
    message.append_text("【1】 " * 500, (), [])
    part: Any = message.close("completed")[-1]
    assert len(part.item.content[0].annotations) == 500
    assert compared == []


def test_where_the_stream_is_cut_makes_no_difference() -> None:
    for text, pieces in random_texts(2_000):
        assert scan(*pieces) == scan(text), (text, pieces)


def test_messages_and_their_annotations_are_the_same_wherever_the_stream_is_cut() -> None:
    for number, (text, pieces) in enumerate(random_texts(400)):
        built_events: list[dict[str, Any]] = []
        for deltas in (pieces, [text]):
            turn, output = turn_of(SOURCES)
            events = turn.feed([TextDelta(""), *map(TextDelta, deltas), finish()])
            if number % 20 == 0:
                check_laws(events, output, "completed")
            message = output.finished_items()[0].to_dict()
            del message["id"]
            built_events.append(message)
            added = [event for event in events if event.type == "response.output_text.annotation.added"]
            citations = [event.annotation.to_dict() for event in added if event.annotation is not None]
            part: Any = message["content"]
            assert citations == part[0]["annotations"]
        assert built_events[0] == built_events[1]
        part = built_events[0]["content"][0]
        _, cited = scan(text)
        spans = [(each["start_index"], each["end_index"]) for each in part["annotations"]]
        assert spans == [(start, end) for _, start, end in cited]
        assert all(part["text"][start:end] in LINKS.values() for start, end in spans)


def test_all_that_cannot_become_a_mark_is_let_go_at_once() -> None:
    begun = re.compile(r"【(\d{0,6}|(0|1|2|12)†[^】【\n]*)")
    for _, pieces in random_texts(500):
        scanner = CitationScanner(SOURCES)
        text = ""
        for piece in pieces:
            text += piece
            scanner.feed(piece)
            rest = scanner.flush()
            if rest:
                assert begun.fullmatch(rest[0][0]), rest
                assert text.endswith(rest[0][0])
                scanner.feed(rest[0][0])


def test_only_the_beginning_of_a_mark_is_held_back() -> None:
    scanner = CitationScanner(SOURCES)
    assert scanner.feed("plain ") == [("plain ", None)]
    assert scanner.feed("and 【1") == [("and ", None)]
    assert scanner.feed("2") == []
    assert scanner.feed("†") == []
    long = "x" * 300
    assert "".join(piece for piece, _ in scanner.feed(long)) == f"【12†{long}"
    assert scanner.feed("after") == [("after", None)]
    assert scanner.flush() == []
