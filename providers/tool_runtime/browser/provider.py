"""Browser: opens a page of the web as text, as one tool named `open_page`."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.message import Message
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from apis.errors import ToolFailed
from apis.fetcher import Fetcher, FetchRequest, FetchResponse
from apis.provider import Provider
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec
from providers.tool_runtime.search_results import SearchOptions, clean_line, validate_model

_PROGRAM: Final = Path(__file__).with_name("page_text.py")
_MAX_REPLY_BYTES: Final = 8 * 2**20
_ACCEPT: Final = "text/html,application/xhtml+xml,text/markdown,text/plain;q=0.9,application/json;q=0.9,*/*;q=0.5"
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_HTML_TYPES: Final = frozenset({"text/html", "application/xhtml+xml"})
_TEXT_TYPES: Final = frozenset(
    {"application/json", "application/xml", "application/javascript", "application/x-ndjson", "application/yaml"}
    | {"application/x-yaml", "application/toml", "application/sql", "application/x-sh", "application/rtf"}
)
_UNKNOWN_TYPES: Final = frozenset({"", "application/octet-stream", "unknown/unknown"})

_OPEN_PAGE: Final = ToolSpec(
    name="open_page",
    description=(
        "Open a page of the web. Gives its title, its URL and its text; [#1] behind words is a link, and the links are "
        "listed at the end."
    ),
    parameters={
        "type": "object",
        "properties": {"url": {"type": "string", "description": "The whole URL, beginning with http:// or https://."}},
        "required": ["url"],
        "additionalProperties": False,
    },
)

_BodyKind = Literal["html", "text"]


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    url: str = Field(min_length=1, max_length=8192)


class _Page(BaseModel):
    """What the program that reads pages answers."""

    title: str
    text: str
    links: list[str]
    is_truncated: bool


class Browser(ToolRuntime):
    """Opens pages through the stack's Fetcher: HTML, JSON, Markdown and every other text.

    A result's one source is the page, with the URL that the last redirect led to; `data` is `{"links": [url, ...],
    "cut": bool}`, where `[#1]` in the text means the first link. Options of a call: `allowed_domains` and
    `blocked_domains`, which hold for the page asked for and for the one that came, and `live: false`, which refuses
    every page.
    """

    class Config(Provider.Config):
        """`tool_timeout_s` bounds a whole call, `max_page_chars` the text of a page, `max_readers` the processes that
        read pages at a time."""

        tool_timeout_s: float = Field(default=20.0, gt=0, le=600)
        max_page_chars: int = Field(default=100_000, ge=1000, le=150_000)
        max_readers: int = Field(default=4, ge=1)

    def __init__(self, config: Config, fetcher: Fetcher) -> None:
        self._config = config
        self._fetcher = fetcher
        self._reader_slots = asyncio.Semaphore(config.max_readers)

    def tools(self) -> Sequence[ToolSpec]:
        return (_OPEN_PAGE,)

    async def call(self, call: ToolCall) -> ToolResult:
        if call.name != _OPEN_PAGE.name:
            raise ToolFailed(f"There is no tool '{clean_line(call.name, 64)}' here.")
        url = validate_model(_Arguments, call.arguments, "arguments").url
        options = validate_model(SearchOptions, call.options, "options")
        if options.live is False:
            raise ToolFailed("Pages of the live web cannot be opened: this request does not allow it.")
        _check_domain(url, options)
        try:
            async with asyncio.timeout(self._config.tool_timeout_s):
                fetched = await self._fetcher.fetch(FetchRequest(url, headers={"Accept": _ACCEPT}))
                _check_domain(fetched.url, options)
                page = await self._read_page(fetched)
        except TimeoutError:
            raise ToolFailed(f"The page could not be opened within {self._config.tool_timeout_s:g} s.") from None
        return _page_to_result(fetched.url, page)

    async def _read_page(self, fetched: FetchResponse) -> _Page:
        if fetched.status >= 400 or not 200 <= fetched.status < 300:
            raise ToolFailed(f"The page could not be opened: the server answered with HTTP {fetched.status}.")
        kind, charset = _detect_kind(fetched.headers, fetched.body)
        asked = {"kind": kind, "url": fetched.url, "charset": charset, "max_chars": self._config.max_page_chars}
        async with self._reader_slots:
            answer = await _run_reader(json.dumps(asked).encode() + b"\n" + fetched.body)
        try:
            page = _Page.model_validate_json(answer)
        except ValueError:
            # The program was killed at a limit of its own, or the parser died of the page.
            raise ToolFailed("The page cannot be read: it is too large, too deep or broken.") from None
        if not page.text.strip():
            raise ToolFailed("The page has no text. It may need a browser that runs scripts.")
        return page


def _check_domain(url: str, options: SearchOptions) -> None:
    if not options.permits_url(url):
        raise ToolFailed("This page is of a domain that the request does not allow.")


def _detect_kind(headers: Mapping[str, str], body: bytes) -> tuple[_BodyKind, str | None]:
    """How to read a body, and the charset that the server names. Raises ToolFailed for what is no text."""
    told = Message()
    told["content-type"] = headers.get("content-type", "")[:1000]
    named = told.get_content_charset()
    media_type = told.get_content_type() if headers.get("content-type") else ""
    if body.startswith(b"%PDF-") or media_type == "application/pdf":
        raise ToolFailed("The page is a PDF, which cannot be opened here. Look for the same text as a web page.")
    if media_type in _HTML_TYPES:
        return "html", named
    if media_type in _UNKNOWN_TYPES:
        if re.match(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body|!--)", body[:1024], re.IGNORECASE):
            return "html", named
        if b"\0" not in body[:1024]:
            return "text", named
    if media_type.startswith("text/") or media_type in _TEXT_TYPES or media_type.endswith(("+json", "+xml")):
        return "text", named
    raise ToolFailed(
        f"The page is no text but {clean_line(media_type, 100) or 'unknown data'}, which cannot be opened here."
    )


async def _run_reader(request: bytes) -> bytes:
    """The answer of the program, whatever there is of it. Leaving early ends the program."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_PROGRAM)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answer = bytearray()
    try:
        try:
            process.stdin.write(request)
            await process.stdin.drain()
            process.stdin.close()
        except ConnectionError:
            return b""
        while len(answer) < _MAX_REPLY_BYTES and (piece := await process.stdout.read(2**16)):
            answer += piece
        return bytes(answer)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # Not `wait`, which never ends while there is something left to read.
        await process.communicate()


def _page_to_result(url: str, page: _Page) -> ToolResult:
    title = clean_line(page.title, 200) or urlsplit(url).hostname or url
    text = f"{title}\n{url}\n\n{page.text}"
    if page.is_truncated:
        text += f"\n\n[The page is longer; these are its first {len(page.text)} characters.]"
    if page.links:
        text += "\n\nLinks:\n" + "\n".join(f"[#{number}] {link}" for number, link in enumerate(page.links, start=1))
    data: dict[str, Any] = {"links": page.links, "cut": page.is_truncated}
    return ToolResult(text, [Source(url, title, page.text)], data=data)
