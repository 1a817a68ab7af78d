"""What a model is told of calls by their items alone. Pure functions.

Calls that the client ran are told as calls of the function that the model was offered. Hosted calls are told so where
the store does not know what they gave (a client keeps its own history), as far as the item says it.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final, cast

import orjson

from apis.chat import CalledFunction, FunctionCall, Native
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
from providers.responses.events.tool_result import Told
from providers.responses.tools.apply_patch import NAME as APPLY_PATCH
from providers.responses.tools.local_shell import NAME as LOCAL_SHELL
from providers.responses.tools.names import called_name
from providers.responses.tools.shell import NAME as SHELL
from providers.responses.tools.tool_search import NAME as TOOL_SEARCH

HOSTED: Final = frozenset({"web_search_call", "code_interpreter_call", "file_search_call", "mcp_call"})
"""Items that the store may know more of: what the model was told."""
RETOLD: Final = HOSTED | {"mcp_approval_request"}
"""Items whose calls models name each in their own way."""
PYTHON: Final = "python"
_SEARCH: Final = {"function": "web_search", "native": "browser.search"}
_OPEN: Final = {"function": "open_page", "native": "browser.open"}
_FIND: Final = {"function": "find_in_page", "native": "browser.find"}
_LOST: Final = "[What this gave is not known any more.]"
FILE_SEARCH: Final = "file_search"


def client_call(item: Item) -> FunctionCall | None:
    """The call that a client-executed item stands for; None for any other item."""
    match item:
        case LocalShellCallItem(action=action):
            leave_out = {"type"} if action.env else {"type", "env"}
            return _call(item.call_id, LOCAL_SHELL, action.model_dump(exclude=leave_out, exclude_none=True))
        case ShellCallItem(action=action):
            return _call(item.call_id, SHELL, action.model_dump(exclude_none=True))
        case ApplyPatchCallItem(operation=operation):
            return _call(item.call_id, APPLY_PATCH, operation.model_dump(exclude_none=True))
        case ToolSearchCallItem(call_id=str() as call_id):
            return _call(call_id, TOOL_SEARCH, item.arguments)
        case _:
            return None


def client_output(item: Item, calls: Mapping[str, str]) -> tuple[str, str] | None:
    """The call id and the text of a client-executed call's output; None for any other item. `calls` are the call ids
    by the ids of their items."""
    match item:
        case LocalShellCallOutput(output=output):
            named = item.call_id or item.id or ""
            return calls.get(named, named), output
        case ShellCallOutput(output=outputs):
            return item.call_id, "\n\n".join(map(_shell_text, outputs))
        case ApplyPatchCallOutput(status=status, output=output):
            return item.call_id, output or ("Done." if status == "completed" else "The patch could not be applied.")
        case ToolSearchOutput(call_id=str() as call_id, tools=tools):
            found = [tool.model_dump(exclude_none=True, exclude={"defer_loading", "server_url"}) for tool in tools]
            return call_id, orjson.dumps(found).decode() if found else "No tool was found."
        case _:
            return None


def retell(items: Iterable[Item], told: MutableMapping[str, Told], native: frozenset[Native]) -> None:
    """Put what hosted calls told into the words of a model whose own tools are `native`: another may have made them,
    under names and in a form that this one does not know. What nobody knows more of is told as its item says it."""
    for item in items:
        identity = getattr(item, "id", None)
        if not identity:
            continue
        known = told.get(identity)
        if known is None:
            known = hosted_call(item, native)
        elif (own := _own_words(item, known, native)) is not None:
            known = replace(known, name=own.name, arguments=own.arguments, custom=own.custom)
        if known is not None:
            told[identity] = known


def _own_words(item: Item, known: Told, native: frozenset[Native]) -> Told | None:
    """How the model would have called, where that is not how the call was made."""
    match item:
        case WebSearchCallItem():
            own = _web_call(item, native)
            return own if own is not None and own.name != known.name.removeprefix("functions.") else None
        case CodeInterpreterCallItem(code=str(code)):
            return _code_call(item.id or "", code, "", native) if known.custom != (PYTHON in native) else None
        case McpCallItem() | McpApprovalRequest():
            return replace(known, name=called_name(item.server_label, item.name, grouped=bool(native)))
        case _:
            return None


def hosted_call(item: Item, native: frozenset[Native]) -> Told | None:
    """What the model was told of a hosted call, as far as its item says it. `native` are the model's own tools."""
    identity = getattr(item, "id", None) or ""
    if getattr(item, "status", None) not in (None, "completed", "failed"):
        return None  # it was cut off, and never made
    match item:
        case WebSearchCallItem() if item.status != "failed":
            return _web_call(item, native)
        case CodeInterpreterCallItem(code=str(code), outputs=outputs) if outputs is not None or item.status != "failed":
            logs = "".join(each.logs for each in outputs or () if isinstance(each, CodeLogs))
            return _code_call(identity, code, _LOST if outputs is None else logs or "(no output)", native)
        case FileSearchCallItem(results=results) if item.queries and item.status != "failed":
            text = "\n\n".join(f"{each.filename or each.file_id}\n{each.text or ''}" for each in results or ())
            arguments = orjson.dumps({"queries": item.queries}).decode()
            return Told(identity, FILE_SEARCH, arguments, _LOST if results is None else text or "Nothing was found.")
        case McpCallItem():
            name = called_name(item.server_label, item.name, grouped=bool(native))
            if item.output is None and item.error is None:
                return None
            error = item.error if isinstance(item.error, str) else orjson.dumps(item.error).decode()
            return Told(identity, name, item.arguments, item.output if item.output is not None else error)
        case _:
            return None


