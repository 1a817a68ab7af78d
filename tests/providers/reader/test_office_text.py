"""The text of XLSX and PPTX, and such files made to break their parser."""

import time
from collections.abc import Callable

import pytest

from apis.documents.reader import UnreadableFile
from tests.providers.reader.test_child import BOUND_S, LAUGHS, MAX_CHARS, file_to_text
from tests.support.models.documents import archive, paragraph, presentation, relationships, workbook

ROWS = (
    b'<row r="1"><c r="A1" t="s"><v>0</v></c><c r="C1" t="s"><v>1</v></c>'
    b'<c r="D1" t="inlineStr"><is><t>in, line</t></is></c></row>'
    b'<row r="2"><c r="A2"><v>2020</v></c><c r="B2" s="1"><v>43831</v></c><c r="C2" s="2"><v>43831.5</v></c>'
    b'<c r="D2" s="3"><v>1.25</v></c><c r="E2" t="b"><v>1</v></c>'
    b'<c r="F2" t="str"><f>A1&amp;"x"</f><v>sum</v></c></row>'
    b'<row r="3"><c r="A3" s="1"/></row><row r="4"><c t="e"><v>#N/A</v></c><c><v>7</v></c></row>'
)
CSV = 'one,,two words,"in, line"\n2020,2020-01-01,2020-01-01 12:00:00,1.25,TRUE,sum\n#N/A,7'
TABLE = b"<a:tbl><a:tr><a:tc>%b%b</a:tc><a:tc>%b</a:tc></a:tr></a:tbl>"
READ = {
    "a workbook": (workbook(ROWS), f"Sheet: S1\n{CSV}"),
    "two sheets": (
        workbook(b"<row><c><v>1</v></c></row>", b"<row><c><v>2</v></c></row>"),
        "Sheet: S1\n1\n\nSheet: S2\n2",
    ),
    "a presentation": (
        presentation(
            paragraph("Whales") + paragraph("eat ", "krill") + paragraph(" "),
            TABLE % (paragraph("a"), paragraph("b"), paragraph("c")),
            notes=paragraph("Say it slowly.") + b"<a:p><a:fld><a:t>1</a:t></a:fld></a:p>",
        ),
        "Slide 1\nWhales\neat krill\n\nNotes of slide 1\nSay it slowly.\n\nSlide 2\na b | c",
    ),
}
HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "a workbook that inflates": (lambda: workbook(b" " * 2**27), "unpacks"),
    "a presentation that inflates": (lambda: presentation(b" " * 2**27), "unpacks"),
    "a workbook of 6,000 parts": (lambda: workbook(b"", **{f"x{n}": b"" for n in range(6_000)}), "unpacks"),
    "cells in the last column": (
        lambda: workbook(b'<row><c r="XFD1"><v>1</v></c></row>' * 100_000),
        "more than",
    ),
    "cells beyond the last column": (workbook(b'<row><c r="ZZZ1"><v>1</v></c></row>'), "row of more than"),
    "a row of 100,000 cells": (
        lambda: workbook(b"<row>%b</row>" % (b"<c><v>1</v></c>" * 100_000)),
        "row of more than",
    ),
    "a workbook that laughs": (
        workbook(
            b"",
            **{"xl/sharedStrings.xml": LAUGHS + b"]><sst><si><t>&j;</t></si></sst>"},
            **{"xl/worksheets/s1.xml": b'<worksheet><row><c t="s"><v>0</v></c></row></worksheet>'},
        ),
        "read|text|more",
    ),
    "a workbook that asks for a file": (
        workbook(
            b"",
            **{
                "xl/worksheets/s1.xml": b'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/hostname">]><worksheet><row>'
                b'<c t="str"><v>&f;</v></c></row></worksheet>'
            },
        ),
        "read|only",
    ),
    "a sheet that nests": (lambda: workbook(b"<row>" * 200_000), "read"),
    "slides that nest": (lambda: presentation(b"<a:p>" * 200_000), "read"),
    "a workbook without its sheet": (archive(**{"xl/workbook.xml": b"<workbook/>"}), "text|read"),
    "a sheet outside of the archive": (
        workbook(b"", **{"xl/_rels/workbook.xml.rels": relationships(r1="../../../../etc/passwd")}),
        "read",
    ),
}


@pytest.mark.parametrize("name", READ)
async def test_office_files_give_their_text(name: str) -> None:
    """Sheets as CSV, slides as text."""
    data, text = READ[name]
    assert await file_to_text("a.bin", data, MAX_CHARS) == text


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_office_files_are_refused_in_time(name: str) -> None:
    """The guards against bombs in DOCX hold for them, too."""
    source, words = HOSTILE[name]
    data = source if isinstance(source, bytes) else source()
    began = time.monotonic()
    with pytest.raises(UnreadableFile, match=words) as caught:
        print(await file_to_text("a.xlsx", data, MAX_CHARS))
    assert caught.value.code in ("invalid_file", "unsupported_file")
    assert time.monotonic() - began < BOUND_S
