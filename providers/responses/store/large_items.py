"""Stored items as dicts whose large texts stay JSON: a page of them is written without a decoded copy of each text."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson

from providers.common.fair_turns import run_long

LARGE_BYTES: Final = 256 * 1024
"""Bytes of a stored value that is decoded, or left as JSON, in a turn of the tenant's."""
_LEVELS: Final = 2
"""Levels below the fields of an item that its views may change: the entries of a field, and the fields of an entry."""

decode_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def decode_item(item: msgspec.Raw) -> dict[str, Any]:
    """Return a stored item. Large texts, and large values that no view changes, are fragments of JSON; each pass over a
    large value is a turn of its own. Raises a ValueError for bytes that are no item.

    Reasoning is decoded whole, because its text may have to be sealed.
    """
    if len(item) <= LARGE_BYTES:
        return orjson.loads(memoryview(item))
    fields = await run_long(_decode_fields, item)
    if bytes(fields.get("type", msgspec.Raw())) == b'"reasoning"':
        return await run_long(orjson.loads, memoryview(item))
    return {name: await _decode(value, _LEVELS) for name, value in fields.items()}


async def _decode(value: msgspec.Raw, levels: int) -> Any:
    view = memoryview(value)
    if len(view) <= LARGE_BYTES:
        return orjson.loads(view)
    if levels and view[0] == ord("{"):
        fields = await run_long(_decode_fields, value)
        return {name: await _decode(field, levels - 1) for name, field in fields.items()}
    if levels and view[0] == ord("["):
        return await _decode_entries(await run_long(decode_raw_items, value), levels - 1)
    return orjson.Fragment(await run_long(bytes, view))


async def _decode_entries(entries: Sequence[msgspec.Raw], levels: int) -> Sequence[Any]:
    small = [bytes(entry) for entry in entries if len(entry) <= LARGE_BYTES]
    decoded = iter(await run_long(orjson.loads, b"[%b]" % b",".join(small)))  # at once: there may be very many
    return [next(decoded) if len(entry) <= LARGE_BYTES else await _decode(entry, levels) for entry in entries]
