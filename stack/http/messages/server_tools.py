"""Calls that this server runs as the blocks of Anthropic's server tools, and back.

The block of a result carries what the model read sealed, as the item of the call does, so that the model reads it again
when the client sends the conversation back.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from openai.types.responses import (
    ResponseCodeInterpreterToolCall,
    ResponseFunctionShellToolCall,
    ResponseFunctionShellToolCallOutput,
    ResponseFunctionWebSearch,
    ResponseToolSearchCall,
    ResponseToolSearchOutputItem,
)
from openai.types.responses.response_output_item import McpApprovalRequest, McpCall

from apis.messages import McpToolUseBlock, ServerToolResultBlock, ServerToolUseBlock
from stack.http.messages.json_text import parse_input, to_json
from stack.http.messages.tools import (
    BASH_EXECUTION,
    CODE_EXECUTION,
    WEB_FETCH,
    WEB_SEARCH,
    ToolNames,
    shorten_name,
)

_ID_PREFIXES: Final[Mapping[str, str]] = {WEB_SEARCH: "ws_", WEB_FETCH: "ws_", CODE_EXECUTION: "ci_"}
"""The beginning of the id of an item, by the name of Anthropic's tool."""
_SHELL_PREFIX: Final = "sh_"
_SEARCH_PREFIX: Final = "tsc_"
_MCP_PREFIX: Final = "mcp_"
_BLOCK_PREFIX: Final = "srvtoolu_"
_MCP_BLOCK_PREFIX: Final = "mcptoolu_"
_SEALED: Final = "encrypted_content"
_TIME_EXCEEDED: Final = "execution_time_exceeded"
_NOT_RUN: Final = {"type": "exit", "exit_code": 126}
"""The outcome of a command that another server did not run, as shells have it for what they cannot execute."""
_TEXT_EDITOR: Final = "text_editor_code_execution"
_NO_APPROVALS: Final = "Not called: the operator of this server wants an approval, and this API has none."
Block = dict[str, Any]


def tool_name(item: ResponseFunctionWebSearch) -> str:
    """Return the name of Anthropic's tool that does what a call did."""
    return WEB_SEARCH if item.action.type == "search" else WEB_FETCH


