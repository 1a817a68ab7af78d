"""Text of Office files: of XLSX each sheet as CSV, of PPTX each slide with its notes.

Only zip and XML are read, part by part. Sizes are bounded before anything is unpacked; no entity is expanded, and
elements are dropped when they end, so that memory does not grow with the number of cells.
"""

import csv
import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from io import BytesIO, StringIO
from typing import Any, Final, cast

from providers.reader.errors import ExtractionError

_MAX_UNPACKED_BYTES: Final = 128 * 2**20
_MAX_PARTS: Final = 5000
_MAX_SHEETS: Final = 1000
_MAX_COLUMNS: Final = 16_384
"""Columns of a sheet in Excel, XFD the last."""
_CELL_NAME: Final = re.compile(r"([A-Z]{1,3})[0-9]{1,7}")
_DATE_LETTER: Final = re.compile(r"[ymdhs]")
_FORMAT_LITERAL: Final = re.compile(r'"[^"]*"?|\\.|\[[^\]]*\]?', re.DOTALL)
_BUILTIN_DATES: Final = frozenset({*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)})
"""Numbers of Excel's own formats of dates and times (ECMA-376, 18.8.30)."""


def office_to_lines(data: bytes) -> Iterator[str] | None:
    """Return the lines of an XLSX or PPTX file; None for another archive. Raises ExtractionError for one that unpacks
    to too much, and the errors of zipfile and lxml for one that is broken."""
    archive = zipfile.ZipFile(BytesIO(data))
    names = frozenset(archive.namelist())
    if "xl/workbook.xml" in names:
        kind, lines = "XLSX", _xlsx_to_lines
    elif "ppt/presentation.xml" in names:
        kind, lines = "PPTX", _pptx_to_lines
    else:
        return None
    infos = archive.infolist()
    if len(infos) > _MAX_PARTS or sum(info.file_size for info in infos) > _MAX_UNPACKED_BYTES:
        raise ExtractionError("invalid_file", f"The {kind} unpacks to more than {_MAX_UNPACKED_BYTES} bytes.")
    return lines(archive)


def _xlsx_to_lines(archive: zipfile.ZipFile) -> Iterator[str]:
    paths = _read_relationships(archive, "xl/workbook.xml")
    sheets: list[tuple[str, str]] = []
    uses_1904 = False
    for element in _iterate_elements(archive, "xl/workbook.xml", "sheet", "workbookPr"):
        if _local_name(element) == "workbookPr":
            uses_1904 = element.get("date1904") in ("1", "true")
        elif path := paths.get(_relationship_id(element)):
            sheets.append((element.get("name") or "", path))
    if len(sheets) > _MAX_SHEETS:
        raise ExtractionError("invalid_file", f"The XLSX has more than {_MAX_SHEETS} sheets.")
    texts = [*_read_shared_texts(archive)]
    epoch = datetime(1904, 1, 1) if uses_1904 else datetime(1899, 12, 30)
    dates = _read_date_styles(archive)
    for name, path in sheets:
        yield from _with_heading(f"Sheet: {name}", _sheet_to_lines(archive, path, texts, dates, epoch))


def _sheet_to_lines(
    archive: zipfile.ZipFile, path: str, texts: Sequence[str], dates: Sequence[bool], epoch: datetime
) -> Iterator[str]:
    row: list[str] = []
    for element in _iterate_elements(archive, path, "c", "row"):
        if _local_name(element) == "c":
            column = _column_index(element.get("r"), len(row))
            row += [""] * (column - len(row))
            row.append(_cell_to_text(element, texts, dates, epoch))
        else:
            if any(row):
                yield _row_to_csv(row)
            row = []


def _read_shared_texts(archive: zipfile.ZipFile) -> Iterator[str]:
    if "xl/sharedStrings.xml" in archive.namelist():
        for element in _iterate_elements(archive, "xl/sharedStrings.xml", "si"):
            yield _text_of(element)


def _read_date_styles(archive: zipfile.ZipFile) -> Sequence[bool]:
    """Return for each style of cells whether it shows a date or a time."""
    if "xl/styles.xml" not in archive.namelist():
        return ()
    styles: list[bool] = []
    formats: dict[str, bool] = {str(number): True for number in _BUILTIN_DATES}
    for element in _iterate_elements(archive, "xl/styles.xml", "numFmt", "cellXfs"):
        if _local_name(element) == "numFmt":
            code = _FORMAT_LITERAL.sub("", (element.get("formatCode") or "").lower())
            formats[element.get("numFmtId") or ""] = _DATE_LETTER.search(code) is not None
        else:
            styles = [formats.get(style.get("numFmtId") or "", False) for style in element]
    return styles


def _cell_to_text(cell: Any, texts: Sequence[str], dates: Sequence[bool], epoch: datetime) -> str:
    kind = cell.get("t") or "n"
    if kind == "inlineStr":
        return _text_of(cell)
    value = next((child.text or "" for child in cell if _local_name(child) == "v"), "")
    match kind:
        case "s":
            return texts[int(value)] if value.isdecimal() and int(value) < len(texts) else ""
        case "b":
            return "TRUE" if value == "1" else "FALSE"
        case "n":
            style = cell.get("s") or "0"
            is_date = style.isdecimal() and int(style) < len(dates) and dates[int(style)]
            return _serial_to_text(value, epoch) if is_date else value
        case _:
            return value


