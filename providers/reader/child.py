"""ChildReader: a Reader that parses each file and page in a child process with limits on time and memory."""

import asyncio
import importlib.util
import json
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import Field, TypeAdapter

from apis.documents.fetcher import Fetcher, FetchRequest
from apis.documents.files import Files
from apis.documents.page_images import MAX_PAGE_IMAGES, PageImagesParams
from apis.documents.reader import (
    ChunkedText,
    Document,
    FetchedPage,
    PageImage,
    PageImages,
    Reader,
    UnreadableFile,
    WebPage,
)
from apis.errors import ConfigError, FetchFailed, Unsupported
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.imports import install_command
from apis.provider import Provider
from providers.common.machine import usable_cores
from providers.common.processes.child import run_program
from providers.reader.confinement import ReaderConfinement, choose_confinement

_REQUIRED_PACKAGES: Final = ("docx", "lxml", "pypdf")
_MAX_FILE_CPU_S: Final = 30
_MAX_PAGE_CPU_S: Final = 2
_MAX_MEMORY_BYTES: Final = 256 * 2**20
_MAX_PDF_MEMORY_BYTES: Final = 512 * 2**20
"""Address space of a child in addition to the file itself."""
_PDF_SIGNATURE: Final = b"%PDF-"
_MAX_SIGNATURE_OFFSET: Final = 1024
_MAX_HEADER_BYTES: Final = 2**20
_TIMEOUT_S: Final = 60.0
_MIN_PARALLEL: Final = 2
_PAGE_ADAPTER: Final = TypeAdapter(WebPage)
_PLACES_ADAPTER: Final = TypeAdapter(list[int])
_BROKEN_FILE_MESSAGE: Final = "The file cannot be read: it is broken, not what its name says, or too much work."
_NO_PDF_MESSAGE: Final = "The file is no PDF: of other files no pages are shown."
_MAX_DRAWING_CPU_S: Final = 10
_MAX_PICTURES_BYTES: Final = MAX_PAGE_IMAGES * 5 * 2**20
"""The size of pictures whose pixels are noise, which no compression makes smaller."""
_SIZES_ADAPTER: Final = TypeAdapter(list[tuple[int, int, int]])
_HTTP_OK: Final = 200


