"""What a model is told of calls by their items alone. Pure functions.

Calls that the client ran are told as calls of the function that the model was offered. Hosted calls are told so where
the store does not know what they gave (a client keeps its own history), as far as the item says it.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from apis.inference import CalledFunction, FunctionCall
from apis.items import Item
from apis.tool_items import (
    ApplyPatchCallItem,
    ApplyPatchCallOutput,
    CodeInterpreterCallItem,
    CodeLogs,
    FileSearchCallItem,
    LocalShellCallItem,
    LocalShellCallOutput,
    McpCallItem,
    ShellCallItem,
    ShellCallOutput,
    ShellOutput,
    ToolSearchCallItem,
    ToolSearchOutput,
)
from providers.responses.client.apply_patch import NAME as APPLY_PATCH
from providers.responses.client.local_shell import NAME as LOCAL_SHELL
from providers.responses.client.shell import NAME as SHELL
from providers.responses.client.tool_search import NAME as TOOL_SEARCH
from providers.responses.hosted.call import Told
from providers.responses.naming import called_name

HOSTED: Final = frozenset({"web_search_call", "code_interpreter_call", "file_search_call", "mcp_call"})
"""Items that the store may know more of: what the model was told."""
PYTHON: Final = "python"
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
            found = [tool.model_dump(exclude_none=True, exclude={"defer_loading"}) for tool in tools]
            return call_id, orjson.dumps(found).decode() if found else "No tool was found."
        case _:
            return None


def hosted_call(item: Item, *, native: bool) -> Told | None:
    """What the model was told of a hosted call, where its item says so. `native` models wrote their code as it is."""
    identity = getattr(item, "id", None) or ""
    match item:
        case CodeInterpreterCallItem(code=str() as code, outputs=list() as outputs):
            logs = "".join(each.logs for each in outputs if isinstance(each, CodeLogs))
            told = logs or "(no output)"
            if native:
                return Told(identity, PYTHON, code, told, custom=True)
            return Told(identity, PYTHON, orjson.dumps({"code": code}).decode(), told)
        case FileSearchCallItem(results=list() as results):
            text = "\n\n".join(f"{each.filename or each.file_id}\n{each.text or ''}" for each in results)
            arguments = orjson.dumps({"queries": item.queries}).decode()
            return Told(identity, FILE_SEARCH, arguments, text or "Nothing was found.")
        case McpCallItem():
            name = called_name(item.server_label, item.name, grouped=native)
            if item.output is None and item.error is None:
                return None
            error = item.error if isinstance(item.error, str) else orjson.dumps(item.error).decode()
            return Told(identity, name, item.arguments, item.output if item.output is not None else error)
        case _:
            return None


def _call(call_id: str, name: str, arguments: Any) -> FunctionCall:
    text = orjson.dumps(arguments).decode() if not isinstance(arguments, str) else arguments
    return FunctionCall(id=call_id, function=CalledFunction(name=name, arguments=text))


def _shell_text(output: ShellOutput) -> str:
    outcome = output.outcome
    ended = "stopped: it took too long" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
    texts = [text for text in (output.stdout, f"stderr:\n{output.stderr}" if output.stderr else "", ended) if text]
    return "\n".join(texts)
