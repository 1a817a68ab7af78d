"""HTML as text: plain lines for files, and pages with headings, lists and numbered links for the browser.

Runs in the child process of `extract.py`. Both forms share one lxml parser target, which keeps no tree: time and memory
are linear in the length of the input, however deep it nests.
"""

import re
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol, cast
from urllib.parse import urljoin

from providers.reader.encodings import decode_page

MAX_LINKS: Final = 1000
MAX_LINK_CHARS: Final = 64 * 1024
"""Maximum length of all links of a page together. Links beyond it keep their words and lose their number."""
CONTROL_CHARS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_URL_CHARS: Final = 2048
_MAX_TITLE_CHARS: Final = 200
_CPU_BUDGET_S: Final = 1.0
"""CPU time after which a page is truncated; half of the process's hard limit for pages."""
_FEED_BYTES: Final = 64 * 1024

_SKIPPED_TAGS: Final = frozenset(
    {"canvas", "iframe", "math", "noscript", "object", "script", "style", "svg", "template"}
)
_PAGE_SKIPPED_TAGS: Final = _SKIPPED_TAGS | {"applet", "audio", "datalist", "head", "video"}
_VOID_TAGS: Final = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)
_INLINE_TAGS: Final = frozenset(
    {"a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins", "kbd", "label"}
    | {"mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "img"}
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
_BLANKS: Final = re.compile(r"[\s\u200b\ufeff]+")


class _Parser(Protocol):
    def feed(self, data: bytes) -> None: ...
    def close(self) -> object: ...


class PageText(NamedTuple):
    """Text of a page. `[#1]`, `[#2]`, ... in `text` follow the words of a link and number the URLs of `links`.
    `is_truncated` is set when the page has more text."""

    title: str
    text: str
    links: list[str]
    is_truncated: bool


def html_to_lines(text: str) -> Iterator[str]:
    """Yield the visible text of an HTML file, one line per block element."""
    target = _LineTarget()
    for _ in _parse(text, target):
        yield from target.take_lines()
    target.end_line()
    yield from target.take_lines()


def html_to_page(data: bytes, url: str, charset: str | None, max_chars: int) -> PageText:
    """Return the text of the page at `url`, truncated to `max_chars`; `charset` is the one that the server named."""
    target = _PageTarget(url, max_chars)
    stop_at = time.process_time() + _CPU_BUDGET_S
    for _ in _parse(decode_page(data, charset), target):
        if target.is_full or time.process_time() > stop_at:
            return target.build_page(is_truncated=True)
    return target.build_page(is_truncated=False)


def _parse(text: str, target: "_LineTarget") -> Iterator[None]:
    """Feed `text` to `target` in blocks, and yield before each, so that the caller can stop."""
    from lxml import etree  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs, reportAttributeAccessIssue, reportUnknownVariableType] - lxml has no types; text needs none of it

    # Encoded again, so that a page cannot name one encoding to the decoder and another to the parser.
    data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    parser = cast(_Parser, etree.HTMLParser(target=target, encoding="utf-8", huge_tree=True))  # pyright: ignore[reportUnknownMemberType] - lxml has no types
    for start in range(0, len(data), _FEED_BYTES):
        yield
        parser.feed(data[start : start + _FEED_BYTES])
    if data:
        parser.close()


def text_to_page(data: bytes, charset: str | None, max_chars: int) -> PageText:
    """Return a page that is text already, truncated to `max_chars`."""
    text = decode_page(data, charset)
    lines = CONTROL_CHARS.sub(" ", text[:max_chars].replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    return PageText("", "\n".join(line.rstrip() for line in lines).strip("\n"), [], len(text) > max_chars)


class _LineTarget:
    """lxml parser target that collects visible text as plain lines: every tag that is not inline ends a line."""

    skipped_tags = _SKIPPED_TAGS

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line_parts: list[str] = []
        self._skipped_depth = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _VOID_TAGS:
            if not self._skipped_depth:
                self._add_void_tag(tag, attributes)
        elif self._skipped_depth or tag in self.skipped_tags or self._is_hidden(tag, attributes):
            self._skipped_depth += 1
        else:
            self._open_tag(tag, attributes)

    def end(self, tag: str) -> None:
        if tag in _VOID_TAGS:
            return
        if self._skipped_depth:
            self._skipped_depth -= 1
        else:
            self._close_tag(tag)

    def data(self, text: str) -> None:
        if not self._skipped_depth:
            self._line_parts.append(text)

    def comment(self, text: str) -> None:
        """Ignore comments."""

    def close(self) -> None:
        """Called by lxml at the end of the input."""

    def end_line(self) -> None:
        if line := " ".join("".join(self._line_parts).split()):
            self._lines.append(line)
        self._line_parts.clear()

    def take_lines(self) -> list[str]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _is_hidden(self, tag: str, attributes: Mapping[str, str]) -> bool:
        return False

    def _add_void_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag not in _INLINE_TAGS:
            self.end_line()

    def _open_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag not in _INLINE_TAGS:
            self.end_line()

    def _close_tag(self, tag: str) -> None:
        if tag not in _INLINE_TAGS:
            self.end_line()


class _PageTarget(_LineTarget):
    """Parser target for pages: also marks headings, list items, table cells, images and links, without hidden text."""

    skipped_tags = _PAGE_SKIPPED_TAGS

    def __init__(self, url: str, max_chars: int) -> None:
        super().__init__()
        self._url = url
        self._max_chars = max_chars
        self._char_count = 0
        self._line_has_text = False
        self._line_prefix = ""
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
        super().start(tag, attributes)

    def end(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        super().end(tag)

    def data(self, text: str) -> None:
        if self._in_title:
            self._title_parts.append(text[:_MAX_TITLE_CHARS])
        elif not self._skipped_depth and not self.is_full:
            self._add_text(text)

    def build_page(self, *, is_truncated: bool) -> PageText:
        self.end_line()
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        text = "\n".join(self._lines)
        title = _one_line("".join(self._title_parts)) or self._heading
        return PageText(
            title[:_MAX_TITLE_CHARS],
            text[: self._max_chars],
            list(self._link_numbers),
            is_truncated or len(text) > self._max_chars,
        )

    def _is_hidden(self, tag: str, attributes: Mapping[str, str]) -> bool:
        # Many pages hide their whole document until their scripts have run.
        if tag in ("html", "body"):
            return False
        return (
            "hidden" in attributes
            or attributes.get("aria-hidden") == "true"
            or _HIDDEN_STYLE.search((attributes.get("style") or "")[:4096]) is not None
        )

    def _add_void_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "br":
            self.end_line()
        elif tag == "hr":
            self._end_paragraph()
        elif tag == "img" and (words := _one_line(attributes.get("alt") or "")):
            self._add_text(f"[Image: {words}]")

    def _open_tag(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _PARAGRAPH_TAGS:
            self._end_paragraph()
        elif tag in _BLOCK_TAGS:
            self.end_line()
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
            self.end_line()
            self._pre_depth = max(0, self._pre_depth - 1)
        elif tag in ("h1", "h2") and not self._heading:
            self._heading = _one_line("".join(self._line_parts))
        elif tag in ("ul", "ol") and self._list_counters:
            self._list_counters.pop()
        if tag in _PARAGRAPH_TAGS:
            self._end_paragraph()
        elif tag in _BLOCK_TAGS:
            self.end_line()

    def _start_list_item(self) -> None:
        mark = "* "
        if self._list_counters and (number := self._list_counters[-1]) is not None:
            self._list_counters[-1] = number + 1
            mark = f"{number + 1}. "
        self._line_prefix = "  " * min(len(self._list_counters) - 1, 8) + mark

    def _end_link(self, url: str, chars_before: int) -> None:
        """Add the number of a link after its words. A link without words gets none."""
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

    def end_line(self) -> None:
        text, self._line_parts = CONTROL_CHARS.sub(" ", "".join(self._line_parts)), []
        self._line_has_text = False
        if self._pre_depth:
            self._lines += [line.rstrip() for line in text.strip("\n").split("\n")] if text.strip() else []
        elif text := _one_line(text):
            self._lines.append(self._line_prefix + text)
            self._line_prefix = ""

    def _end_paragraph(self) -> None:
        """End a line and add an empty one."""
        self.end_line()
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def _resolve_url(self, href: str) -> str:
        """Return the absolute URL of a link, empty for a link that does not lead to another page of the web."""
        href = href.strip()
        if not href or href.startswith("#") or len(href) > _MAX_URL_CHARS or CONTROL_CHARS.search(href):
            return ""
        try:
            url = urljoin(self._url, _BLANKS.sub("%20", href)).partition("#")[0]
        except ValueError:
            return ""
        return url if url.startswith(("http://", "https://")) and len(url) <= _MAX_URL_CHARS else ""


def _one_line(text: str) -> str:
    return _BLANKS.sub(" ", CONTROL_CHARS.sub(" ", text)).strip()
