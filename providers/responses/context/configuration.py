"""What items of a conversation change of the requests that come after them."""

from collections.abc import Sequence

from apis.responses import CreateResponse, ReasoningOptions, TextOptions
from apis.wire.items import ConfigurationUpdate, Item


def apply_configuration_updates(request: CreateResponse, items: Sequence[Item]) -> CreateResponse:
    """The request with the effort and the text format that its conversation came to."""
    updates = [item for item in items if isinstance(item, ConfigurationUpdate)]
    efforts = [item.reasoning.effort for item in updates if item.reasoning is not None]
    formats = [item.text.format for item in updates if item.text is not None]
    changed: dict[str, object] = {}
    if efforts:
        reasoning = request.reasoning or ReasoningOptions()
        changed["reasoning"] = reasoning.model_copy(update={"effort": efforts[-1]})
    if formats:
        text = request.text or TextOptions()
        changed["text"] = text.model_copy(update={"format": formats[-1]})
    return request.model_copy(update=changed) if changed else request
