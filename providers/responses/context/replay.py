"""What a model is told of calls by their items alone. Pure functions.

Calls that the client ran are told as calls of the function that the model was offered. Hosted calls are told so where
the store does not know what they gave (a client keeps its own history), as far as the item says it.
"""

from collections.abc import Iterable, Mapping, MutableMapping
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
"""Items that the store may know more of: what the model was told."""
REPLAYED_TYPES: Final = HOSTED_CALL_TYPES | {"mcp_approval_request"}
"""Items whose calls models name each in their own way."""
PYTHON: Final = "python"
_SEARCH_NAMES: Final = {"function": "web_search", "native": "browser.search"}
_OPEN_NAMES: Final = {"function": "open_page", "native": "browser.open"}
_FIND_NAMES: Final = {"function": "find_in_page", "native": "browser.find"}
_RESULT_UNAVAILABLE: Final = "[What this gave is not known any more.]"
FILE_SEARCH: Final = "file_search"


def item_to_client_call(item: Item) -> FunctionCall | None:
    """The call that a client-executed item stands for; None for any other item."""
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
    """The call id and the text of a client-executed call's output; None for any other item. `calls` are the call ids
    by the ids of their items."""
    match item:
        case LocalShellCallOutput(output=output):
            named = item.call_id or item.id or ""
            return call_ids.get(named, named), output
        case ShellCallOutput(output=outputs):
            return item.call_id, "\n\n".join(map(_shell_output_text, outputs))
        case ApplyPatchCallOutput(status=status, output=output):
            return item.call_id, output or ("Done." if status == "completed" else "The patch could not be applied.")
        case ToolSearchOutput(call_id=str() as call_id, tools=tools):
            found = [tool.model_dump(exclude_none=True, exclude={"defer_loading", "server_url"}) for tool in tools]
            return call_id, orjson.dumps(found).decode() if found else "No tool was found."
        case _:
            return None


def rewrite_for_model(
    items: Iterable[Item], tool_results: MutableMapping[str, ToolResultRecord], native_tools: frozenset[NativeToolName]
) -> None:
    """Put what hosted calls told into the words of a model whose own tools are `native`: another may have made them,
    under names and in a form that this one does not know. What nobody knows more of is told as its item says it."""
    for item in items:
        identity = getattr(item, "id", None)
        if not identity:
            continue
        known = tool_results.get(identity)
        if known is None:
            known = item_to_tool_result(item, native_tools)
        elif (own := _model_specific_call(item, known, native_tools)) is not None:
            known = replace(known, name=own.name, arguments=own.arguments, custom=own.custom)
        if known is not None:
            tool_results[identity] = known


def _model_specific_call(
    item: Item, tool_result: ToolResultRecord, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord | None:
    """How the model would have called, where that is not how the call was made."""
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
    """What the model was told of a hosted call, as far as its item says it. `native` are the model's own tools."""
    identity = getattr(item, "id", None) or ""
    if getattr(item, "status", None) not in (None, "completed", "failed"):
        return None  # it was cut off, and never made
    match item:
        case WebSearchCallItem() if item.status != "failed":
            return _web_tool_result(item, native_tools)
        case CodeInterpreterCallItem(code=str(code), outputs=outputs) if outputs is not None or item.status != "failed":
            logs = "".join(each.logs for each in outputs or () if isinstance(each, CodeLogs))
            return _code_tool_result(
                identity, code, _RESULT_UNAVAILABLE if outputs is None else logs or "(no output)", native_tools
            )
        case FileSearchCallItem(results=results) if item.queries and item.status != "failed":
            text = "\n\n".join(f"{each.filename or each.file_id}\n{each.text or ''}" for each in results or ())
            arguments = orjson.dumps({"queries": item.queries}).decode()
            return ToolResultRecord(
                identity,
                FILE_SEARCH,
                arguments,
                _RESULT_UNAVAILABLE if results is None else text or "Nothing was found.",
            )
        case McpCallItem():
            name = qualified_name(item.server_label, item.name, supports_namespaces=bool(native_tools))
            if item.output is None and item.error is None:
                return None
            error = item.error if isinstance(item.error, str) else orjson.dumps(item.error).decode()
            return ToolResultRecord(identity, name, item.arguments, item.output if item.output is not None else error)
        case _:
            return None


def _code_tool_result(
    call_id: str, code: str, output: str, native_tools: frozenset[NativeToolName]
) -> ToolResultRecord:
    """Models with a Python tool of their own write their code as it is."""
    if PYTHON in native_tools:
        return ToolResultRecord(call_id, PYTHON, code, output, custom=True)
    return ToolResultRecord(call_id, PYTHON, orjson.dumps({"code": code}).decode(), output)


def _web_tool_result(item: WebSearchCallItem, native_tools: frozenset[NativeToolName]) -> ToolResultRecord | None:
    """A look at the web; pages are told by the URLs of them, which is all that the item has."""
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
    """What the item shows of what the model was shown."""
    entries = _object_entries((item.model_extra or {}).get("results"))
    texts = ["\n".join(str(each[key]) for key in ("title", "url", "text") if each.get(key)) for each in entries]
    urls = [str(each["url"]) for each in _object_entries(action.get("sources")) if each.get("url")]
    return "\n\n".join(texts) or (
        "\n".join(["Pages were found, whose text is not known any more:", *urls]) if urls else _RESULT_UNAVAILABLE
    )


def _object_entries(value: Any) -> list[Mapping[str, Any]]:
    listed = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], each) for each in listed if isinstance(each, dict)]


def _build_function_call(call_id: str, name: str, arguments: Any) -> FunctionCall:
    text = orjson.dumps(arguments).decode() if not isinstance(arguments, str) else arguments
    return FunctionCall(id=call_id, function=CalledFunction(name=name, arguments=text))


def _shell_output_text(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = "stopped: it took too long" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
    texts = [text for text in (output.stdout, f"stderr:\n{output.stderr}" if output.stderr else "", ended) if text]
    return "\n".join(texts)
