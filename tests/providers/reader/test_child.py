"""The text of files of every kind, and files made to break their parser."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from apis.documents.reader import Document, UnreadableFile
from providers.fetcher.safe import GuardedFetcher
from providers.reader.child import ChildReader
from tests.support.models import documents

MAX_CHARS = 200_000
BOUND_S = 45
W = b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>%b</w:body></w:document>'
HTML = """<!doctype html><html><head><title>The &amp; page</title><style>p{}</style><script>let x = "no"</script></head>
<body><h1>Head</h1><p>One <b>bo</b>ld
word.</p>loose<ul><li>a<li>b</ul><table><tr><td>1</td><td>2</td></tr></table><svg><text>no</text></svg></body></html>"""
READ: dict[str, tuple[str, bytes, str]] = {
    "text": ("a.txt", "Grüße\r\nan alle\n".encode(), "Grüße\nan alle"),
    "text of Windows": ("a.txt", "Grüße".encode("cp1252"), "Grüße"),
    "text in UTF-16": ("a.txt", "Grüße".encode("utf-16"), "Grüße"),
    "text with a mark": ("a.txt", b"\xef\xbb\xbfHi", "Hi"),
    "control characters": ("a.txt", b"a\x07b\x1bc", "a b c"),
    "markdown": ("a.md", b"# Head\n\n* one\n", "# Head\n\n* one"),
    "code": ("a.py", b"def f():\n\treturn 1\n", "def f():\n\treturn 1"),
    "a name without an ending": ("Makefile", b"all:\n\tcc a.c\n", "all:\n\tcc a.c"),
    "json": ("a.json", b'{"a":[1,"\\u00fc"]}', '{\n "a": [\n  1,\n  "ü"\n ]\n}'),
    "broken json": ("a.json", b'{"a":', '{"a":'),
    "csv": ("a.csv", b"name;year\nMoby-Dick;1851\n;1900\n", "name: Moby-Dick, year: 1851\nyear: 1900"),
    "a csv with quotes": ("a.csv", b'a,b\n"x,\ny",2\n', "a: x,\ny, b: 2"),
    "tsv": ("a.tsv", b"a\tb\n1\t2\n", "a: 1, b: 2"),
    "a pdf without its table": ("a.pdf", documents.pdf("Lost.").partition(b"xref")[0] + b"%%EOF", "Lost."),
    "a pdf without its end": ("a.pdf", documents.pdf("Lost.").partition(b"startxref")[0], "Lost."),
    "html": ("a.html", HTML.encode(), "The & page\nHead\nOne bold word.\nloose\na\nb\n1\n2"),
    "html without its ending": ("page", b"<!DOCTYPE html><p>x</p><p>y</p>", "x\ny"),
    "pdf": ("a.pdf", documents.pdf("The first page.", "The second one."), "The first page.\n\nThe second one."),
    "a pdf with a script": (
        "a.pdf",
        documents.pdf("Text.", extra=b"/OpenAction << /S /JavaScript /JS (app.alert\\(1\\)) >>"),
        "Text.",
    ),
    "a pdf under another name": ("a.txt", documents.pdf("Hidden."), "Hidden."),
    "a pdf with an empty password": ("a.pdf", documents.encrypted_pdf(""), "A secret."),
    "docx": (
        "a.docx",
        documents.word("Call me Ishmael.", "Some years ago.", table=[["name", "year"], ["Moby", "1851"]]),
        "Call me Ishmael.\n\nSome years ago.\n\nname | year\nMoby | 1851",
    ),
}
LAUGHS = b'<!DOCTYPE x [<!ENTITY a "ha">' + b"".join(
    b'<!ENTITY %c "%b">' % (98 + i, (b"&%c;" % (97 + i)) * 20) for i in range(9)
)
HOSTILE: dict[str, tuple[str, bytes | Callable[[], bytes], str]] = {
    "an encrypted pdf": ("a.pdf", documents.encrypted_pdf("tiger"), "encrypted"),
    "a pdf with a loop": ("a.pdf", documents.pdf_with_a_loop_of_pages(), "read|text"),
    "a pdf of 5,001 pages": ("a.pdf", lambda: documents.pdf(*["x"] * 5_001), "pages"),
    "a pdf that inflates": ("a.pdf", lambda: documents.pdf_that_inflates(1_500_000_000), "read|long|memory|text"),
    "a cut pdf": ("a.pdf", documents.pdf("x" * 5000)[:700], "read|text"),
    "a pdf of noise": ("a.pdf", b"%PDF-1.7\n" + bytes(range(256)) * 400, "read|text"),
    "a docx that inflates": ("a.docx", lambda: documents.word_with(W % (b" " * 2**27)), "unpacks"),
    "a docx that laughs": (
        "a.docx",
        documents.word_with(LAUGHS + b"]>" + W % b"<w:p><w:r><w:t>&j;</w:t></w:r></w:p>"),
        "read|text",
    ),
    "a docx that asks for a file": (
        "a.docx",
        documents.word_with(
            b'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/hostname">]>' + W % b"<w:p><w:r><w:t>&f;</w:t></w:r></w:p>"
        ),
        "read|text",
    ),
    "a docx of nothing else": ("a.docx", documents.word_with(b"<x/>"), "read|text"),
    "a docx that nests": ("a.docx", lambda: documents.word_with(W % (b"<w:p>" * 200_000)), "read|text"),
    "an archive": ("a.zip", documents.archive(**{"../../x.txt": b"x"}), "archive"),
    "a broken archive": ("a.docx", b"PK\x03\x04" + b"x" * 1000, "read"),
    "noise": ("a.txt", bytes(range(256)) * 100, "neither"),
    "noise without zeros": ("a.txt", bytes(range(1, 256)) * 100, "neither"),
    "only white space": ("a.txt", b" \n" * 1000, "no text"),
    "nothing": ("a.txt", b"", "no text"),
    "too much": ("a.txt", b"word " * (MAX_CHARS // 4), "more than"),
    "too much html": ("a.html", b"<p>word " * MAX_CHARS, "more than"),
    "a wide csv": ("a.csv", b"a," * 100_000 + b"\n" + (b"1," * 100_000 + b"\n") * 5, "more than"),
    "a long cell": ("a.csv", b"a,b\n" + b"x" * 3_000_000, "read"),
    "json that grows": ("a.json", b"[" + b"[]," * 300_000 + b"1]", "more than"),
}
HARMLESS: dict[str, tuple[str, bytes, str]] = {
    "html that nests": ("a.html", b"<div>" * 100_000 + b"x", "x"),
    "html of open tags": ("a.html", b"<p>x" + b"<" * 100_000, "x"),
    "json that nests": ("a.json", b"[" * 100_000, "["),
    "html with zeros": ("a.html", "<p>a</p>".encode("utf-16"), "a"),
}


async def file_to_text(name: str, data: bytes, max_chars: int) -> str:
    return await ChildReader(ChildReader.Config(), None, GuardedFetcher(GuardedFetcher.Config())).extract_text(
        Document(name, data), max_chars
    )


@pytest.mark.parametrize("name", READ)
async def test_every_kind_gives_its_text(name: str) -> None:
    filename, data, text = READ[name]
    assert await file_to_text(filename, data, MAX_CHARS) == text


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_are_refused_in_time(name: str) -> None:
    filename, source, words = HOSTILE[name]
    data = source if isinstance(source, bytes) else source()
    began = time.monotonic()
    with pytest.raises(UnreadableFile, match=words) as caught:
        await file_to_text(filename, data, MAX_CHARS)
    assert caught.value.code in ("invalid_file", "unsupported_file")
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize("name", HARMLESS)
async def test_harmless_files_that_look_hostile_are_read(name: str) -> None:
    filename, data, begins = HARMLESS[name]
    assert (await file_to_text(filename, data, MAX_CHARS)).startswith(begins)


async def test_a_name_says_nothing_that_is_run(tmp_path: Any) -> None:
    name = f"$(touch {tmp_path}/x).txt"
    assert await file_to_text(name, b"text", MAX_CHARS) == "text"
    assert list(tmp_path.iterdir()) == []