class ChildReader(Reader):
    """Reads text, HTML, CSV, JSON, PDF, DOCX, XLSX and PPTX, at most `parallel` files at a time, in turn by tenant.
    Pages are not counted: each takes at most two seconds of CPU time, and must not wait for files."""

    class Config(Provider.Config):
        """`parallel` files are read at a time, by default as many as there are cores, and two at least. Where there are
        several tenants, one may use half of these places. `max_tenant_waiting` of its files may wait."""

        parallel: int | None = Field(default=None, ge=1, le=64)
        max_tenant_waiting: int = Field(default=64, ge=1)

    def __init__(self, config: Config, files: Files | None, fetcher: Fetcher, tenants: Tenants = ONE_TENANT) -> None:
        self._config = config
        self._files = files
        self._fetcher = fetcher
        self._tenants = tenants
        self._places = self._build_places(config.parallel or _MIN_PARALLEL)

    async def start(self) -> None:
        await asyncio.to_thread(choose_confinement)
        if self._config.parallel is None:
            self._places = self._build_places(max(_MIN_PARALLEL, await asyncio.to_thread(usable_cores)))

    def _build_places(self, count: int) -> FairShare:
        waiting = self._config.max_tenant_waiting
        several = self._tenants.are_several
        return FairShare("files to be read", count, tenant_waiting=waiting, several_tenants=several)

    def confinement(self) -> str:
        return choose_confinement().description

    def check(self) -> None:
        missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"needs packages that are not installed ({', '.join(missing)}). Run: {install_command('files')}"
            )

    async def extract_text(self, document: Document, max_chars: int, *, tenant: str = "") -> str:
        _, text = await self._extract_file(document, max_chars, tenant)
        return text

    async def extract_chunks(
        self, document: Document, max_chars: int, *, max_tokens: int, overlap_tokens: int, tenant: str = ""
    ) -> ChunkedText:
        sizes = [max_tokens, overlap_tokens]
        header, text = await self._extract_file(document, max_chars, tenant, chunk_sizes=sizes)
        try:
            places = _PLACES_ADAPTER.validate_python(header["chunks"])
        except (KeyError, ValueError):
            raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None
        chunks = [text[start:end] for start, end in zip(places[::2], places[1::2], strict=True)]
        return ChunkedText(text, chunks)

    async def _extract_file(
        self, document: Document, max_chars: int, tenant: str, **fields: Any
    ) -> tuple[dict[str, Any], str]:
        with await self._places.acquire(tenant):
            task = {"kind": "file", "name": document.name, "max_cpu_s": _MAX_FILE_CPU_S, **fields}
            return await _extract(task, document.data, max_chars)

    async def render_pages(self, document: Document, params: PageImagesParams, *, tenant: str = "") -> PageImages:
        if not _is_pdf(document.data):
            raise UnreadableFile("unsupported_file", _NO_PDF_MESSAGE)
        with await self._places.acquire(tenant):
            fields = {"first": params.first, "count": params.count, "width": params.width}
            task = {"kind": "pages", "max_cpu_s": _MAX_DRAWING_CPU_S, **fields}
            header, pictures = await _run_task(task, document.data, 0, _MAX_PICTURES_BYTES)
        try:
            page_count, sizes = int(header["page_count"]), _SIZES_ADAPTER.validate_python(header["sizes"])
        except (KeyError, ValueError):
            raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None
        ends = accumulate(length for _, _, length in sizes)
        pages = [
            PageImage(width, height, pictures[end - length : end])
            for (width, height, length), end in zip(sizes, ends, strict=True)
        ]
        return PageImages(page_count, pages)

    async def extract_page(self, page: FetchedPage, max_chars: int) -> WebPage:
        kind = "html" if page.is_html else "text"
        task = {"kind": kind, "url": page.url, "charset": page.charset, "max_cpu_s": _MAX_PAGE_CPU_S}
        header, text = await _extract(task, page.body, max_chars)
        try:
            return _PAGE_ADAPTER.validate_python({**header, "text": text})
        except ValueError:
            raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None

    async def load_upload(self, file_id: str, *, tenant: str) -> Document:
        if self._files is None:
            raise Unsupported("This server keeps no files: its config has no section `files`.", code="not_configured")
        file = await self._files.get(file_id, tenant=tenant)
        return Document(file.filename, await self._files.read(file_id, tenant=tenant))

    async def fetch_file(self, url: str) -> Document:
        response = await self._fetcher.fetch(FetchRequest(url))
        if response.status != _HTTP_OK:
            raise FetchFailed(f"The server answered with the status {response.status}.")
        name = PurePosixPath(unquote(urlsplit(response.url).path)).name
        if "." not in name and "html" in response.headers.get("content-type", ""):
            name = f"{name or 'page'}.html"
        return Document(name or "file", response.body)


def _is_pdf(data: bytes) -> bool:
    return _PDF_SIGNATURE in data[:_MAX_SIGNATURE_OFFSET]


async def _extract(task: dict[str, Any], data: bytes, max_chars: int) -> tuple[dict[str, Any], str]:
    """Return the header and the text of the child's output. Raises UnreadableFile."""
    header, text = await _run_task(task, data, max_chars, 6 * max_chars)
    try:
        return header, text.decode()
    except ValueError:
        raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None


async def _run_task(
    task: dict[str, Any], data: bytes, max_chars: int, max_result_bytes: int
) -> tuple[dict[str, Any], bytes]:
    """Return the header of the child's output, and what follows it. Raises UnreadableFile."""
    max_memory_bytes = (_MAX_PDF_MEMORY_BYTES if _is_pdf(data) else _MAX_MEMORY_BYTES) + len(data)
    confinement = await asyncio.to_thread(choose_confinement)
    limits = {"max_chars": max_chars, "max_memory_bytes": max_memory_bytes, "size": len(data)}
    header = json.dumps({**task, **limits, **confinement.task}).encode() + b"\n"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output = await _run_program(
                confinement, header, data, max_output_bytes=max_result_bytes + _MAX_HEADER_BYTES
            )
    except TimeoutError:
        raise UnreadableFile("invalid_file", "The file takes too long to read.") from None
    header_line, _, result = output.partition(b"\n")
    try:
        header = json.loads(header_line)
    except ValueError:
        raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None
    if "code" in header:
        raise UnreadableFile(header["code"], header["message"])
    return header, result


async def _run_program(confinement: ReaderConfinement, task: bytes, data: bytes, *, max_output_bytes: int) -> bytes:
    """Return the whole output of the program, empty when it died. A caller that is cancelled ends the program."""
    with confinement.launch() as (command, descriptors):
        return await run_program(command, (task, data), descriptors=descriptors, max_output_bytes=max_output_bytes)
