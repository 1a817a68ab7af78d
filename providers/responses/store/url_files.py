"""Files that an input names by URL, stored in the part that names them: later turns read the same file, even if the
URL has changed since. Clients see the part as they sent it.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from apis.documents.reader import Document
from apis.wire.computer import ComputerCallOutput
from apis.wire.item_parts import InputAudio, InputContentPart, InputFile, InputImage, InputText
from apis.wire.items import CustomToolCallOutput, FunctionCallOutput, InputMessage, Item

AttachedPart = InputFile | InputImage
FETCHED_FIELD: Final = "stack_fetched"
"""Extra field of a stored part that holds the file; clients never see it."""


def attach_fetched_file(part: AttachedPart, document: Document) -> AttachedPart:
    """Return the part with its file."""
    file = {"name": document.name, "data": base64.b64encode(document.data).decode()}
    return part.model_copy(update={FETCHED_FIELD: file})


def decode_fetched_file(part: AttachedPart) -> Document | None:
    """Return the file that is stored in the part; None where there is none."""
    match (part.model_extra or {}).get(FETCHED_FIELD):
        case {"name": str(name), "data": str(data)}:
            try:
                return Document(name, base64.b64decode(data, validate=True))
            except (binascii.Error, ValueError):
                return None
        case _:
            return None


def replace_parts(item: Item, replacements: Mapping[AttachedPart, AttachedPart]) -> Item:
    """Return the item with its parts replaced."""
    match item:
        case InputMessage(content=list() as content):
            return item.model_copy(update={"content": [_replace_part(part, replacements) for part in content]})
        case FunctionCallOutput(output=list() as output) | CustomToolCallOutput(output=list() as output):
            return item.model_copy(update={"output": [_replace_part(part, replacements) for part in output]})
        case ComputerCallOutput(output=screenshot):
            return item.model_copy(update={"output": replacements.get(screenshot, screenshot)})
        case _:
            return item


def _replace_part(part: InputContentPart, replacements: Mapping[AttachedPart, AttachedPart]) -> InputContentPart:
    return part if isinstance(part, InputText | InputAudio) else replacements.get(part, part)


def file_parts(item: Item) -> Sequence[tuple[AttachedPart, str]]:
    """Return the files and images of an item, each with its location in the item."""
    if isinstance(item, ComputerCallOutput):
        return [(item.output, "output")]
    return [(part, location) for part, location in _located_parts(item) if isinstance(part, InputFile | InputImage)]


def audio_parts(item: Item) -> Sequence[tuple[InputAudio, str]]:
    """Return the audio of an item, each with its location in the item."""
    return [(part, location) for part, location in _located_parts(item) if isinstance(part, InputAudio)]


def _located_parts(item: Item) -> Iterator[tuple[InputContentPart, str]]:
    """Yield the parts of a message or of the output of a call."""
    match item:
        case InputMessage(content=list() as parts):
            field, content = "content", parts
        case FunctionCallOutput(output=list() as parts) | CustomToolCallOutput(output=list() as parts):
            field, content = "output", parts
        case _:
            return
    yield from ((part, f"{field}[{index}]") for index, part in enumerate(content))


def public_item(item: dict[str, Any]) -> dict[str, Any]:
    """Remove the stored files from an item, give each image the `detail` that the SDK's type requires, and return it as
    clients see it."""
    for field in ("content", "output"):
        if isinstance(item.get(field), list):
            parts: list[dict[str, Any]] = item[field]
            for part in parts:
                part.pop(FETCHED_FIELD, None)
                if part.get("type") == "input_image":
                    part.setdefault("detail", "auto")
    if isinstance(item.get("output"), dict):  # a screenshot
        item["output"].pop(FETCHED_FIELD, None)
    return item
