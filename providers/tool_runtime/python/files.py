"""What a guest says of its files, checked: everything it sends was written by the program it runs."""

from collections.abc import Mapping
from mimetypes import MimeTypes
from typing import Any, Final, cast

MAX_FILES: Final = 20
MAX_FILES_BYTES: Final = 16 * 1024 * 1024
MAX_NAME_BYTES: Final = 255
_MAX_NUMBER: Final = 2**53

# Without the system's own tables, so that a name means the same type everywhere.
_MIME_TYPES: Final = MimeTypes()


def is_file_name(name: object) -> bool:
    """Whether it is a relative path of printable characters that stays below where it begins."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and "\\" not in name
        and len(name.encode()) <= MAX_NAME_BYTES
        and not any(step in ("", ".", "..") for step in name.split("/"))
    )


def guess_media_type(name: str) -> str:
    """By the name's ending; what is not known is bytes."""
    return _MIME_TYPES.guess_type(name)[0] or "application/octet-stream"


def parse_file_list(reply: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """The files of a reply: name, bytes, and seconds since 1970 when it was written last, 0 where that is not told."""
    found: list[tuple[str, int, int]] = []
    for entry in _get_list(reply, "files"):
        match entry:
            case {"name": str(name), "size": int(size), **rest} if 0 <= size < _MAX_NUMBER:
                at: Any = rest.get("at")
                found.append((name, size, at if isinstance(at, int) and 0 <= at < _MAX_NUMBER else 0))
            case _:
                pass
    return found


def parse_returned_files(reply: Mapping[str, Any], data: bytes) -> tuple[list[tuple[str, bytes]], list[str]]:
    """The files whose contents stand in `data` one after the other; and the names of those that were left out."""
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
