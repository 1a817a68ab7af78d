"""Program that extracts the text of one file or page from outside, or draws the pages of a PDF, in a process of its own
with hard limits.

A parser that loops, crashes or exhausts memory ends with this process. Input: one line of JSON (`kind`: file, html,
text or pages; the limits; `name` of a file, and `chunk_sizes` where its chunks are requested; `url` and `charset` of a
page; `first`, `count` and `width` of pictures), then the bytes. Output: one line of JSON (of a page `title`, `links`
and `is_truncated`; of a file `chunks`, the start and the end of each in turn; of pictures `page_count` and `sizes`; of
a failure `code` and `message`), then the text in UTF-8, or the pictures. No archive is unpacked to disk, nothing is
fetched and no script is run. Where bubblewrap does not hold the process, it confines itself before it reads the bytes.
"""

import csv
import json
import os
import re
import sys
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Final, cast

if __name__ == "__main__":
    # `python -I` searches neither this folder nor the one that `providers` is in.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from providers.common.processes.limits import limit_process
from providers.reader.chunks import find_chunks
from providers.reader.encodings import decode_text
from providers.reader.errors import ExtractionError
from providers.reader.html_text import CONTROL_CHARS, html_to_lines, html_to_page, text_to_page
from providers.reader.office_text import office_to_lines
from providers.reader.page_images import render_pages
from providers.reader.self_confinement import confine

MAX_PAGES: Final = 5000
_MAX_UNPACKED_BYTES: Final = 128 * 2**20
_MAX_PARTS: Final = 5000
_OBJECT_HEAD: Final = re.compile(rb"(?<![0-9])([0-9]{1,10}) ([0-9]{1,5}) obj\b")
_MAX_COLUMNS: Final = 1000
"""Columns that the cells of one row of a table may span together; the parser makes an object for each."""


def file_to_text(name: str, data: bytes, max_chars: int) -> str:
    """Return the text of a file, whose type is that of its bytes, or of its name's ending. Raises ExtractionError."""
    lines: list[str] = []
    size = 0
    for line in _file_to_lines(name.rpartition(".")[2].lower(), data):
        size += len(line) + 1
        if size > max_chars:
            raise ExtractionError("invalid_file", f"The file has more than {max_chars} characters of text.")
        lines.append(line)
    text = CONTROL_CHARS.sub(" ", "\n".join(lines).replace("\r\n", "\n").replace("\r", "\n"))
    if not text.strip():
        raise ExtractionError(
            "invalid_file", "The file has no text. Scanned pages would have to be read by a model first."
        )
    return text.strip()


def _file_to_lines(ending: str, data: bytes) -> Iterable[str]:
    if b"%PDF-" in data[:1024]:
        return _pdf_to_lines(data)
    if data.startswith(b"PK\x03\x04"):
        return office_to_lines(data) or _docx_to_lines(data)
    text = decode_text(data)
    if text is None:
        raise ExtractionError(
            "unsupported_file",
            "The file is neither text nor PDF nor an Office document, or it is text in an encoding that cannot be "
            "told: save it as UTF-8.",
        )
    if ending in ("html", "htm", "xhtml") or re.match(r"\s*<(!doctype html|html)\b", text[:1000], re.IGNORECASE):
        return html_to_lines(text)
    if ending in ("csv", "tsv"):
        return _csv_to_lines(text)
    if ending == "json":
        return _json_to_lines(text)
    return [text]


