"""Files of a conversation's messages, as they are copied into the container of the code interpreter."""

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from apis.containers import Containers
from apis.errors import InvalidRequest, NotFound, Unsupported
from apis.wire.item_parts import InputFile
from apis.wire.items import InputMessage
from providers.responses.item_index import ItemIndex
from providers.responses.store.url_files import decode_fetched_file

_MAX_FILES: Final = 50
"""Most files that are copied, newest first; as many as a request may name in `container.file_ids`."""
_MAX_NAME_CHARS: Final = 120


@dataclass(frozen=True, slots=True)
class MessageFile:
    """File of a message. `key` identifies it in the record of what was copied: the id of an upload, or a hash. Without
    a `file_id` the part holds the bytes."""

    key: str
    part: InputFile

    @property
    def file_id(self) -> str | None:
        """Id of the upload; None for a file that came with the message."""
        return self.part.file_id

    def decode(self) -> tuple[str, bytes]:
        """Return the name and the bytes of a file without a `file_id`. Blocks; raise ValueError for bad base64."""
        document = decode_fetched_file(self.part)
        if document is not None:
            return _clean_name(self.part.filename or document.name), document.data
        head, comma, rest = (self.part.file_data or "").partition(",")
        try:
            data = base64.b64decode(rest if comma and head.startswith("data:") else self.part.file_data or "")
        except binascii.Error as exc:
            raise ValueError("the data is not base64") from exc
        return _clean_name(self.part.filename or ""), data


def find_message_files(items: ItemIndex) -> list[MessageFile]:
    """Return the files of the messages of users, oldest first, each once."""
    files: dict[str, MessageFile] = {}
    for part in _file_parts(items):
        key = part.file_id or f"message_{_hash_part(part)}"
        files.pop(key, None)
        files[key] = MessageFile(key, part)
    return list(files.values())[-_MAX_FILES:]


def has_message_files(items: ItemIndex) -> bool:
    """Return whether the messages bring files."""
    return next(_file_parts(items), None) is not None


def _unused_name(name: str, used_names: set[str]) -> str:
    """Return the name, with a number where another file has it: `data.csv`, `data-2.csv`."""
    path = PurePosixPath(name)
    number, free = 1, name
    while free in used_names:
        number += 1
        free = f"{path.stem}-{number}{path.suffix}"
    return free


def _file_parts(items: ItemIndex) -> Iterator[InputFile]:
    for item in items.of(InputMessage):
        if not isinstance(item.content, str):
            yield from (part for part in item.content if isinstance(part, InputFile))


def _hash_part(part: InputFile) -> str:
    content = (part.filename, part.file_data, part.file_url)
    return hashlib.sha256(repr(content).encode(errors="surrogatepass")).hexdigest()[:32]


def _clean_name(name: str) -> str:
    """Return the last part of a name in printable characters, as a file of a container may have it."""
    last = PurePosixPath(name.replace("\\", "/")).name
    printable = "".join(char for char in last if char.isprintable()).lstrip(".")
    path = PurePosixPath(printable)
    return f"{path.stem[:_MAX_NAME_CHARS]}{path.suffix[:20]}" if printable else "file"


async def copy_message_files(
    files: Sequence[MessageFile], containers: Containers, container_id: str, *, tenant: str
) -> str:
    """Copy the files into the container and return a notice for the model: their names there, and what could not be
    copied and why. Raise StackError where the container cannot be used."""
    names: set[str] = set()
    failures: list[str] = []
    for file in files:
        try:
            if file.file_id is not None:
                copied = await containers.copy_file(container_id, file.file_id, tenant=tenant)
            else:
                name, data = await asyncio.to_thread(file.decode)
                copied = await containers.add_file(container_id, _unused_name(name, names), data, tenant=tenant)
            names.add(PurePosixPath(copied.path).name)
        except (InvalidRequest, NotFound, Unsupported, ValueError) as exc:
            failures.append(f"{_clean_name(file.part.filename or file.file_id or '')} ({exc})")
    notices = [f"[files of the messages are in the current folder: {', '.join(sorted(names))}]\n"] if names else []
    if failures:
        notices.append(f"[files of the messages that could not be copied: {', '.join(failures)}]\n")
    return "".join(notices)
