"""JSON of values that models and clients wrote, in which integers may be of any size."""

import json
from typing import Any, cast

import orjson
from pydantic_core import from_json


def to_json(value: Any) -> bytes:
    """Return a value of JSON as text. orjson refuses integers of more than 64 bits and lone surrogates."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def parse_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Of arguments that were cut off, the whole part is there."""
    try:
        value: Any = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
