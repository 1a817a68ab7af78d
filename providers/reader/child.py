"""Child: reads the text out of a file, in a process of its own that may die of it."""

import asyncio
import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import Field

from apis.errors import ConfigError, FetchFailed, Unsupported
from apis.fetcher import Fetcher, FetchRequest
from apis.files import Files
from apis.provider import Provider
from apis.reader import Document, Reader, UnreadableFile

_PROGRAM: Final = Path(__file__).with_name("extract.py")
_REQUIRED_PACKAGES: Final = ("docx", "lxml", "pypdf")
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV")
_MAX_CPU_S: Final = 30
_MAX_MEMORY_BYTES: Final = 1024 * 2**20
_TIMEOUT_S: Final = 60.0
_BROKEN_FILE_MESSAGE: Final = "The file cannot be read: it is broken, not what its name says, or too much work."
_HTTP_OK: Final = 200


class Child(Reader):
    """Text, HTML, CSV, JSON, PDF and DOCX, each file by a child process of its own, `parallel` of them at a time."""

    class Config(Provider.Config):
        parallel: int = Field(default=4, ge=1, le=64)

    def __init__(self, config: Config, files: Files | None, fetcher: Fetcher) -> None:
        self._files = files
        self._fetcher = fetcher
        self._process_slots = asyncio.Semaphore(config.parallel)

    def check(self) -> None:
        missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"needs packages that are not installed ({', '.join(missing)}). "
                "Run: pip install 'responses-stack[files]'"
            )

    async def extract_text(self, document: Document, max_chars: int) -> str:
        async with self._process_slots:
            return await _file_to_text(document, max_chars)

    async def load_upload(self, file_id: str, *, tenant: str) -> Document:
        if self._files is None:
            raise Unsupported("This server keeps no files: its config has no section `files`.", code="not_configured")
        about = await self._files.get(file_id, tenant=tenant)
        return Document(about.filename, await self._files.read(file_id, tenant=tenant))

    async def fetch_file(self, url: str) -> Document:
        answer = await self._fetcher.fetch(FetchRequest(url))
        if answer.status != _HTTP_OK:
            raise FetchFailed(f"The server answered with the status {answer.status}.")
        name = PurePosixPath(unquote(urlsplit(answer.url).path)).name
        if "." not in name and "html" in answer.headers.get("content-type", ""):
            name = f"{name or 'page'}.html"
        return Document(name or "file", answer.body)


async def _file_to_text(document: Document, max_chars: int) -> str:
    limits = {"max_cpu_s": _MAX_CPU_S, "max_memory_bytes": _MAX_MEMORY_BYTES}
    asked = json.dumps({"name": document.name, "max_chars": max_chars, **limits}).encode() + b"\n"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await _run_extractor(asked, document.data, max_answer_bytes=4 * max_chars + 4096)
    except TimeoutError:
        raise UnreadableFile("invalid_file", "The file takes too long to read.") from None
    head, _, text = answer.partition(b"\n")
    try:
        told: dict[str, Any] = json.loads(head)
    except ValueError:
        raise UnreadableFile("invalid_file", _BROKEN_FILE_MESSAGE) from None
    if told:
        raise UnreadableFile(told["code"], told["message"])
    return text.decode()


async def _run_extractor(header: bytes, data: bytes, *, max_answer_bytes: int) -> bytes:
    """The whole answer of the program, empty where it died. Leaving early ends the program."""
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
        with suppress(ConnectionError):
            process.stdin.write(header)
            process.stdin.write(data)
            await process.stdin.drain()
            process.stdin.close()
        while len(answer) <= max_answer_bytes and (piece := await process.stdout.read(2**16)):
            answer += piece
        whole = len(answer) <= max_answer_bytes and await process.wait() == 0
        return bytes(answer) if whole else b""
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # Not `wait` alone, which never ends while there is something left to read.
        await process.communicate()
