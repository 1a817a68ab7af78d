"""Validation of a guest's replies about its files: the program that it runs may have written them."""

from collections.abc import Mapping
from mimetypes import MimeTypes
from typing import Any, Final, cast

MAX_FILES: Final = 20
MAX_FILES_BYTES: Final = 16 * 1024 * 1024
MAX_NAME_BYTES: Final = 255
_MAX_NUMBER: Final = 2**53

# Without the tables of the system, so that a name has the same type everywhere.
_MIME_TYPES: Final = MimeTypes()


def is_file_name(name: object) -> bool:
    """Return True for a relative path of printable characters that stays within its folder."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and "\\" not in name
        and len(name.encode()) <= MAX_NAME_BYTES
        and not any(step in ("", ".", "..") for step in name.split("/"))
    )


def guess_media_type(name: str) -> str:
    """Return the media type of a file by its extension, `application/octet-stream` for others."""
    return _MIME_TYPES.guess_type(name)[0] or "application/octet-stream"


def parse_file_list(reply: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return the files of a reply: name, bytes, and last write in seconds since 1970 (0 when absent)."""
    files: list[tuple[str, int, int]] = []
    for entry in _get_list(reply, "files"):
        match entry:
            case {"name": str(name), "size": int(size), **rest} if 0 <= size < _MAX_NUMBER:
                at: Any = rest.get("at")
                files.append((name, size, at if isinstance(at, int) and 0 <= at < _MAX_NUMBER else 0))
            case _:
                pass
    return files


def parse_returned_files(reply: Mapping[str, Any], data: bytes) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Return the files whose contents are concatenated in `data`, and the names of the files that were skipped."""
    files: list[tuple[str, bytes]] = []
    start = 0
    for name, size, _ in parse_file_list(reply)[:MAX_FILES]:
        if is_file_name(name):
            files.append((name, data[start : start + size]))
        start += size
    return files, [name for name in _get_list(reply, "skipped") if is_file_name(name)][:MAX_FILES]


def _get_list(reply: Mapping[str, Any], key: str) -> list[Any]:
    value: Any = reply.get(key)
    return cast(list[Any], value) if isinstance(value, list) else []