def _serial_to_text(value: str, epoch: datetime) -> str:
    """Return a date, a date and time, or a time of day for a number of days since the epoch."""
    try:
        days = float(value)
        moment = epoch + timedelta(seconds=round(days * 86400))
    except (ValueError, OverflowError):
        return value
    if 0 <= days < 1:
        return moment.strftime("%H:%M:%S")
    return moment.date().isoformat() if moment.time() == datetime.min.time() else moment.isoformat(" ")


def _column_index(name: str | None, following: int) -> int:
    """Return the column of a cell, from 0; the `following` one where the cell has no name."""
    match = _CELL_NAME.fullmatch(name or "")
    index = following
    if match is not None:
        index = -1
        for letter in match[1]:
            index = 26 * (index + 1) + ord(letter) - ord("A")
    index = max(index, following)
    if index >= _MAX_COLUMNS:
        raise ExtractionError("invalid_file", f"The XLSX has a row of more than {_MAX_COLUMNS} cells.")
    return index


def _row_to_csv(row: Sequence[str]) -> str:
    length = next(count for count in range(len(row), 0, -1) if row[count - 1])
    out = StringIO()
    csv.writer(out, lineterminator="").writerow(row[:length])
    return out.getvalue()


def _pptx_to_lines(archive: zipfile.ZipFile) -> Iterator[str]:
    paths = _read_relationships(archive, "ppt/presentation.xml")
    slides = [_relationship_id(element) for element in _iterate_elements(archive, "ppt/presentation.xml", "sldId")]
    for number, path in enumerate((paths[slide] for slide in slides if slide in paths), start=1):
        yield from _with_heading(f"Slide {number}", _slide_to_lines(archive, path))
        for notes in _read_relationships(archive, path).values():
            if "notesSlide" in notes and notes in archive.namelist():
                yield from _with_heading(f"Notes of slide {number}", _slide_to_lines(archive, notes))


def _with_heading(heading: str, lines: Iterator[str]) -> Iterator[str]:
    """Yield the heading, the lines and an empty one; nothing where there are no lines."""
    for number, line in enumerate(lines):
        if not number:
            yield heading
        yield line
        heading = ""
    if not heading:
        yield ""


def _slide_to_lines(archive: zipfile.ZipFile, path: str) -> Iterator[str]:
    """Yield the paragraphs of a slide; those of a table's row are one line."""
    cells: list[str] = []
    paragraphs: list[str] = []
    for element in _iterate_elements(archive, path, "p", "tc", "tr"):
        name = _local_name(element)
        if name == "tc":
            cells.append(" ".join(paragraphs))
            paragraphs = []
        elif name == "tr":
            if any(cells):
                yield " | ".join(cells)
            cells = []
        elif text := _text_of(element).strip():
            if _has_ancestor(element, "tc"):
                paragraphs.append(text)
            else:
                yield text


def _read_relationships(archive: zipfile.ZipFile, path: str) -> Mapping[str, str]:
    """Return the parts that a part refers to, by the ids of its references."""
    folder, name = posixpath.split(path)
    relationships = f"{folder}/_rels/{name}.rels"
    if relationships not in archive.namelist():
        return {}
    return {
        element.get("Id") or "": posixpath.normpath(posixpath.join("/", folder, element.get("Target") or ""))[1:]
        for element in _iterate_elements(archive, relationships, "Relationship")
        if element.get("TargetMode") != "External"
    }


def _iterate_elements(archive: zipfile.ZipFile, path: str, *names: str) -> Iterator[Any]:
    """Yield the elements of these names as they end, and drop them with all that came before them."""
    from lxml import etree  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs, reportAttributeAccessIssue, reportUnknownVariableType] - lxml has no types; only these files need it

    with archive.open(path) as part:
        tags = [f"{{*}}{name}" for name in names]
        parser = cast(
            Any,
            etree.iterparse(part, tag=tags, resolve_entities=False, no_network=True, load_dtd=False),  # pyright: ignore[reportUnknownMemberType] - as above
        )
        for _, element in parser:
            yield element
            element.clear()
            parent = element.getparent()
            while parent is not None and element.getprevious() is not None:
                del parent[0]


def _text_of(element: Any) -> str:
    """Return the text of an element's runs, without the readings of East Asian words and the fields of a slide."""
    pieces: list[str] = []
    for run in element.iter("{*}t", "{*}br"):
        if _local_name(run) == "br":
            pieces.append("\n")
        elif not _has_ancestor(run, "rPh", "fld"):
            pieces.append(run.text or "")
    return "".join(pieces)


def _has_ancestor(element: Any, *names: str) -> bool:
    return any(_local_name(ancestor) in names for ancestor in element.iterancestors())


def _relationship_id(element: Any) -> str:
    """Return the id of the part that the element refers to; its namespace differs between editions of the format."""
    return next((value for key, value in element.items() if key.endswith("}id")), "")


def _local_name(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
