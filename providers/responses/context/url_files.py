"""Files that an input names by URL, kept in the part that names them: a chain goes on with what its first model saw,
whatever became of the URL since. Clients are shown the part as they sent it.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from apis.reader import Document
from apis.wire.item_parts import GivenContent, InputFile, InputImage, InputText
from apis.wire.items import CustomToolCallOutput, FunctionCallOutput, GivenMessage, Item

Attached = InputFile | InputImage
FIELD: Final = "stack_fetched"


def with_fetched(part: Attached, document: Document) -> Attached:
    """The part with its file."""
    kept = {"name": document.name, "data": base64.b64encode(document.data).decode()}
    return part.model_copy(update={FIELD: kept})


def fetched(part: Attached) -> Document | None:
    """The file that is kept with the part, if there is one."""
    match (part.model_extra or {}).get(FIELD):
        case {"name": str(name), "data": str(data)}:
            try:
                return Document(name, base64.b64decode(data, validate=True))
            except (binascii.Error, ValueError):
                return None
        case _:
            return None


def with_parts(item: Item, parts: Mapping[Attached, Attached]) -> Item:
    """The item with parts of it replaced."""
    match item:
        case GivenMessage(content=list() as content):
            return item.model_copy(update={"content": [_replaced(part, parts) for part in content]})
        case FunctionCallOutput(output=list() as output) | CustomToolCallOutput(output=list() as output):
            return item.model_copy(update={"output": [_replaced(part, parts) for part in output]})
        case _:
            return item


def _replaced(part: GivenContent, parts: Mapping[Attached, Attached]) -> GivenContent:
    return part if isinstance(part, InputText) else parts.get(part, part)


def as_given(item: dict[str, Any]) -> dict[str, Any]:
    """A stored item as clients are shown it."""
    for field in ("content", "output"):
        if isinstance(item.get(field), list):
            parts: list[dict[str, Any]] = item[field]
            for part in parts:
                part.pop(FIELD, None)
    return item
