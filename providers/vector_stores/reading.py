"""Reads the text out of a file, in a process of its own that may die of it."""

import asyncio
import importlib.util
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from apis.errors import ConfigError

_PROGRAM: Final = Path(__file__).with_name("extract.py")
_NEEDED: Final = ("docx", "lxml", "pypdf")
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV")
_MAX_CPU_S: Final = 30
_MAX_MEMORY_BYTES: Final = 1024 * 2**20
_WALL_S: Final = 60.0
_BROKEN: Final = "The file cannot be read: it is broken, not what its name says, or too much work."

ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]


class Unreadable(Exception):
    """A file has no text that can be had; the message is for whoever uploaded it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


def check_installed() -> None:
    """Raises ConfigError where a library that reads files is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"needs packages that are not installed ({', '.join(missing)}). Run: pip install 'responses-stack[files]'"
        )


async def file_to_text(name: str, data: bytes, max_chars: int) -> str:
    """The text of a file, of at most `max_chars`. Raises Unreadable. Takes a minute at most."""
    limits = {"max_cpu_s": _MAX_CPU_S, "max_memory_bytes": _MAX_MEMORY_BYTES}
    asked = json.dumps({"name": name, "max_chars": max_chars, **limits}).encode() + b"\n"
    try:
        async with asyncio.timeout(_WALL_S):
            answer = await _run(asked, data, max_answer_bytes=4 * max_chars + 4096)
    except TimeoutError:
        raise Unreadable("invalid_file", "The file takes too long to read.") from None
    head, _, text = answer.partition(b"\n")
    try:
        told: dict[str, Any] = json.loads(head)
    except ValueError:
        raise Unreadable("invalid_file", _BROKEN) from None
    if told:
        raise Unreadable(told["code"], told["message"])
    return text.decode()


async def _run(asked: bytes, data: bytes, *, max_answer_bytes: int) -> bytes:
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
            process.stdin.write(asked)
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
