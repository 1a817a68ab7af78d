"""Items of tool calls -> the calls and results that a model reads. Pure functions.

A call that the client ran becomes a call of the function that the model was offered. A hosted call is rebuilt from its
item where the store has no result of it, because the client stores its own history.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import orjson

from apis.chat import CalledFunction, FunctionCall, NativeToolName
from apis.wire.items import Item
from apis.wire.tool_items import (
    ApplyPatchCallItem,
    ApplyPatchCallOutput,
    CodeInterpreterCallItem,
    CodeLogs,
    FileSearchCallItem,
    LocalShellCallItem,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpCallItem,
    ShellCallItem,
    ShellCallOutput,
    ShellOutput,
    ToolSearchCallItem,
    ToolSearchOutput,
    WebSearchCallItem,
)
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.apply_patch import APPLY_PATCH_NAME as APPLY_PATCH
from providers.responses.tools.local_shell import LOCAL_SHELL_NAME as LOCAL_SHELL
from providers.responses.tools.names import qualified_name
from providers.responses.tools.shell import SHELL_NAME as SHELL
from providers.responses.tools.tool_search import TOOL_SEARCH_NAME as TOOL_SEARCH

HOSTED_CALL_TYPES: Final = frozenset({"web_search_call", "code_interpreter_call", "file_search_call", "mcp_call"})
"""Item types whose result, the text that the model read, may be in the store."""
REPLAYED_TYPES: Final = HOSTED_CALL_TYPES | {"mcp_approval_request"}
"""Item types whose calls have another name from model to model."""
PYTHON: Final = "python"
_SEARCH_NAMES: Final = {"function": "web_search", "native": "browser.search"}
_OPEN_NAMES: Final = {"function": "open_page", "native": "browser.open"}
_FIND_NAMES: Final = {"function": "find_in_page", "native": "browser.find"}
_RESULT_UNAVAILABLE: Final = "[What this gave is not known any more.]"
FILE_SEARCH: Final = "file_search"


def item_to_client_call(item: Item) -> FunctionCall | None:
    """Return the function call of an item that the client ran; None for any other item."""
    match item:
        case LocalShellCallItem(action=action):
            leave_out = {"type"} if action.env else {"type", "env"}
            return _build_function_call(
                item.call_id, LOCAL_SHELL, action.model_dump(exclude=leave_out, exclude_none=True)
            )
        case ShellCallItem(action=action):
            return _build_function_call(item.call_id, SHELL, action.model_dump(exclude_none=True))
        case ApplyPatchCallItem(operation=operation):
            return _build_function_call(item.call_id, APPLY_PATCH, operation.model_dump(exclude_none=True))
        case ToolSearchCallItem(call_id=str() as call_id):
            return _build_function_call(call_id, TOOL_SEARCH, item.arguments)
        case _:
            return None


def item_to_client_output(item: Item, call_ids: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the call id and the text of the output of a call that the client ran; None for any other item.
    `call_ids` maps the id of a call's item to its call id."""
    match item:
        case LocalShellCallOutput(output=output):
            named = item.call_id or item.id or ""
            return call_ids.get(named, named), output
        case ShellCallOutput(output=outputs):
            return item.call_id, "\n\n".join(map(_shell_output_text, outputs))
        case ApplyPatchCallOutput(status=status, output=output):
            return item.call_id, output or ("Done." if status == "completed" else "The patch could not be applied.")
        case ToolSearchOutput(call_id=str() as call_id, tools=tools):
            loaded = [tool.model_dump(exclude_none=True, exclude={"defer_loading", "server_url"}) for tool in tools]
            return call_id, orjson.dumps(loaded).decode() if loaded else "No tool was found."
        case _:
            return None


def rewrite_for_model(
    items: Iterable[Item], tool_results: Mapping[str, ToolResultRecord], native_tools: frozenset[NativeToolName]
) -> dict[str, ToolResultRecord]:
    """Return the results of hosted calls under the names and in the form of a model whose own tools are
    `native_tools`: another model may have made the calls. A call without a stored result gets one from its item."""
    rewritten = {**tool_results}
    for item in items:
        item_id = getattr(item, "id", None)
        if not item_id:
            continue
        result = rewritten.get(item_id)
        if result is None:
            result = item_to_tool_result(item, native_tools)
        elif (own := _model_specific_call(item, result, native_tools)) is not None:
            result = replace(result, name=own.name, arguments=own.arguments, custom=own.custom)
        if result is not None:
            rewritten[item_id] = result
    return rewritten


