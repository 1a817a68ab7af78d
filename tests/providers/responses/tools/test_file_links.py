"""Links to files that programs wrote: found wherever the stream is cut, cited once each, and nothing else touched."""

import random
from collections.abc import Sequence

import pytest

from apis.tool_runtime import Source
from providers.responses.events.citations import CitationScanner
from providers.responses.events.tool_result import ContainerFile

NAMES = ["a.png", "a.png.txt", "my plot (1).csv", "deep/er/b.txt", "é.txt"]
FILES = {f"/mnt/data/{name}": ContainerFile("cntr_1", f"cfile_{number}") for number, name in enumerate(NAMES)}
SOURCES = {1: Source("https://a.b/1", "One")}
PIECES = [
    *(
        "sandbox:",
        "sandbox:/mnt",
        "/mnt/data/",
        "sandbox:/mnt/data/a.png",
        "sandbox:/mnt/data/a.png.txt",
        ".",
        "/",
        "s",
    ),
    *("sandbox:/mnt/data/my%20plot%20%281%29.csv", "sandbox:/mnt/data/deep/er/b.txt", "(", ")", " ", "x", "\n", "-"),
    *("【1】", "【", "1", "】", "sandbox:/mnt/data/none.png", "\u3000", "sand", "a.png"),
]


def scan(pieces: Sequence[str]) -> tuple[str, list[tuple[int | str, int, int]]]:
    """The final text, and where in it what is cited."""
    scanner = CitationScanner(SOURCES, FILES)
    text = ""
    cited: list[tuple[int | str, int, int]] = []
    for pieces_found in (*(scanner.feed(piece) for piece in pieces), scanner.flush()):
        for piece, what in pieces_found:
            if what is not None:
                cited.append((what, len(text), len(text) + len(piece)))
            text += piece
    return text, cited


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("![A](sandbox:/mnt/data/a.png)", ["a.png"]),
        ("See sandbox:/mnt/data/a.png.", ["a.png"]),
        ("See sandbox:/mnt/data/a.png", ["a.png"]),
        ("sandbox:/mnt/data/a.png, sandbox:/mnt/data/a.png and no more", ["a.png", "a.png"]),
        ("(sandbox:/mnt/data/a.png.txt)", ["a.png.txt"]),
        ("(sandbox:/mnt/data/my plot (1).csv)", ["my plot (1).csv"]),
        ("(sandbox:/mnt/data/my%20plot%20%281%29.csv)", ["my plot (1).csv"]),
        ("(sandbox:/mnt/data/%C3%A9.txt)", ["é.txt"]),
        ("(sandbox:/mnt/data/deep/er/b.txt)", ["deep/er/b.txt"]),
        ("sandbox:/mnt/data/a.png.bak sandbox:/mnt/data/a.png/x sandbox:/mnt/data/a.pngs sandbox:/mnt/data/a.png-", []),
        ("sandbox:/mnt/data/none.png /mnt/data/a.png sandbox:/mnt/data/ sandbox:", []),
        ("a sandbox: that is one, and an s", []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_links_are_cited_where_they_stand(text: str, names: list[str], size: int) -> None:
    final, cited = scan([text[at : at + size] for at in range(0, len(text), size)])
    assert final == text
    assert [what for what, _, _ in cited] == [f"/mnt/data/{name}" for name in names]
    assert all(final[start:end].startswith("sandbox:/mnt/data/") for _, start, end in cited)


def test_text_and_citations_do_not_depend_on_the_chunks() -> None:
    chance = random.Random(11)
    for _ in range(3000):
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
        cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(0, 9)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert scan(pieces) == scan([text]), text
        assert scan([text])[0].replace("([One](https://a.b/1))", "【1】") == text


def test_only_the_beginning_of_a_link_is_held_back() -> None:
    scanner = CitationScanner({}, FILES)
    assert scanner.feed("Here is") == [("Here i", None)]
    assert scanner.feed(" sandbox:/x ") == [("s sandbox:/x ", None)]
    assert scanner.feed("sandbox:/mnt/data/a.pn") == []
    assert scanner.feed("g)") == [("sandbox:/mnt/data/a.png", "/mnt/data/a.png"), (")", None)]
