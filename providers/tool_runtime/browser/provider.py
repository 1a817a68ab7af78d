"""Browser: the tool `open_page`, which opens a web page as text."""

import asyncio
import re
from collections.abc import Sequence
from email.message import Message
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from apis.documents.fetcher import Fetcher, FetchRequest, FetchResponse
from apis.documents.reader import FetchedPage, Reader, UnreadableFile, WebPage
from apis.errors import ToolFailed
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.provider import Provider
from apis.tool_runtime import Source, ToolCall, ToolResult, ToolRuntime, ToolSpec
from providers.tool_runtime.search_results import SearchOptions, clean_line, validate_model

_ACCEPT: Final = "text/html,application/xhtml+xml,text/markdown,text/plain;q=0.9,application/json;q=0.9,*/*;q=0.5"
_HTML_TYPES: Final = frozenset({"text/html", "application/xhtml+xml"})
_TEXT_TYPES: Final = frozenset(
    {"application/json", "application/xml", "application/javascript", "application/x-ndjson", "application/yaml"}
    | {"application/x-yaml", "application/toml", "application/sql", "application/x-sh", "application/rtf"}
)
_UNKNOWN_TYPES: Final = frozenset({"", "application/octet-stream", "unknown/unknown"})
_HTML_START: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body|!--)", re.IGNORECASE)

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


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    url: str = Field(min_length=1, max_length=8192)


class Browser(ToolRuntime):
    """Fetches pages with the stack's Fetcher and extracts their text (HTML, JSON, Markdown and others) with its Reader.

    A result has one source, the page, with the URL of the last redirect; `data` is `{"links": [url, ...], "cut":
    bool}`, where `[#1]` in the text stands for the first link. Options of a call: `allowed_domains` and
    `blocked_domains`, which apply to the requested URL and to that of the last redirect, and `live: false`, which
    refuses every page.
    """

    class Config(Provider.Config):
        """`tool_timeout_s` bounds a whole call, `max_page_chars` the text of a page, `max_readers` the pages whose text
        is extracted at a time, in turn by tenant."""

        tool_timeout_s: float = Field(default=20.0, gt=0, le=600)
        max_page_chars: int = Field(default=100_000, ge=1000, le=150_000)
        max_readers: int = Field(default=4, ge=1)

    def __init__(self, config: Config, fetcher: Fetcher, reader: Reader, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._fetcher = fetcher
        self._reader = reader
        self._reader_places = FairShare("pages to be read", config.max_readers, several_tenants=tenants.are_several)

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
                response = await self._fetcher.fetch(FetchRequest(url, headers={"Accept": _ACCEPT}))
                _check_domain(response.url, options)
                page = await self._extract_page(response, call.tenant)
        except TimeoutError:
            raise ToolFailed(f"The page could not be opened within {self._config.tool_timeout_s:g} s.") from None
        return _page_to_result(response.url, page)

    async def _extract_page(self, response: FetchResponse, tenant: str) -> WebPage:
        if not 200 <= response.status < 300:
            raise ToolFailed(f"The page could not be opened: the server answered with HTTP {response.status}.")
        fetched_page = _classify_response(response)
        try:
            with await self._reader_places.acquire(tenant):
                page = await self._reader.extract_page(fetched_page, self._config.max_page_chars)
        except UnreadableFile:
            raise ToolFailed("The page cannot be read: it is too large, too deep or broken.") from None
        if not page.text.strip():
            raise ToolFailed("The page has no text. It may need a browser that runs scripts.")
        return page


def _check_domain(url: str, options: SearchOptions) -> None:
    if not options.permits_url(url):
        raise ToolFailed("This page is of a domain that the request does not allow.")


def _classify_response(response: FetchResponse) -> FetchedPage:
    """Return the page with its kind and the charset that the server names. Raises ToolFailed for other than text."""
    body, content_type = response.body, response.headers.get("content-type", "")
    header = Message()
    header["content-type"] = content_type[:1000]
    media_type = header.get_content_type() if content_type else ""
    if body.startswith(b"%PDF-") or media_type == "application/pdf":
        raise ToolFailed("The page is a PDF, which cannot be opened here. Look for the same text as a web page.")
    is_unknown = media_type in _UNKNOWN_TYPES
    is_html = media_type in _HTML_TYPES or (is_unknown and _HTML_START.match(body[:1024]) is not None)
    is_text = (
        media_type.startswith("text/")
        or media_type in _TEXT_TYPES
        or media_type.endswith(("+json", "+xml"))
        or (is_unknown and b"\0" not in body[:1024])
    )
    if is_html or is_text:
        return FetchedPage(response.url, body, is_html, header.get_content_charset())
    raise ToolFailed(
        f"The page is no text but {clean_line(media_type, 100) or 'unknown data'}, which cannot be opened here."
    )


def _page_to_result(url: str, page: WebPage) -> ToolResult:
    title = clean_line(page.title, 200) or urlsplit(url).hostname or url
    text = f"{title}\n{url}\n\n{page.text}"
    if page.is_truncated:
        text += f"\n\n[The page is longer; these are its first {len(page.text)} characters.]"
    if page.links:
        text += "\n\nLinks:\n" + "\n".join(f"[#{number}] {link}" for number, link in enumerate(page.links, start=1))
    data: dict[str, Any] = {"links": list(page.links), "cut": page.is_truncated}
    return ToolResult(text, [Source(url, title, page.text)], data=data)
