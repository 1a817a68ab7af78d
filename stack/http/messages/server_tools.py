"""Searches and opened pages of this server as the blocks of Anthropic's server tools, and back.

The block of a result carries what the model read sealed, as the item of the call does, so that the model reads it again
when the client sends the conversation back.
"""

from collections.abc import Iterator
from typing import Any, Final, cast

from openai.types.responses import ResponseFunctionWebSearch

from apis.messages import ServerToolResultBlock, ServerToolUseBlock

WEB_SEARCH: Final = "web_search"
WEB_FETCH: Final = "web_fetch"
_ITEM_PREFIX: Final = "ws_"
_BLOCK_PREFIX: Final = "srvtoolu_"
_SEALED: Final = "encrypted_content"
Block = dict[str, Any]


def tool_name(item: ResponseFunctionWebSearch) -> str:
    """Return the name of Anthropic's tool that does what a call did."""
    return WEB_SEARCH if item.action.type == "search" else WEB_FETCH


def build_server_blocks(item: ResponseFunctionWebSearch) -> tuple[Block, Block]:
    """Return the block of a finished call and that of its result."""
    name, extra = tool_name(item), item.model_extra or {}
    action: Any = item.action
    call_id = f"{_BLOCK_PREFIX}{item.id.removeprefix(_ITEM_PREFIX)}"
    content: Any
    if name == WEB_SEARCH:
        call_input = {"query": action.query or ""}
        results = cast("list[dict[str, Any]]", extra.get("results") or [])
        content = [_build_result(result) for result in results]
        if content:  # one result carries it for all
            content[0][_SEALED] = extra.get(_SEALED) or ""
        error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    else:
        call_input = {"url": action.url or ""}
        source = {"type": "text", "media_type": "text/plain", "data": ""}
        document = {"type": "document", "source": source, "title": None, "citations": None}
        content = {"type": "web_fetch_result", "url": action.url or "", "content": document, "retrieved_at": None}
        content[_SEALED] = extra.get(_SEALED) or ""
        error = {"type": "web_fetch_tool_result_error", "error_code": "unavailable"}
    use: Block = {"type": "server_tool_use", "id": call_id, "name": name, "input": call_input}
    result = content if item.status == "completed" else error
    return use, {"type": f"{name}_tool_result", "tool_use_id": call_id, "content": result}


def _build_result(result: dict[str, Any]) -> Block:
    fields = {"url": result.get("url") or "", "title": result.get("title") or "", "page_age": None}
    return {"type": "web_search_result", **fields, _SEALED: ""}


def convert_server_call(use: ServerToolUseBlock, result: ServerToolResultBlock | None) -> Iterator[dict[str, Any]]:
    """Yield the item of a call that this server ran. One of another server has nothing that a model here could read."""
    sealed = _find_sealed(None if result is None else result.content)
    if not sealed or use.name not in (WEB_SEARCH, WEB_FETCH):
        return
    fields: dict[str, Any] = use.input if isinstance(use.input, dict) else {}
    action = (
        {"type": "search", "query": str(fields.get("query") or "")}
        if use.name == WEB_SEARCH
        else {"type": "open_page", "url": str(fields.get("url") or "")}
    )
    item_id = f"{_ITEM_PREFIX}{use.id.removeprefix(_BLOCK_PREFIX)}"
    yield {"type": "web_search_call", "id": item_id, "status": "completed", "action": action, _SEALED: sealed}


def _find_sealed(content: Any) -> str:
    entries: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    for entry in entries:
        sealed: Any = cast("dict[str, Any]", entry).get(_SEALED) if isinstance(entry, dict) else None
        if isinstance(sealed, str) and sealed:
            return sealed
    return ""