def _code_call(identity: str, code: str, output: str, native: frozenset[Native]) -> Told:
    """Models with a Python tool of their own write their code as it is."""
    if PYTHON in native:
        return Told(identity, PYTHON, code, output, custom=True)
    return Told(identity, PYTHON, orjson.dumps({"code": code}).decode(), output)


def _web_call(item: WebSearchCallItem, native: frozenset[Native]) -> Told | None:
    """A look at the web; pages are told by the URLs of them, which is all that the item has."""
    if item.action is None:
        return None
    kind = "native" if "browser" in native else "function"
    fields: dict[str, Any] = item.action.model_extra or {}
    url, pattern = fields.get("url"), fields.get("pattern")
    match item.action.type:
        case "search":
            queries: Any = fields.get("queries")
            name, arguments = _SEARCH[kind], {"query": fields.get("query") or (queries[0] if queries else None)}
        case "open_page":
            name, arguments = _OPEN[kind], {"id" if kind == "native" else "page": url}
        case "find_in_page" | "find":
            page = {} if kind == "native" else {"page": url}
            name, arguments = _FIND[kind], {"pattern": pattern, **page}
    if not all(isinstance(value, str) and value for value in arguments.values()):
        return None
    return Told(item.id or "", name, orjson.dumps(arguments).decode(), _seen(item, fields))


def _seen(item: WebSearchCallItem, action: Mapping[str, Any]) -> str:
    """What the item shows of what the model was shown."""
    entries = _objects((item.model_extra or {}).get("results"))
    texts = ["\n".join(str(each[key]) for key in ("title", "url", "text") if each.get(key)) for each in entries]
    urls = [str(each["url"]) for each in _objects(action.get("sources")) if each.get("url")]
    return "\n\n".join(texts) or (
        "\n".join(["Pages were found, whose text is not known any more:", *urls]) if urls else _LOST
    )


def _objects(value: Any) -> list[Mapping[str, Any]]:
    listed = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], each) for each in listed if isinstance(each, dict)]


def _call(call_id: str, name: str, arguments: Any) -> FunctionCall:
    text = orjson.dumps(arguments).decode() if not isinstance(arguments, str) else arguments
    return FunctionCall(id=call_id, function=CalledFunction(name=name, arguments=text))


def _shell_text(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = "stopped: it took too long" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
    texts = [text for text in (output.stdout, f"stderr:\n{output.stderr}" if output.stderr else "", ended) if text]
    return "\n".join(texts)
