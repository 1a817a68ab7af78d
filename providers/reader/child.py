"""Child: a Reader that parses each file and page in a child process with limits on time and memory."""

import asyncio
import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import Field, TypeAdapter

from apis.errors import ConfigError, FetchFailed, Unsupported
from apis.fair_share import ONE_TENANT, FairShare, Tenants
from apis.fetcher import Fetcher, FetchRequest
from apis.files import Files
from apis.imports import install_command
from apis.provider import Provider
from apis.reader import Document, FetchedPage, Reader, UnreadableFile, WebPage

_PROGRAM: Final = Path(__file__).with_name("extract.py")
_REQUIRED_PACKAGES: Final = ("docx", "lxml", "pypdf")
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Environment variables of the child. It gets no other, since they may hold secrets."""
_MAX_FILE_CPU_S: Final = 30
_MAX_PAGE_CPU_S: Final = 2
_MAX_MEMORY_BYTES: Final = 1024 * 2**20
_MAX_HEADER_BYTES: Final = 2**20
_TIMEOUT_S: Final = 60.0
_PAGE_ADAPTER: Final = TypeAdapter(WebPage)
_BROKEN_FILE_MESSAGE: Final = "The file cannot be read: it is broken, not what its name says, or too much work."
_HTTP_OK: Final = 200


class Child(Reader):
    """Reads text, HTML, CSV, JSON, PDF and DOCX, at most `parallel` files at a time, in turn by tenant. Pages are not
    counted: each takes at most two seconds of CPU time, and must not wait for files."""

    class Config(Provider.Config):
        """Where there are several tenants, one may use half of the `parallel` places. `max_tenant_waiting` of its files
        may wait."""

        parallel: int = Field(default=4, ge=1, le=64)
        max_tenant_waiting: int = Field(default=64, ge=1)

    def __init__(self, config: Config, files: Files | None, fetcher: Fetcher, tenants: Tenants = ONE_TENANT) -> None:
        self._files = files
        self._fetcher = fetcher
        self._places = FairShare(
            "files to be read",
            config.parallel,
            tenant_waiting=config.max_tenant_waiting,
            several_tenants=tenants.are_several,
        )

    def check(self) -> None:
        missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"needs packages that are not installed ({', '.join(missing)}). Run: {install_command('files')}"
            )

    async def extract_text(self, document: Document, max_chars: int, *, tenant: str = "") -> str:
        with await self._places.acquire(tenant):
            task = {"kind": "file", "name": document.name, "max_cpu_s": _MAX_FILE_CPU_S}
            _, text = await _extract(task, document.data, max_chars)
            return text

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


async def _extract(task: dict[str, Any], data: bytes, max_chars: int) -> tuple[dict[str, Any], str]:
    """Return the header and the text of the child's output. Raises UnreadableFile."""
    task = {**task, "max_chars": max_chars, "max_memory_bytes": _MAX_MEMORY_BYTES}
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output = await _run_program(
                json.dumps(task).encode() + b"\n", data, max_output_bytes=4 * max_chars + _MAX_HEADER_BYTES
            )
    except TimeoutError:
        raise UnreadableFile("invalid_file", "The file takes too long to read.") from None
    header_line, _, text = output.partition(b"\n")
    try:
        header, decoded_text = json.loads(header_line), text.decode()
    except ValueError:
        raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None
    if "code" in header:
        raise UnreadableFile(header["code"], header["message"])
    return header, decoded_text


async def _run_program(task: bytes, data: bytes, *, max_output_bytes: int) -> bytes:
    """Return the whole output of the program, empty when it died. A caller that is cancelled ends the program."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_PROGRAM)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = bytearray()
    try:
        with suppress(ConnectionError):
            process.stdin.write(task)
            process.stdin.write(data)
            await process.stdin.drain()
            process.stdin.close()
        while len(output) <= max_output_bytes and (chunk := await process.stdout.read(2**16)):
            output += chunk
        is_complete = len(output) <= max_output_bytes and await process.wait() == 0
        return bytes(output) if is_complete else b""
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # `wait` alone would never end while there is unread output.
        await process.communicate()