def _model_specific_call(
    item: Item, tool_result: ToolResultRecord, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord | None:
    """Return the call as this model would have made it; None where that is how it was made."""
    match item:
        case WebSearchCallItem():
            own = _web_tool_result(item, native_tools)
            return own if own is not None and own.name != tool_result.name.removeprefix("functions.") else None
        case CodeInterpreterCallItem(code=str(code)):
            return (
                _code_tool_result(item.id or "", code, "", native_tools)
                if tool_result.custom != (PYTHON in native_tools)
                else None
            )
        case McpCallItem() | McpApprovalRequest():
            return replace(
                tool_result, name=qualified_name(item.server_label, item.name, supports_namespaces=bool(native_tools))
            )
        case _:
            return None


def item_to_tool_result(item: Item, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    """Return the result of a hosted call as far as its item shows it; None where it shows none. `native_tools` are the
    model's own tools."""
    item_id = getattr(item, "id", None) or ""
    if getattr(item, "status", None) not in (None, "completed", "failed"):
        return None  # the turn was cut off before the call ran
    match item:
        case WebSearchCallItem() if item.status != "failed":
            return _web_tool_result(item, native_tools)
        case CodeInterpreterCallItem(code=str(code), outputs=outputs) if outputs is not None or item.status != "failed":
            logs = "".join(output.logs for output in outputs or () if isinstance(output, CodeLogs))
            return _code_tool_result(
                item_id, code, _RESULT_UNAVAILABLE if outputs is None else logs or "(no output)", native_tools
            )
        case FileSearchCallItem(results=results) if item.queries and item.status != "failed":
            text = "\n\n".join(f"{hit.filename or hit.file_id}\n{hit.text or ''}" for hit in results or ())
            arguments = orjson.dumps({"queries": item.queries}).decode()
            return ToolResultRecord(
                item_id,
                FILE_SEARCH,
                arguments,
                _RESULT_UNAVAILABLE if results is None else text or "Nothing was found.",
            )
        case McpCallItem():
            name = qualified_name(item.server_label, item.name, supports_namespaces=bool(native_tools))
            if item.output is None and item.error is None:
                return None
            error = item.error if isinstance(item.error, str) else orjson.dumps(item.error).decode()
            return ToolResultRecord(item_id, name, item.arguments, item.output if item.output is not None else error)
        case _:
            return None


def _code_tool_result(
    call_id: str, code: str, output: str, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord:
    """Return a run of code as a call of `python`; a model with its own Python tool writes the code as plain text."""
    if PYTHON in native_tools:
        return ToolResultRecord(call_id, PYTHON, code, output, custom=True)
    return ToolResultRecord(call_id, PYTHON, orjson.dumps({"code": code}).decode(), output)


def _web_tool_result(item: WebSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    """Return a web search as a call; a page is named by its URL, because the item has no other name for it."""
    if item.action is None:
        return None
    kind = "native" if "browser" in native_tools else "function"
    fields: dict[str, Any] = item.action.model_extra or {}
    url, pattern = fields.get("url"), fields.get("pattern")
    match item.action.type:
        case "search":
            queries: Any = fields.get("queries")
            name, arguments = _SEARCH_NAMES[kind], {"query": fields.get("query") or (queries[0] if queries else None)}
        case "open_page":
            name, arguments = _OPEN_NAMES[kind], {"id" if kind == "native" else "page": url}
        case "find_in_page" | "find":
            page = {} if kind == "native" else {"page": url}
            name, arguments = _FIND_NAMES[kind], {"pattern": pattern, **page}
    if not all(isinstance(value, str) and value for value in arguments.values()):
        return None
    return ToolResultRecord(item.id or "", name, orjson.dumps(arguments).decode(), _web_output(item, fields))


def _web_output(item: WebSearchCallItem, action: Mapping[str, Any]) -> str:
    """Return the text of the search results as far as the item has it, else their URLs."""
    entries = _object_entries((item.model_extra or {}).get("results"))
    texts = ["\n".join(str(entry[key]) for key in ("title", "url", "text") if entry.get(key)) for entry in entries]
    urls = [str(source["url"]) for source in _object_entries(action.get("sources")) if source.get("url")]
    return "\n\n".join(texts) or (
        "\n".join(["Pages were found, whose text is not known any more:", *urls]) if urls else _RESULT_UNAVAILABLE
    )


def _object_entries(value: Any) -> list[Mapping[str, Any]]:
    entries = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], entry) for entry in entries if isinstance(entry, dict)]


def _build_function_call(call_id: str, name: str, arguments: Any) -> FunctionCall:
    text = orjson.dumps(arguments).decode() if not isinstance(arguments, str) else arguments
    return FunctionCall(id=call_id, function=CalledFunction(name=name, arguments=text))


def _shell_output_text(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = "stopped: it took too long" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
    texts = [text for text in (output.stdout, f"stderr:\n{output.stderr}" if output.stderr else "", ended) if text]
    return "\n".join(texts)