class ServerBlocks:
    """Makes the blocks of one message's calls, in the order of their items."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._searches = deque[str]()
        """The ids of the blocks of searches for tools whose results are still to come."""
        self._commands: dict[str, Sequence[str]] = {}
        """The ids of the blocks of the commands whose results are still to come, by the id of their call."""

    def build(self, item: Any) -> Sequence[Block]:
        """Return the blocks of a finished call, and that of its result; none for an item of another kind."""
        match item:
            case ResponseFunctionWebSearch():
                return _build_web_blocks(item)
            case ResponseCodeInterpreterToolCall():
                return _build_code_blocks(item)
            case ResponseFunctionShellToolCall():
                return self._build_commands(item)
            case ResponseFunctionShellToolCallOutput():
                return _build_command_results(item, self._commands.pop(item.call_id, ()))
            case McpCall():
                is_error = item.error is not None
                text = _read_mcp_error(item.error) if is_error else item.output
                return _build_mcp_blocks(item, text, is_error=is_error)
            case McpApprovalRequest():
                return _build_mcp_blocks(item, _NO_APPROVALS, is_error=True)
            case ResponseToolSearchCall():
                call_id = _to_block_id(item.id, _SEARCH_PREFIX)
                self._searches.append(call_id)
                return (_build_use(call_id, self._names.tool_search, item.arguments),)
            case ResponseToolSearchOutputItem() if self._searches:
                return (self._build_found(item, self._searches.popleft()),)
            case _:
                return ()

    def _build_commands(self, item: ResponseFunctionShellToolCall) -> Sequence[Block]:
        """Return a block for each command of a call, which runs from now on. A call that was cut off has its results,
        too, which say that it did not run."""
        call_id = _to_block_id(item.id, _SHELL_PREFIX)
        commands = item.action.commands or [""]
        ids = [call_id, *(f"{call_id}_{number}" for number in range(1, len(commands)))]
        uses = [_build_use(each, BASH_EXECUTION, {"command": text}) for each, text in zip(ids, commands, strict=True)]
        if item.status == "incomplete":
            return [*uses, *(_build_bash_result(each, _build_bash_error("unavailable")) for each in ids)]
        self._commands[item.call_id] = ids
        return uses

    def _build_found(self, item: ResponseToolSearchOutputItem, call_id: str) -> Block:
        names = [getattr(tool, "name", None) or getattr(tool, "server_label", "") for tool in item.tools]
        references = [{"type": "tool_reference", "tool_name": self._names.restore(name)} for name in names]
        content = {"type": "tool_search_tool_search_result", "tool_references": references}
        return {"type": "tool_search_tool_result", "tool_use_id": call_id, "content": content}


def _to_block_id(item_id: str, prefix: str, block_prefix: str = _BLOCK_PREFIX) -> str:
    return f"{block_prefix}{item_id.removeprefix(prefix)}"


def _build_use(call_id: str, name: str, call_input: Any) -> Block:
    return {"type": "server_tool_use", "id": call_id, "name": name, "input": _to_object(call_input)}


def _to_object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list_objects(value: Any) -> list[dict[str, Any]]:
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]


def _sealed_content(item: Any) -> str:
    return _to_object(item.model_extra).get(_SEALED) or ""


def _build_web_blocks(item: ResponseFunctionWebSearch) -> Sequence[Block]:
    name, extra = tool_name(item), item.model_extra or {}
    action: Any = item.action
    call_id = _to_block_id(item.id, _ID_PREFIXES[name])
    content: Any
    if name == WEB_SEARCH:
        call_input = {"query": action.query or ""}
        results = cast("list[dict[str, Any]]", extra.get("results") or [])
        content = [_build_result(result) for result in results]
        if content:  # one result carries it for all
            content[0][_SEALED] = _sealed_content(item)
        error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    else:
        call_input = {"url": action.url or ""}
        source = {"type": "text", "media_type": "text/plain", "data": ""}
        document = {"type": "document", "source": source, "title": None, "citations": None}
        content = {"type": "web_fetch_result", "url": action.url or "", "content": document, "retrieved_at": None}
        content[_SEALED] = _sealed_content(item)
        error = {"type": "web_fetch_tool_result_error", "error_code": "unavailable"}
    result = content if item.status == "completed" else error
    block = {"type": f"{name}_tool_result", "tool_use_id": call_id, "content": result}
    return _build_use(call_id, name, call_input), block


def _build_result(result: dict[str, Any]) -> Block:
    fields = {"url": result.get("url") or "", "title": result.get("title") or "", "page_age": None}
    return {"type": "web_search_result", **fields, _SEALED: ""}


def build_code_use(item_id: str, code: str) -> Block:
    """Return the block of a program before it has run."""
    return _build_use(_to_block_id(item_id, _ID_PREFIXES[CODE_EXECUTION]), CODE_EXECUTION, {"code": code})


def _build_code_blocks(item: ResponseCodeInterpreterToolCall) -> Sequence[Block]:
    """Return a program and what it printed, in which a traceback stands, too."""
    call_id = _to_block_id(item.id, _ID_PREFIXES[CODE_EXECUTION])
    printed = "".join(output.logs for output in item.outputs or () if output.type == "logs")
    outcome = _to_object(_to_object(item.model_extra).get("outcome"))
    content: Block = {"type": "code_execution_tool_result_error", "error_code": "unavailable"}
    if item.status == "completed" and outcome.get("type") == "timeout":
        content |= {"error_code": _TIME_EXCEEDED, _SEALED: _sealed_content(item)}
    elif item.status == "completed":
        result = {"stdout": printed, "stderr": "", "return_code": outcome.get("exit_code", 0), "content": list[Any]()}
        content = {"type": "code_execution_result", **result, _SEALED: _sealed_content(item)}
    return build_code_use(item.id, item.code or ""), {
        "type": "code_execution_tool_result",
        "tool_use_id": call_id,
        "content": content,
    }


def _build_command_results(item: ResponseFunctionShellToolCallOutput, ids: Sequence[str]) -> Sequence[Block]:
    """Return the results of the commands with these blocks. One that has none was not run."""
    contents: list[Block] = []
    for output in item.output[: len(ids)]:
        if output.outcome.type == "timeout":
            contents.append(_build_bash_error(_TIME_EXCEEDED))
        else:
            result = {"stdout": output.stdout, "stderr": output.stderr, "return_code": output.outcome.exit_code}
            contents.append({"type": f"{BASH_EXECUTION}_result", **result, "content": list[Any]()})
    contents += [_build_bash_error("unavailable") for _ in ids[len(contents) :]]
    if contents:  # one result carries it for all
        contents[0][_SEALED] = _sealed_content(item)
    return [_build_bash_result(call_id, content) for call_id, content in zip(ids, contents, strict=True)]


def _build_bash_error(code: str) -> Block:
    return {"type": f"{BASH_EXECUTION}_tool_result_error", "error_code": code}


def _build_bash_result(call_id: str, content: Block) -> Block:
    return {"type": f"{BASH_EXECUTION}_tool_result", "tool_use_id": call_id, "content": content}


def build_mcp_use(item: McpCall | McpApprovalRequest, arguments: str) -> Block:
    """Return the block of a call of an MCP server's tool before it is made."""
    call_id = _to_block_id(item.id, _MCP_PREFIX, _MCP_BLOCK_PREFIX)
    names = {"name": item.name, "server_name": item.server_label}
    return {"type": "mcp_tool_use", "id": call_id, **names, "input": parse_input(arguments)}


