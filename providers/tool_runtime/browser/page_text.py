"""A page as lines of text that a model can read. Run as a program it reads one page from stdin, within hard limits.

The program is what parses pages of strangers: a parser that loops, crashes or eats memory takes nothing along. It takes
a line of JSON (`kind`, `url`, `charset`, `max_chars`) and then the page's bytes, and gives `Page` as JSON.
"""

import codecs
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, cast
from urllib.parse import urljoin

from lxml import etree  # pyright: ignore[reportMissingTypeStubs, reportAttributeAccessIssue, reportUnknownVariableType] - lxml has no types

MAX_LINKS: Final = 1000
MAX_LINK_CHARS: Final = 64 * 1024
_MAX_URL_CHARS: Final = 2048
_MAX_TITLE_CHARS: Final = 200
_MAX_CPU_S: Final = 2
_CPU_BUDGET_S: Final = 1.0
_MAX_MEMORY_BYTES: Final = 1024 * 2**20
_FEED_BYTES: Final = 64 * 1024

_SKIPPED_TAGS: Final = frozenset(
    {
        "applet",
        "audio",
        "canvas",
        "datalist",
        "embed",
        "head",
        "iframe",
        "math",
        "noscript",
        "object",
        "script",
        "style",
    }
    | {"svg", "template", "video"}
)
_VOID_TAGS: Final = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)
_BLOCK_TAGS: Final = frozenset(
    {"address", "article", "aside", "body", "caption", "dd", "details", "dialog", "div", "dt", "fieldset", "figcaption"}
    | {"figure", "footer", "form", "header", "hgroup", "html", "legend", "li", "main", "nav", "option", "search"}
    | {"section", "summary", "tbody", "tfoot", "thead", "tr"}
)
_PARAGRAPH_TAGS: Final = frozenset(
    {"blockquote", "dl", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "ol", "p", "pre", "table", "ul"}
)
_HIDDEN_STYLE: Final = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_BLANKS: Final = re.compile(r"[\s\u200b\ufeff]+")
_META_CHARSET: Final = re.compile(rb"<meta[^>]{1,256}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:-]{1,40})", re.IGNORECASE)
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_BROWSER_CHARSETS: Final = frozenset(
    {"utf-8", "utf-16", "utf-16-le", "utf-16-be", "big5", "big5hkscs", "cp866", "cp874", "cp932", "cp949", "euc_jp"}
    | {"euc_kr", "gb18030", "gb2312", "gbk", "iso2022_jp", "koi8-r", "koi8-u", "mac-roman", "shift_jis"}
    | {f"cp125{number}" for number in range(9)}
    | {f"iso8859-{number}" for number in range(2, 17)}
)


class _Parser(Protocol):
    def feed(self, data: bytes) -> None: ...
    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class BrowserPage:
    """`text` refers to `links` as `[#1]`, `[#2]`, ... behind the words of each link. `cut` when there was more."""

    title: str
    text: str
    links: list[str] = field(default_factory=list[str])
    is_truncated: bool = False


def html_to_page(data: bytes, url: str, charset: str | None, max_chars: int) -> BrowserPage:
    """Reads HTML as far as `max_chars` of text. Time and memory are linear in its length, however deep it nests."""
    lines = _LineBuilder(url, max_chars)
    # Recoded, so that a page cannot name one encoding to us and another to the parser.
    recoded = _decode_text(data, charset).replace("\0", "\ufffd").encode("utf-8", "replace")
    parser = cast(_Parser, etree.HTMLParser(target=lines, encoding="utf-8", huge_tree=True))  # pyright: ignore[reportUnknownMemberType] - lxml has no types
    stop_at = time.process_time() + _CPU_BUDGET_S
    for start in range(0, len(recoded), _FEED_BYTES):
        if lines.is_full or time.process_time() > stop_at:
            return lines.build_page(is_truncated=True)
        parser.feed(recoded[start : start + _FEED_BYTES])
    if recoded:
        parser.close()
    return lines.build_page(is_truncated=False)


