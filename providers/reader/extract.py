"""The text of a file, whatever it is. Run as a program it reads one file from stdin, within hard limits.

The program is what parses files of strangers: a parser that loops, crashes or eats memory takes nothing along. It takes
a line of JSON (`name`, `max_chars` and the limits) and then the file's bytes, and gives a line of JSON (empty, or with
`code` and `message`) and then the text in UTF-8. Archives are not unpacked, nothing is fetched and no script is run.
"""

import csv
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from io import BytesIO, StringIO
from typing import Any, Final, Protocol, cast

MAX_PAGES: Final = 5000
_MAX_UNPACKED_BYTES: Final = 128 * 2**20
_MAX_PARTS: Final = 5000
_FEED_BYTES: Final = 64 * 1024
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SKIPPED_TAGS: Final = frozenset(
    {"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "canvas"}
)
_VOID_TAGS: Final = frozenset(
    {"br", "hr", "img", "input", "link", "meta", "area", "base", "col", "embed", "source", "wbr"}
)
_INLINE_TAGS: Final = frozenset(
    {"a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins", "kbd", "label"}
    | {"mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "img"}
)


class ExtractionError(Exception):
    """The file has no text that can be had. `code` is one of the API's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Parser(Protocol):
    def feed(self, data: bytes) -> None: ...
    def close(self) -> object: ...


def file_to_text(name: str, data: bytes, max_chars: int) -> str:
    """The text, by what the bytes are and, where they do not say, by the name's ending. Raises Refused."""
    lines: list[str] = []
    size = 0
    for line in _file_to_lines(name.rpartition(".")[2].lower(), data):
        size += len(line) + 1
        if size > max_chars:
            raise ExtractionError("invalid_file", f"The file has more than {max_chars} characters of text.")
        lines.append(line)
    text = _CONTROL_CHARS.sub(" ", "\n".join(lines).replace("\r\n", "\n").replace("\r", "\n"))
    if not text.strip():
        raise ExtractionError(
            "invalid_file", "The file has no text. Scanned pages would have to be read by a model first."
        )
    return text.strip("\n")


def _file_to_lines(ending: str, data: bytes) -> Iterable[str]:
    if b"%PDF-" in data[:1024]:
        return _pdf_to_lines(data)
    if data.startswith(b"PK\x03\x04"):
        return _docx_to_lines(data)
    text = _decode_text(data)
    if ending in ("html", "htm", "xhtml") or re.match(r"\s*<(!doctype html|html)\b", text[:1000], re.IGNORECASE):
        return _html_to_lines(text)
    if ending in ("csv", "tsv"):
        return _csv_to_lines(text)
    if ending == "json":
        return _json_to_lines(text)
    return [text]


def _decode_text(data: bytes) -> str:
    for mark, codec in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            return data[len(mark) :].decode(codec, "replace")
    if b"\0" in data:
        raise ExtractionError("unsupported_file", "The file is neither text nor PDF nor DOCX.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    if len(_CONTROL_CHARS.findall(text[:10_000])) > len(text[:10_000]) // 20:
        raise ExtractionError("unsupported_file", "The file is neither text nor PDF nor DOCX.")
    return text


def _pdf_to_lines(data: bytes) -> Iterator[str]:
    import pypdf  # noqa: PLC0415 - half a second that other files need not wait for

    reader = pypdf.PdfReader(BytesIO(data), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ExtractionError("invalid_file", "The PDF is encrypted. Upload it without its password.")
    if len(reader.pages) > MAX_PAGES:
        raise ExtractionError("invalid_file", f"The PDF has more than {MAX_PAGES} pages.")
    for page in reader.pages:
        yield page.extract_text()
        yield ""


def _docx_to_lines(data: bytes) -> Iterator[str]:
    import docx  # noqa: PLC0415 - a quarter of a second that other files need not wait for
    from docx.table import Table  # noqa: PLC0415 - as above

    with zipfile.ZipFile(BytesIO(data)) as parts:
        listed = parts.infolist()
        if "word/document.xml" not in parts.namelist():
            raise ExtractionError("unsupported_file", "The file is an archive; of those, only DOCX is read.")
        if len(listed) > _MAX_PARTS or sum(part.file_size for part in listed) > _MAX_UNPACKED_BYTES:
            raise ExtractionError("invalid_file", f"The DOCX unpacks to more than {_MAX_UNPACKED_BYTES} bytes.")
    for block in docx.Document(BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield " | ".join(dict.fromkeys(cell.text.strip() for cell in row.cells))
        else:
            yield block.text
        yield ""


def _csv_to_lines(text: str) -> Iterator[str]:
    """Each row with its column's names, so that it says by itself what it means."""
    csv.field_size_limit(2**20)
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    rows = csv.reader(StringIO(text, newline=""), delimiter=delimiter)
    names = next(rows, list[str]())
    if len(names) < 2:
        yield text
        return
    for row in rows:
        named = zip(names, row, strict=False)
        yield ", ".join(f"{name.strip()}: {value.strip()}" for name, value in named if value.strip())


def _json_to_lines(text: str) -> Iterator[str]:
    """A value to a line, so that chunks end between values."""
    try:
        yield json.dumps(json.loads(text), ensure_ascii=False, indent=1)
    except (ValueError, RecursionError):
        yield text


def _html_to_lines(text: str) -> Iterator[str]:
    """As it is read, without a tree: however deep it nests."""
    from lxml import etree  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs, reportAttributeAccessIssue, reportUnknownVariableType] - lxml has no types

    page = _HtmlTextTarget()
    parser = cast(_Parser, etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True))  # pyright: ignore[reportUnknownMemberType] - lxml has no types
    data = text.replace("\0", " ").encode("utf-8", "replace")
    for start in range(0, len(data), _FEED_BYTES):
        parser.feed(data[start : start + _FEED_BYTES])
        yield from page.take_lines()
    if data:
        parser.close()
    page.end_line()
    yield from page.take_lines()


class _HtmlTextTarget:
    """What lxml tells its events to."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line_parts: list[str] = []
        self._skipped_tag = ""
        self._skip_depth = 0

    def start(self, tag: str, attrib: object) -> None:
        if self._skipped_tag:
            self._skip_depth += tag == self._skipped_tag
        elif tag in _SKIPPED_TAGS:
            self._skipped_tag, self._skip_depth = tag, 1
        elif tag not in _INLINE_TAGS:
            self.end_line()

    def end(self, tag: str) -> None:
        if self._skipped_tag:
            self._skip_depth -= tag == self._skipped_tag
            if not self._skip_depth:
                self._skipped_tag = ""
        elif tag not in _INLINE_TAGS and tag not in _VOID_TAGS:
            self.end_line()

    def data(self, data: str) -> None:
        if not self._skipped_tag:
            self._line_parts.append(data)

    def close(self) -> None:
        pass

    def end_line(self) -> None:
        if words := " ".join("".join(self._line_parts).split()):
            self._lines.append(words)
        self._line_parts.clear()

    def take_lines(self) -> list[str]:
        done, self._lines = self._lines, []
        return done


def _set_limits(header: dict[str, Any]) -> None:
    """Where the system has such limits; elsewhere the time limit of whoever waits for us has to do."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not there on every system

        resource.setrlimit(resource.RLIMIT_CPU, (header["max_cpu_s"], header["max_cpu_s"]))
        resource.setrlimit(resource.RLIMIT_AS, (header["max_memory_bytes"], header["max_memory_bytes"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    _set_limits(asked)
    told: dict[str, str] = {}
    text = ""
    try:
        text = file_to_text(asked["name"], sys.stdin.buffer.read(), asked["max_chars"])
    except ExtractionError as exc:
        told = {"code": exc.code, "message": str(exc)}
    except ModuleNotFoundError as exc:
        message = f"This server cannot read such files: the package {exc.name} is not installed. "
        told = {"code": "server_error", "message": f"{message}Run: pip install 'responses-stack[files]'"}
    except MemoryError:
        told = {"code": "invalid_file", "message": "The file takes too much memory to read."}
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n" + text.encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
