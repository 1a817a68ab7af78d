"""Stored items of tools as calls and outputs that a model sees again. Pure functions.

The registry knows how each tool reads its own items. A hosted call is read from its item only where the store has no
result of it, because its client stores the conversation.
"""

from collections.abc import Mapping
from typing import Final

from apis.chat import CalledFunction, FunctionCall, ImagePart, ImageUrl, NativeToolName
from apis.documents.reader import relabel_image_url
from apis.wire.item_types import HOSTED_CALL_TYPES, REPLAYED_TYPES
from apis.wire.items import Item
from apis.wire.tool_items import ImageGenerationCallItem
from providers.common.fair_turns import do_in_turns
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.item_index import ItemIndex
from providers.responses.tools.models import ModelCatalog
from providers.responses.tools.registry import TYPES_BY_CALL_ITEM, TYPES_BY_OUTPUT_ITEM

_REWRITE_WORK: Final = 400
"""Work of reading one call, as `fair_turns` counts it."""


def item_to_client_call(item: Item) -> FunctionCall | None:
    """Return the call that an item of a client's typed tool stands for; None for any other item."""
    tool_type = TYPES_BY_CALL_ITEM.get(type(item))
    if tool_type is None or item.type in REPLAYED_TYPES:
        return None
    call = tool_type.functions.call_from_item(item, frozenset())
    if call is None:
        return None
    return FunctionCall(id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments))


def item_to_client_output(item: Item, call_ids: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the call id and the text of the output of a client's typed tool; None for any other item. `call_ids` maps
    ids of call items to their call ids."""
    tool_type = TYPES_BY_OUTPUT_ITEM.get(type(item))
    return None if tool_type is None else tool_type.functions.output_from_item(item, call_ids)


def item_to_tool_result(item: Item, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    """Return a hosted call and its output as the item alone shows them, for a model with these native tools; None for
    any other item, a call that did not run, and one whose item shows too little."""
    if item.type not in HOSTED_CALL_TYPES or getattr(item, "status", None) not in (None, "completed", "failed"):
        return None
    return TYPES_BY_CALL_ITEM[type(item)].functions.call_from_item(item, native_tools)


def image_data_url(base64_data: str) -> str:
    """Return a generated image as a data URL, with the type that its first bytes show."""
    return relabel_image_url(f"data:image/png;base64,{base64_data}")


def find_generated_image(item: Item) -> ImagePart | None:
    """Return the image that an item of an image model holds; None for any other item."""
    if not isinstance(item, ImageGenerationCallItem) or not item.result:
        return None
    return ImagePart(image_url=ImageUrl(url=image_data_url(item.result)))


async def rewrite_for_model(
    index: ItemIndex, tool_results: Mapping[str, ToolResultRecord], models: ModelCatalog, model: str
) -> Mapping[str, ToolResultRecord]:
    """Return the results of hosted calls, by item id, as the model reads them: the model that called may have used
    other names and arguments. Results that only the items themselves show are added. Many are read at turns of the
    tenant."""
    calls = [index.items[at] for at in index.named(REPLAYED_TYPES)]
    if not calls:
        return tool_results
    native_tools = (await models.find(model)).native_tools
    rewritten = {**tool_results}

    def rewrite(item: Item) -> None:
        if not item.id:
            return
        stored = rewritten.get(item.id)
        if stored is None:
            stored = item_to_tool_result(item, native_tools)
        elif (tool_type := TYPES_BY_CALL_ITEM.get(type(item))) is not None:
            call_for_model = tool_type.functions.call_for_model
            stored = stored if call_for_model is None else call_for_model(item, stored, native_tools)
        if stored is not None:
            rewritten[item.id] = stored

    await do_in_turns(calls, rewrite, _REWRITE_WORK)
    return rewritten
