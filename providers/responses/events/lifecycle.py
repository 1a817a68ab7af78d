"""The events that report an item's progress, built in one place: `response.ITEM_TYPE.PHASE` and their like."""

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from openai.types.responses import ResponseStreamEvent


def item_event(kind: str, item_id: str, index: int, **fields: Any) -> ResponseStreamEvent:
    """Return the event of this type about the item at `index` of the output, with the fields of its own.

    Like every event it has `sequence_number=0` until the response yields it.
    """
    return _event_classes()[kind](type=kind, item_id=item_id, output_index=index, sequence_number=0, **fields)


@cache
def _event_classes() -> Mapping[str, Any]:
    classes = get_args(get_args(ResponseStreamEvent)[0])
    return {get_args(event_class.model_fields["type"].annotation)[0]: event_class for event_class in classes}
