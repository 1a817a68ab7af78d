"""ToolState: what tools still need of the items that a compaction has replaced.

A search has found tools, programs have left a container, and results have numbered sources. The compaction holds it, so
that a conversation is read from there on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from apis.tool_runtime import Source
from apis.wire.item_parts import InputFile
from apis.wire.items import InputMessage, Item
from apis.wire.tool_items import CodeInterpreterCallItem, ShellCallItem, ToolSearchOutput
from providers.responses.events.tool_result import ContainerFile, ToolResultRecord
from providers.responses.store.history_cache import read_stored_items

_MAX_TOOLS: Final = 128
"""Found tools that are kept, newest first, as many as a response may offer."""
_MAX_CONTAINERS: Final = 10
"""Containers that are kept, newest first, as many as a request looks up."""
_MAX_FILES: Final = 50
"""Files of messages that are kept, newest first, as many as are copied into a container."""
_MAX_SOURCES: Final = 200
"""Sources, and files of programs, that are kept, newest first."""


class _StoredState(msgspec.Struct):
    items: msgspec.Raw
    tool_results: dict[str, ToolResultRecord]


class ToolState(msgspec.Struct, frozen=True):
    """Items as tools need them, without what only a model reads, and the results of those that ran in containers, by
    their ids. One result has the sources and the files that all have shown."""

    items: Sequence[Item] = ()
    tool_results: Mapping[str, ToolResultRecord] = {}


NO_TOOL_STATE: Final = ToolState()


def encode_tool_state(
    items: Sequence[Item | ToolResultRecord], tool_results: Mapping[str, ToolResultRecord]
) -> str | None:
    """Return the state after these items, which include those of an earlier state, and their results, as JSON. None
    where a file of a message is in no store, and so would be missing."""
    parts = [part for item in items if isinstance(item, InputMessage) for part in _list_files(item)]
    if any(part.file_id is None for part in parts):
        return None
    calls = _choose_calls(items)
    values: list[dict[str, Any]] = [call.model_dump(exclude_none=True, by_alias=True) for call in calls]
    if parts:
        newest = {part.file_id: part.model_dump(exclude_none=True, by_alias=True) for part in parts}
        values.append({"type": "message", "role": "user", "content": [*newest.values()][-_MAX_FILES:]})
    tools_by_json = {
        tool.model_dump_json(): tool for item in items if isinstance(item, ToolSearchOutput) for tool in item.tools
    }
    if tools_by_json:
        tools = [tool.model_dump(exclude_none=True, by_alias=True) for tool in tools_by_json.values()][-_MAX_TOOLS:]
        values.append({"type": "tool_search_output", "execution": "server", "status": "completed", "tools": tools})
    results = {
        call.id: replace(tool_results[call.id], arguments="", output="", sources={}, files={})
        for call in calls
        if call.id and call.id in tool_results
    }
    state = _StoredState(msgspec.Raw(msgspec.json.encode(values)), {**results, "": _sum_shown(tool_results.values())})
    return msgspec.json.encode(state).decode()


async def decode_tool_state(text: str) -> ToolState:
    """Return the state of a compaction that this server has sealed."""
    stored = msgspec.json.decode(text, type=_StoredState)
    return ToolState(await read_stored_items(bytes(stored.items)), stored.tool_results)


def _sum_shown(results: Iterable[ToolResultRecord]) -> ToolResultRecord:
    """Return a result that has shown the newest sources and files of all."""
    sources: dict[int, Source] = {}
    files: dict[str, ContainerFile] = {}
    for result in results:
        sources.update(result.sources)
        files.update(result.files)
    newest = {number: replace(sources[number], text="") for number in sorted(sources)[-_MAX_SOURCES:]}
    return ToolResultRecord("", "", "", "", newest, files=dict([*files.items()][-_MAX_SOURCES:]))


def _list_files(message: InputMessage) -> Iterable[InputFile]:
    return () if isinstance(message.content, str) else (each for each in message.content if isinstance(each, InputFile))


def _choose_calls(items: Sequence[Item | ToolResultRecord]) -> list[CodeInterpreterCallItem | ShellCallItem]:
    """Return the first and the last call in each container, and the last one that ran, without their programs."""
    by_container: dict[str, list[CodeInterpreterCallItem | ShellCallItem]] = {}
    for item in items:
        container_id = _container_of(item)
        if isinstance(item, CodeInterpreterCallItem | ShellCallItem) and container_id is not None:
            calls = by_container.pop(container_id, [])
            ran = [each for each in calls[1:] if each.status == "completed"]
            by_container[container_id] = [*calls[:1], *ran[-1:], item]
    return [_strip(call) for calls in [*by_container.values()][-_MAX_CONTAINERS:] for call in calls]


def _container_of(item: Item | ToolResultRecord) -> str | None:
    if isinstance(item, CodeInterpreterCallItem):
        return item.container_id
    return item.environment.container_id if isinstance(item, ShellCallItem) and item.environment is not None else None


def _strip(call: CodeInterpreterCallItem | ShellCallItem) -> CodeInterpreterCallItem | ShellCallItem:
    if isinstance(call, CodeInterpreterCallItem):
        return call.model_copy(update={"code": None, "outputs": None})
    return call.model_copy(update={"action": call.action.model_copy(update={"commands": []})})
