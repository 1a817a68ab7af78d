"""The items before a response: its history, and its request's input with the items that it refers to, which are loaded
within one allowance of bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson
from openai.types.responses.response import InputTransformation

from apis.errors import InvalidRequest, NotFound
from apis.responses import CreateResponse
from apis.storage.records import reading_stored
from apis.wire.computer import ComputerCallOutput, ComputerTool, ComputerUsePreviewTool
from apis.wire.item_parts import InputAudio, InputContentPart, InputFile, InputImage, InputText
from apis.wire.item_types import (
    CLIENT_CALL_TYPES,
    HOSTED_CALL_TYPES,
    INTERNAL_FIELDS,
    LOOKED_UP_TYPES,
    OUTPUT_TYPES,
    TYPES_WITH_ID_OF_CALL,
    id_prefix,
)
from apis.wire.items import (
    CompactionTrigger,
    CustomToolCallOutput,
    FunctionCallOutput,
    InputMessage,
    Item,
    ItemReference,
    ReasoningItem,
)
from apis.wire.tool_items import ImageGenerationCallItem
from apis.wire.tools import (
    ApplyPatchTool,
    CodeInterpreterTool,
    ContainerReferenceEnvironment,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    LocalShellTool,
    McpTool,
    NamespaceTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)
from providers.common.fair_turns import do_in_turns, end_pass
from providers.responses.context.conversation import list_dropped_reasoning
from providers.responses.context.sealed_content import SealedContent
from providers.responses.events.ids import ResponseIds
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.events.unvalidated import unvalidated
from providers.responses.item_index import TYPES_WITH_PARTS, ItemIndex
from providers.responses.store.conversation_items import reject_existing_items, reject_repeated_items
from providers.responses.store.history_cache import LoadAllowance, LoadedHistory, read_stored_items
from providers.responses.store.item_lookup import FoundItem
from providers.responses.tools.mcp.approvals import find_approved_calls

_REFERRING_TYPES: Final = (ItemReference, ReasoningItem, ImageGenerationCallItem)
"""Types of items by which a client may mean a stored item of their id."""
_RESOLVE_WORK: Final = 200
"""Work of resolving one item, as `fair_turns` counts it."""
_NAMED_IDS: Final = 64
"""Ids of items that one line of the log names."""
_TOOLS_WITH_STATE: Final = (CodeInterpreterTool, FileSearchTool, NamespaceTool, ShellTool, ToolSearchTool)
"""Tools that go on with what a ToolState holds."""
_TOOLS_WITHOUT_STATE: Final = (
    *(FunctionTool, CustomTool, McpTool, WebSearchTool, ApplyPatchTool, LocalShellTool),
    *(ComputerTool, ComputerUsePreviewTool),
)
"""Tools that read no item before, except the calls that the input answers."""
_build_input_message = unvalidated(InputMessage)


class HistorySource(Protocol):
    """Source of the responses and items that a request refers to: the store, or a connection's own cache before it.
    Its methods are those of History."""

    max_bytes: int
    """The most bytes of stored items that one request may load."""

    async def load_history(self, response_id: str, *, tenant: str, allowance: LoadAllowance) -> LoadedHistory: ...

    async def find_items(
        self, params_by_id: Mapping[str, str], *, tenant: str, allowance: LoadAllowance
    ) -> dict[str, FoundItem]: ...


class ReadItems(NamedTuple):
    """The items before a response, with references resolved; the stored results of the hosted calls among them, by item
    id; and the reasoning of the input that no model sees."""

    items: ItemIndex
    tool_results: Mapping[str, ToolResultRecord]
    hidden: Sequence[InputTransformation] = ()


async def read_items(
    request: CreateResponse,
    history: LoadedHistory,
    source: HistorySource,
    sealed_content: SealedContent,
    ids: ResponseIds,
    *,
    tenant: str,
    allowance: LoadAllowance,
) -> ReadItems:
    """Return the items before a response: those of its history and of its request's input. `ids` are those of the
    response; `allowance` counts what is loaded.

    Raises InvalidRequest or NotFound where the input, or an item that it refers to, is wrong.
    """
    if not isinstance(request.input, list):
        text = request.input
        own = [] if text is None else [_build_input_message(type="message", role="user", content=text)]
        return ReadItems(ItemIndex(history.items, own), history.tool_results)
    check_items(request.input)
    await end_pass(request.input)
    sent = ItemIndex((), request.input)
    unreadable = await sealed_content.unseal_reasoning(sent, request.model, tenant)
    resolved, input_results = await resolve_items(sent, source, tenant=tenant, allowance=allowance)
    if request.conversation_id is not None:
        reject_repeated_items(resolved)
        await end_pass(resolved)
    reject_existing_items(resolved, history)
    index = ItemIndex(history.items, resolved)
    await end_pass(index)
    for position in index.named(HOSTED_CALL_TYPES):
        item = index.items[position]
        if not item.id and position >= index.input_start:  # its result is looked up by id
            index.replace(position, item.model_copy(update={"id": ids.new_item_id(id_prefix(item.type or ""))}))
    find_approved_calls(request, index)
    if ends_with_trigger(request) and not index.items:
        raise InvalidRequest("There is nothing to compact.", param="input", code="invalid_value")
    tool_results = {**history.tool_results, **input_results} if input_results else history.tool_results
    dropped = list_dropped_reasoning(index) if reads_current_turn_only(request) else ()
    return ReadItems(index, tool_results, [*unreadable, *dropped])


async def read_added_items(
    items: Sequence[Item], source: HistorySource, *, tenant: str
) -> tuple[Sequence[Item], dict[str, ToolResultRecord]]:
    """Return the items that a request adds to a conversation, with references resolved, and the results of the hosted
    calls among them, by item id. Raises NotFound, and InvalidRequest where they are wrong or refer to too much."""
    check_items(items, "items")
    allowance = LoadAllowance(source.max_bytes)
    resolved, tool_results = await resolve_items(
        ItemIndex((), items), source, tenant=tenant, allowance=allowance, field="items"
    )
    reject_repeated_items(resolved, "items")
    return resolved, tool_results


def reads_current_turn_only(request: CreateResponse) -> bool:
    """Return true if the model does not see the reasoning of earlier turns."""
    return request.reasoning is not None and request.reasoning.context == "current_turn"


def reads_only(request: CreateResponse, items: Sequence[Item], *, has_tool_state: bool) -> bool:
    """Return True if the request can be answered with these items of its conversation alone, a compaction and all after
    it: its input refers to none before, and it has no tool that goes on with what its calls before have left, unless
    the compaction `has_tool_state`."""
    for tool in request.tools or ():
        is_referenced = isinstance(tool, ShellTool) and isinstance(tool.environment, ContainerReferenceEnvironment)
        is_held = has_tool_state and isinstance(tool, _TOOLS_WITH_STATE)
        if not (is_referenced or is_held or isinstance(tool, _TOOLS_WITHOUT_STATE)):
            return False
    known_ids = {getattr(item, "call_id", None) or item.id for item in items}
    for item in request.input if isinstance(request.input, list) else ():
        referred = getattr(item, "call_id", None) or getattr(item, "approval_request_id", None) or item.id
        if referred is not None and referred not in known_ids:
            return False
    return True


def ends_with_trigger(request: CreateResponse) -> bool:
    """Return true if the response is to be a compaction instead of an answer. The items must have been checked."""
    return isinstance(request.input, list) and bool(request.input) and type(request.input[-1]) is CompactionTrigger


async def resolve_items(
    index: ItemIndex, source: HistorySource, *, tenant: str, allowance: LoadAllowance, field: str = "input"
) -> tuple[Sequence[Item], dict[str, ToolResultRecord]]:
    """Return the items with references resolved and without a trigger, and the stored results of the hosted calls among
    them, by item id. `field` names the list in errors. Raises NotFound, and InvalidRequest where more is referred to
    than one request may load."""
    items = index.items
    resolved = [*items]
    if index.has(CompactionTrigger):
        resolved.pop()  # it is the last one
    referring = [at for at in index.positions(*_REFERRING_TYPES) if items[at].id and _refers(items[at])]
    with_ids = [at for at in index.named(LOOKED_UP_TYPES) if items[at].id]
    params_by_id: dict[str, str] = {}
    for at in sorted((*referring, *with_ids)):
        params_by_id.setdefault(items[at].id or "", f"{field}[{at}].id")
    if not params_by_id:
        return resolved, {}
    await end_pass(params_by_id)
    found_items = await source.find_items(params_by_id, tenant=tenant, allowance=allowance)
    for at in with_ids:
        resolved[at] = _with_internal_field(items[at], found_items.get(items[at].id or ""))
    await end_pass(params_by_id)
    stored_items = await _read_found([items[at].id or "" for at in referring], found_items)
    seen_ids: set[str] = set()

    def resolve(at: int) -> None:
        item_id = items[at].id or ""
        if item_id in seen_ids:  # it is in memory once, and once more in the prompt for each reference
            allowance.take(len(found_items[item_id].json), f"{field}[{at}].id")
        elif item_id in stored_items:
            seen_ids.add(item_id)
        elif type(items[at]) is not ReasoningItem:
            raise NotFound(
                f"Item with id '{item_id}' not found. Items are not persisted when `store` is set to false.",
                param=f"{field}[{at}].id",
            )
        resolved[at] = stored_items.get(item_id, items[at])

    await do_in_turns(referring, resolve, _RESOLVE_WORK)
    return resolved, {
        item_id: each.tool_result for item_id, each in found_items.items() if each.tool_result is not None
    }


async def _read_found(item_ids: Sequence[str], found_items: Mapping[str, FoundItem]) -> dict[str, Item]:
    """Return those of the items that were found. Raises StorageCorrupt."""
    found_ids = [item_id for item_id in dict.fromkeys(item_ids) if item_id in found_items]
    with reading_stored(", ".join(found_ids[:_NAMED_IDS])):
        items_json = b"[%b]" % b",".join(found_items[item_id].json for item_id in found_ids)
        return dict(zip(found_ids, await read_stored_items(items_json), strict=True))


def _with_internal_field(item: Item, found_item: FoundItem | None) -> Item:
    """Return an item that its client sent back with the field that the client did not see."""
    field = INTERNAL_FIELDS.get(item.type or "")
    if field is None or found_item is None:
        return item
    with reading_stored(item.id or ""):
        return item.model_copy(update={field: orjson.loads(found_item.json).get(field)})


def _refers(item: Item) -> bool:
    """Return whether a client means the stored item of this id: it is a reference, reasoning that is empty but for its
    id, or the call that generated an image, without the image."""
    if type(item) is ReasoningItem:
        return not (item.content or item.summary or item.encrypted_content)
    if type(item) is ImageGenerationCallItem:
        return not (item.result or item.status)
    return True


def drop_repeated_outputs(index: ItemIndex) -> ItemIndex:
    """Return the items without those outputs of the input that the history has already: some clients send the outputs
    of all rounds again. Raises InvalidRequest for another output of a call that has one."""
    output_positions = index.named(OUTPUT_TYPES)
    if not output_positions or not output_positions[0] < index.input_start <= output_positions[-1]:
        return index
    call_ids = {_call_id(index.items[at]) for at in output_positions if at >= index.input_start}
    outputs: dict[str, Item] = {}
    repeated: set[int] = set()
    for position in index.named(CLIENT_CALL_TYPES | OUTPUT_TYPES):
        item = index.items[position]
        call_id = _call_id(item)
        if call_id is None or call_id not in call_ids:
            continue
        if item.type not in OUTPUT_TYPES:
            outputs.pop(call_id, None)  # another call with this id has no output yet
        elif position < index.input_start or call_id not in outputs:
            outputs[call_id] = item
        elif _output_fields(item) == _output_fields(outputs[call_id]):
            repeated.add(position)
        else:
            message = f"The call with call_id {call_id} has an output already, which is not the same."
            raise InvalidRequest(message, param=f"{index.param(position)}.output", code="invalid_value")
    return index.without(repeated) if repeated else index


def _call_id(item: Item) -> str | None:
    return getattr(item, "call_id", None)


def _output_fields(item: Item) -> dict[str, Any]:
    """Return what a model reads of an output."""
    return {name: value for name, value in item if name not in ("id", "status")}


def check_items(items: Sequence[Item], field: str = "input") -> None:
    """Raise InvalidRequest, naming the index in `field`, for a repeated id, a misplaced trigger or a wrong part."""
    seen_ids: set[str] = set()
    for index, item in enumerate(items):
        kind = type(item)  # for 25,000 items: an isinstance that is false costs pydantic a microsecond
        if kind is ItemReference or item.type in TYPES_WITH_ID_OF_CALL:
            continue
        if kind is CompactionTrigger:
            if field != "input" or index != len(items) - 1:
                message = "The 'compaction_trigger' item must be the final input item of a response."
                raise InvalidRequest(message, param=f"{field}[{index}]", code="invalid_value")
            continue
        if item.id is not None and item.id in seen_ids:
            raise InvalidRequest(f"Duplicate item id '{item.id}'.", param=f"{field}[{index}].id", code="invalid_value")
        if item.id is not None:
            seen_ids.add(item.id)
        if type(item) is InputMessage and isinstance(item.content, str):
            continue
        if kind in TYPES_WITH_PARTS:
            _check_content(item, f"{field}[{index}]")


def _check_content(item: Item, location: str) -> None:
    match item:
        case InputMessage(content=list() as parts):
            _check_parts(parts, f"{location}.content")
        case FunctionCallOutput(call_id=None, name=None):
            param = f"{location}.call_id"
            message = f"Missing required parameter: '{param}'. Send it, or the 'name' of the function."
            raise InvalidRequest(message, param=param, code="missing_required_parameter")
        case FunctionCallOutput(output=list() as parts) | CustomToolCallOutput(output=list() as parts):
            _check_parts(parts, f"{location}.output")
        case ComputerCallOutput(output=screenshot):
            _check_part(screenshot, f"{location}.output")
        case _:
            pass


def _check_parts(parts: Sequence[InputContentPart], param: str) -> None:
    for index, part in enumerate(parts):
        _check_part(part, f"{param}[{index}]")


def _check_part(part: InputContentPart, location: str) -> None:
    if isinstance(part, InputText | InputAudio):
        return
    if isinstance(part, InputFile):
        _check_one_of(part, ("file_data", "file_id", "file_url"), location)
        return
    _check_one_of(part, ("image_url", "file_id"), location)
    if part.image_url:
        _check_image_url(part.image_url, location)


def _check_one_of(part: InputFile | InputImage, fields: Sequence[str], param: str) -> None:
    present = [name for name in fields if getattr(part, name)]
    if not present:
        listed = ", ".join(f"`{name}`" for name in fields[:-1])
        message = f"The part needs {listed} or `{fields[-1]}`."
        raise InvalidRequest(message, param=f"{param}.{fields[0]}", code="missing_required_parameter")
    if len(present) > 1:
        message = f"The part has both `{present[0]}` and `{present[1]}`: give one of them."
        raise InvalidRequest(message, param=f"{param}.{present[1]}", code="mutually_exclusive_parameters")


def _check_image_url(url: str, param: str) -> None:
    if url.startswith(("https://", "http://")):
        return
    head, comma, _ = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        message = "An image URL is https, or data:image/TYPE;base64,DATA."
        raise InvalidRequest(message, param=f"{param}.image_url", code="invalid_image_url")