def _build_mcp_blocks(item: McpCall | McpApprovalRequest, text: str | None, *, is_error: bool) -> Sequence[Block]:
    parts = [{"type": "text", "text": text, "citations": None}] if text else []
    use = build_mcp_use(item, item.arguments)
    return use, {"type": "mcp_tool_result", "tool_use_id": use["id"], "is_error": is_error, "content": parts}


def _read_mcp_error(error: Any) -> str:
    """Return the text of an error: that of the server's protocol, or the content by which the tool says what failed."""
    if isinstance(error, str):
        return error
    fields: dict[str, Any] = error.model_dump()
    texts = [str(part["text"]) for part in _list_objects(fields.get("content")) if "text" in part]
    return str(fields.get("message") or "\n".join(texts))


def convert_server_call(
    use: ServerToolUseBlock,
    uses: Mapping[str, ServerToolUseBlock],
    results: Mapping[str, ServerToolResultBlock],
    loadable: Mapping[str, Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the items of a call that a server ran. `uses` and `results` are all of the message, by the id of the use,
    and `loadable` the tools that a search may have found. A web search of another server has nothing that a model here
    could read."""
    result = results.get(use.id)
    content = None if result is None else result.content
    fields = _to_object(use.input)
    if use.name in (WEB_SEARCH, WEB_FETCH):
        yield from _convert_web_call(use, fields, _find_sealed(content))
    elif use.name == CODE_EXECUTION and isinstance(content, dict):
        yield from _convert_code_call(use, fields, content)
    elif use.name == BASH_EXECUTION and use.id.rpartition("_")[0] not in uses:
        yield from _convert_commands(use, uses, results)
    elif use.name == _TEXT_EDITOR and isinstance(content, dict):
        yield from _convert_edit(use, content)
    elif use.name.startswith("tool_search_tool_"):
        yield from _convert_tool_search(use, fields, content, loadable)


def _convert_web_call(use: ServerToolUseBlock, fields: Mapping[str, Any], sealed: str) -> Iterator[dict[str, Any]]:
    if not sealed:
        return
    action = (
        {"type": "search", "query": str(fields.get("query") or "")}
        if use.name == WEB_SEARCH
        else {"type": "open_page", "url": str(fields.get("url") or "")}
    )
    item_id = f"{_ID_PREFIXES[use.name]}{use.id.removeprefix(_BLOCK_PREFIX)}"
    yield {"type": "web_search_call", "id": item_id, "status": "completed", "action": action, _SEALED: sealed}


def _convert_code_call(
    use: ServerToolUseBlock, fields: Mapping[str, Any], content: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    printed, sealed = content.get("stdout"), _find_sealed(content)
    if not fields.get("code") or not (sealed or isinstance(printed, str)):
        return
    logs = "".join(text for text in (printed, content.get("stderr")) if isinstance(text, str))
    yield {
        "type": "code_interpreter_call",
        "id": f"{_ID_PREFIXES[CODE_EXECUTION]}{use.id.removeprefix(_BLOCK_PREFIX)}",
        "status": "completed",
        "code": str(fields["code"]),
        "outputs": [{"type": "logs", "logs": logs}] if logs else [],
        **({_SEALED: sealed} if sealed else {}),
    }


def _convert_commands(
    first: ServerToolUseBlock, uses: Mapping[str, ServerToolUseBlock], results: Mapping[str, ServerToolResultBlock]
) -> Iterator[dict[str, Any]]:
    """Yield the items of the call of whose commands this is the first."""
    group = [first]
    while (use := uses.get(f"{first.id}_{len(group)}")) is not None:
        group.append(use)
    contents = [_to_object(results[use.id].content) for use in group if use.id in results]
    if len(contents) < len(group):  # it was not run
        return
    sealed = _find_sealed(contents)
    call_id = first.id
    yield {
        "type": "shell_call",
        "id": f"{_SHELL_PREFIX}{first.id.removeprefix(_BLOCK_PREFIX)}",
        "call_id": call_id,
        "status": "completed",
        "action": {"commands": [str(_to_object(use.input).get("command") or "") for use in group]},
    }
    yield {
        "type": "shell_call_output",
        "call_id": call_id,
        "output": [_convert_bash_result(content) for content in contents],
        **({_SEALED: sealed} if sealed else {}),
    }


def _convert_bash_result(content: Mapping[str, Any]) -> dict[str, Any]:
    code, exit_code = content.get("error_code"), content.get("return_code")
    if code == _TIME_EXCEEDED:
        return {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}
    if not isinstance(exit_code, int):
        return {"stdout": "", "stderr": str(code or "unavailable"), "outcome": _NOT_RUN}
    texts = {name: str(content.get(name) or "") for name in ("stdout", "stderr")}
    return {**texts, "outcome": {"type": "exit", "exit_code": exit_code}}


def _convert_edit(use: ServerToolUseBlock, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the items of a call by which another server viewed or edited a file."""
    viewed = content.get("content")
    output = viewed if isinstance(viewed, str) else to_json(content).decode()
    arguments = to_json(use.input or {}).decode()
    yield {"type": "function_call", "call_id": use.id, "name": use.name, "arguments": arguments}
    yield {"type": "function_call_output", "call_id": use.id, "output": output}


def _convert_tool_search(
    use: ServerToolUseBlock, fields: Mapping[str, Any], content: Any, loadable: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    references = _list_objects(_to_object(content).get("tool_references"))
    names = [shorten_name(str(reference.get("tool_name"))) for reference in references]
    tools = [loadable[name] for name in names if name in loadable]
    item_id = f"{_SEARCH_PREFIX}{use.id.removeprefix(_BLOCK_PREFIX)}"
    shared = {"execution": "server", "status": "completed", "call_id": None}
    yield {"type": "tool_search_call", "id": item_id, "arguments": dict(fields), **shared}
    yield {"type": "tool_search_output", "tools": tools, **shared}


def convert_mcp_call(use: McpToolUseBlock, result: ServerToolResultBlock | None) -> Iterator[dict[str, Any]]:
    """Yield the item of a call of an MCP server's tool, which has a result."""
    if result is None:
        return
    content = result.content
    texts = [str(part.get("text") or "") for part in _list_objects(content)]
    text = content if isinstance(content, str) else "\n".join(texts)
    yield {
        "type": "mcp_call",
        "id": f"{_MCP_PREFIX}{use.id.removeprefix(_MCP_BLOCK_PREFIX)}",
        "server_label": use.server_name,
        "name": use.name,
        "arguments": to_json(use.input or {}).decode(),
        **({"status": "failed", "error": text} if result.is_error else {"status": "completed", "output": text}),
    }


def _find_sealed(content: Any) -> str:
    entries = _list_objects(content) if isinstance(content, list) else [_to_object(content)]
    sealed = (entry.get(_SEALED) for entry in entries)
    return next((text for text in sealed if isinstance(text, str) and text), "")
