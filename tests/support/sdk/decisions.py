"""Requests for decisions that are as short as they can be."""

from typing import Any, Final

DECISION_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "/decisions": {"input": "hi", "questions": [{"type": "predicate", "instructions": "hi"}]},
    "/systemone": {"state": "hi", "questions": {"q": {"type": "noul", "instructions": "hi"}}},
}
"""The fields but the model, by the path of the route."""

PIXEL: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
"""An image of one pixel."""