def _pdf_to_lines(data: bytes) -> Iterator[str]:
    import pypdf  # noqa: PLC0415 - half a second, only for PDF
    from pypdf.errors import PdfReadError  # noqa: PLC0415 - as above

    try:
        reader = pypdf.PdfReader(BytesIO(data), strict=False)
    except PdfReadError:
        reader = pypdf.PdfReader(BytesIO(_with_trailer(data)), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ExtractionError("invalid_file", "The PDF is encrypted. Upload it without its password.")
    if len(reader.pages) > MAX_PAGES:
        raise ExtractionError("invalid_file", f"The PDF has more than {MAX_PAGES} pages.")
    for page in reader.pages:
        yield page.extract_text()
        yield ""


def _with_trailer(data: bytes) -> bytes:
    """Return a PDF that has lost its table of objects or its end, with an end by which the parser looks for them."""
    catalog = data.rfind(b"/Catalog")
    heads = [*_OBJECT_HEAD.finditer(data, max(0, catalog - 1024), max(0, catalog))]
    trailer = b"trailer\n<< /Root %b %b R >>\n" % heads[-1].groups() if heads else b""
    return b"%b\n%bstartxref\n0\n%%%%EOF\n" % (data, trailer)


def _docx_to_lines(data: bytes) -> Iterator[str]:
    import docx  # noqa: PLC0415 - a quarter of a second, only for DOCX
    from docx.oxml.ns import qn  # noqa: PLC0415 - as above
    from docx.table import Table  # noqa: PLC0415 - as above

    with zipfile.ZipFile(BytesIO(data)) as parts:
        infos = parts.infolist()
        if "word/document.xml" not in parts.namelist():
            raise ExtractionError(
                "unsupported_file", "The file is an archive; of those, only DOCX, XLSX and PPTX are read."
            )
        if len(infos) > _MAX_PARTS or sum(info.file_size for info in infos) > _MAX_UNPACKED_BYTES:
            raise ExtractionError("invalid_file", f"The DOCX unpacks to more than {_MAX_UNPACKED_BYTES} bytes.")
    document = docx.Document(BytesIO(data))
    body = cast("Any", document.element).body
    for row in body.iter(qn("w:tr")):
        if sum(map(int, row.xpath("./w:tc/w:tcPr/w:gridSpan/@w:val"))) > _MAX_COLUMNS:
            raise ExtractionError("invalid_file", f"The DOCX has a table of more than {_MAX_COLUMNS} columns.")
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield " | ".join(dict.fromkeys(cell.text.strip() for cell in row.cells))
        else:
            yield block.text
        yield ""


def _csv_to_lines(text: str) -> Iterator[str]:
    """Yield each row with the names of its columns, so that a chunk of rows can be understood by itself."""
    csv.field_size_limit(2**20)
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    rows = csv.reader(StringIO(text, newline=""), delimiter=delimiter)
    names = next(rows, list[str]())
    if len(names) < 2:
        yield text
        return
    for row in rows:
        cells = zip(names, row, strict=False)
        yield ", ".join(f"{name.strip()}: {value.strip()}" for name, value in cells if value.strip())


def _json_to_lines(text: str) -> Iterator[str]:
    """Yield JSON with one value to a line, so that chunks end between values."""
    try:
        yield json.dumps(json.loads(text), ensure_ascii=False, indent=1)
    except (ValueError, RecursionError):
        yield text


def _find_faults(parent_pid: int) -> list[str]:
    """Return what a parser should not be able to do and this process can."""
    import _socket  # noqa: PLC0415 - for the probe alone

    def connect() -> None:
        _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM).close()

    def write_file() -> None:
        os.close(os.open(f"/tmp/reader-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # noqa: S108 - must fail

    attempts: dict[str, Callable[[], object]] = {
        "opening a socket": connect,
        "reading the server's environment": Path(f"/proc/{parent_pid}/environ").read_bytes,
        "writing a file": write_file,
        "signalling the server": lambda: os.kill(parent_pid, 0),
    }
    faults: list[str] = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        faults.append(name)
    return faults


def _run(task: dict[str, Any], data: bytes, layers: list[str]) -> tuple[dict[str, Any], bytes]:
    """Return the header of the output, and what follows it. `layers` are those by which the process confined itself.
    Raises ExtractionError."""
    if task["kind"] == "probe":
        return {"faults": _find_faults(task["parent_pid"]), "layers": layers}, b""
    if task["kind"] == "pages":
        return render_pages(data, task["first"], task["count"], task["width"])
    header, text = _extract(task, data)
    return header, text.encode("utf-8", "replace")


def _extract(task: dict[str, Any], data: bytes) -> tuple[dict[str, Any], str]:
    """Return the header of the output, and the text. Raises ExtractionError."""
    max_chars = task["max_chars"]
    if task["kind"] == "file":
        text = file_to_text(task["name"], data, max_chars)
        if "chunk_sizes" not in task:
            return {}, text
        return {"chunks": [place for span in find_chunks(text, *task["chunk_sizes"]) for place in span]}, text
    if task["kind"] == "html":
        page = html_to_page(data, task["url"], task["charset"], max_chars)
    else:
        page = text_to_page(data, task["charset"], max_chars)
    return {"title": page.title, "links": page.links, "is_truncated": page.is_truncated}, page.text


def _main() -> None:
    task: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    limit_process(task["max_memory_bytes"], task["max_cpu_s"])
    layers: list[str] = []
    if "confinement" in task:
        layers = confine(task["confinement"]["readable_paths"], b64decode(task["confinement"]["seccomp"]))
    result = b""
    try:
        header, result = _run(task, sys.stdin.buffer.read(task["size"]), layers)
    except ExtractionError as exc:
        header = {"code": exc.code, "message": str(exc)}
    except ModuleNotFoundError as exc:
        message = f"This server cannot read such files: the package {exc.name} is not installed."
        header = {"code": "server_error", "message": message}
    except MemoryError:
        header = {"code": "invalid_file", "message": "The file takes too much memory to read."}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + result)


if __name__ == "__main__":
    _main()
