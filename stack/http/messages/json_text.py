"""JSON of values that models and clients wrote, in which integers may be of any size."""

import json
from typing import Any

import orjson


def to_json(value: Any) -> bytes:
    """Return a value of JSON as text. orjson refuses integers of more than 64 bits and lone surrogates."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