def text_to_page(data: bytes, charset: str | None, max_chars: int) -> BrowserPage:
    """Reads what is text already."""
    text = _decode_text(data, charset)
    lines = _CONTROL.sub(" ", text[:max_chars].replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    return BrowserPage("", "\n".join(line.rstrip() for line in lines).strip("\n"), is_truncated=len(text) > max_chars)


def _decode_text(data: bytes, charset: str | None) -> str:
    """By the byte order mark, or what the server or the page itself says; else UTF-8, or what was before it."""
    for mark, name in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    declared = _META_CHARSET.search(data, 0, 2048)
    for named in (charset, declared and declared[1].decode("ascii")):
        if named and (codec := _find_codec(named)):
            return data.decode(codec, "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _find_codec(name: str) -> str | None:
    """Python's codec of this name, where browsers have it too."""
    try:
        codec = codecs.lookup(name.strip().strip("\"'")).name
    except (LookupError, ValueError):
        return None
    if codec in ("ascii", "iso8859-1"):
        return "cp1252"
    return codec if codec in _BROWSER_CHARSETS else None


class _LineBuilder:
    """The parser's target: makes lines of its events. Knows nothing of the tree, so that depth costs nothing."""

    def __init__(self, url: str, max_chars: int) -> None:
        self._url = url
        self._max_chars = max_chars
        self._char_count = 0
        self._lines: list[str] = []
        self._line_parts: list[str] = []
        self._line_has_text = False
        self._line_prefix = ""
        self._skipped_depth = 0
        self._pre_depth = 0
        self._title_parts: list[str] = []
        self._in_title = False
        self._heading = ""
        self._list_counters: list[int | None] = []
        self._open_anchors: list[tuple[str, int]] = []
        self._link_numbers: dict[str, int] = {}
        self._link_chars = 0

    @property
    def is_full(self) -> bool:
        return self._char_count > self._max_chars

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "title":
            self._in_title = not self._title_parts
        elif tag == "base" and attributes.get("href"):
            self._url = self._resolve_url(attributes["href"]) or self._url
        if tag in _VOID_TAGS:
            if not self._skipped_depth:
                self._add_void_tag(tag, attributes)
        elif self._skipped_depth or tag in _SKIPPED_TAGS or _is_hidden(tag, attributes):
            self._skipped_depth += 1
        else:
            self._open_tag(tag, attributes)

    def end(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in _VOID_TAGS:
            return
        if self._skipped_depth:
            self._skipped_depth -= 1
        else:
            self._close_tag(tag)

    def data(self, text: str) -> None:
        if self._in_title:
            self._title_parts.append(text[:_MAX_TITLE_CHARS])
        elif not self._skipped_depth and not self.is_full:
            self._add_text(text)

    def comment(self, text: str) -> None:
        """What a page says to its makers."""

    def close(self) -> None:
        """The parser is done."""

    def build_page(self, *, is_truncated: bool) -> BrowserPage:
        """What was read."""
        self._end_line()
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        text = "\n".join(self._lines)
        title = _one_line("".join(self._title_parts)) or self._heading
        return BrowserPage(
            title[:_MAX_TITLE_CHARS],
            text[: self._max_chars],
            list(self._link_numbers),
            is_truncated or len(text) > self._max_chars,
        )

    def _add_void_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "br":
            self._end_line()
        elif tag == "hr":
            self._end_paragraph()
        elif tag == "img" and (words := _one_line(attributes.get("alt") or "")):
            self._add_text(f"[Image: {words}]")

    def _open_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _PARAGRAPH_TAGS:
            self._end_paragraph()
        elif tag in _BLOCK_TAGS:
            self._end_line()
        if tag in ("td", "th") and self._line_has_text:
            self._line_parts.append(" | ")
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self._line_prefix = "#" * int(tag[1]) + " "
        elif tag in ("ul", "ol"):
            self._list_counters.append(0 if tag == "ol" else None)
        elif tag == "li":
            self._start_list_item()
        elif tag == "pre":
            self._pre_depth += 1
        elif tag == "a":
            self._open_anchors.append((self._resolve_url(attributes.get("href") or ""), self._char_count))

    def _close_tag(self, tag: str) -> None:
        if tag == "a" and self._open_anchors:
            self._end_link(*self._open_anchors.pop())
        elif tag == "pre":
            self._end_line()
            self._pre_depth = max(0, self._pre_depth - 1)
        elif tag in ("h1", "h2") and not self._heading:
            self._heading = _one_line("".join(self._line_parts))
        elif tag in ("ul", "ol") and self._list_counters:
            self._list_counters.pop()
        if tag in _PARAGRAPH_TAGS:
            self._end_paragraph()
        elif tag in _BLOCK_TAGS:
            self._end_line()

    def _start_list_item(self) -> None:
        mark = "* "
        if self._list_counters and (number := self._list_counters[-1]) is not None:
            self._list_counters[-1] = number + 1
            mark = f"{number + 1}. "
        self._line_prefix = "  " * min(len(self._list_counters) - 1, 8) + mark

    def _end_link(self, url: str, chars_before: int) -> None:
        """Refers to a link behind its words; one without words is none for a reader."""
        if not url or self._char_count == chars_before:
            return
        number = self._link_numbers.get(url)
        if number is None:
            self._link_chars += len(url)
            if len(self._link_numbers) >= MAX_LINKS or self._link_chars > MAX_LINK_CHARS:
                return
            number = self._link_numbers[url] = len(self._link_numbers) + 1
        self._add_text(f"[#{number}]")

    def _add_text(self, text: str) -> None:
        chars = len(text) if self._pre_depth else len(text.strip())
        self._line_parts.append(text)
        self._line_has_text = self._line_has_text or chars > 0
        self._char_count += chars

    def _end_line(self) -> None:
        """Ends a line that was begun."""
        text, self._line_parts = _CONTROL.sub(" ", "".join(self._line_parts)), []
        self._line_has_text = False
        if self._pre_depth:
            self._lines += [line.rstrip() for line in text.strip("\n").split("\n")] if text.strip() else []
        elif text := _one_line(text):
            self._lines.append(self._line_prefix + text)
            self._line_prefix = ""

    def _end_paragraph(self) -> None:
        """Ends a line, and sets what follows apart from it."""
        self._end_line()
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def _resolve_url(self, href: str) -> str:
        """Empty for what does not lead to another page of the web."""
        href = href.strip()
        if not href or href.startswith("#") or len(href) > _MAX_URL_CHARS or _CONTROL.search(href):
            return ""
        try:
            url = urljoin(self._url, _BLANKS.sub("%20", href)).partition("#")[0]
        except ValueError:
            return ""
        return url if url.startswith(("http://", "https://")) and len(url) <= _MAX_URL_CHARS else ""


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    # Many pages hide all of themselves until their scripts have run.
    if tag in ("html", "body"):
        return False
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or _HIDDEN_STYLE.search((attributes.get("style") or "")[:4096]) is not None
    )


def _one_line(text: str) -> str:
    return _BLANKS.sub(" ", _CONTROL.sub(" ", text)).strip()


def _set_rlimits() -> None:
    """Where the system has such limits; elsewhere the time limit of whoever waits for us has to do."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415 - not there on every system

        resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    _set_rlimits()
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read()
    if asked["kind"] == "html":
        page = html_to_page(data, asked["url"], asked["charset"], asked["max_chars"])
    else:
        page = text_to_page(data, asked["charset"], asked["max_chars"])
    sys.stdout.write(json.dumps(asdict(page)))


if __name__ == "__main__":
    _main()
