"""From the turns of a message's conversation to the items of a response's input."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, assert_never

from apis.messages import (
    Base64Source,
    ContainerUploadBlock,
    ContentSource,
    DocumentBlock,
    FileSource,
    ImageBlock,
    McpToolUseBlock,
    MessageBlock,
    MessageTurn,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from stack.http.messages.json_text import to_json
from stack.http.messages.server_tools import convert_mcp_call, convert_server_call
from stack.http.messages.tools import shorten_name

_FAILED: Final = "The tool failed:\n"
_ROLES: Final = {"user": "user", "system": "developer"}
Item = dict[str, Any]
ContentBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


def find_uploads(messages: Sequence[MessageTurn]) -> list[str]:
    """Return the ids of the files that the conversation has for its programs."""
    blocks = (block for message in messages if not isinstance(message.content, str) for block in message.content)
    return [*dict.fromkeys(block.file_id for block in blocks if isinstance(block, ContainerUploadBlock))]


def convert_messages(messages: Sequence[MessageTurn], loadable: Mapping[str, Item]) -> list[Item]:
    """Return the items of a conversation. `loadable` are the tools of the request that a search may have found, by
    their names."""
    items: list[Item] = []
    for message in messages:
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [TextBlock(type="text", text=blocks)] if blocks else []
        if message.role == "assistant":
            items += _convert_answer(blocks, loadable)
        else:
            items += _convert_turn(_ROLES[message.role], blocks)
    return items


def _convert_turn(role: str, blocks: Sequence[MessageBlock]) -> list[Item]:
    """Return a turn of the user: the results of calls, and one message for what stands between them."""
    items: list[Item] = []
    parts: list[Item] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if parts:
                items.append({"role": role, "content": parts})
                parts = []
            items.append(_convert_result(block))
        elif isinstance(block, ContentBlock):
            parts += _convert_content(block)
    return [*items, {"role": role, "content": parts}] if parts else items


def _convert_answer(blocks: Sequence[MessageBlock], loadable: Mapping[str, Item]) -> list[Item]:
    """Return an answer of the model. Reasoning that this server did not seal is left out when the items are read."""
    items: list[Item] = []
    results = {block.tool_use_id: block for block in blocks if isinstance(block, ServerToolResultBlock)}
    uses = {block.id: block for block in blocks if isinstance(block, ServerToolUseBlock)}
    for block in blocks:
        match block:
            case TextBlock():
                if block.text:
                    items.append({"role": "assistant", "content": [{"type": "output_text", "text": block.text}]})
            case ThinkingBlock() | RedactedThinkingBlock():
                if sealed := block.signature if isinstance(block, ThinkingBlock) else block.data:
                    items.append({"type": "reasoning", "summary": [], "encrypted_content": sealed})
            case ToolUseBlock():
                arguments = to_json(block.input or {}).decode()
                name = shorten_name(block.name)
                items.append({"type": "function_call", "call_id": block.id, "name": name, "arguments": arguments})
            case ServerToolUseBlock():
                items += convert_server_call(block, uses, results, loadable)
            case McpToolUseBlock():
                items += convert_mcp_call(block, results.get(block.id))
            case _:  # an answer has no other blocks that a model reads
                continue
    return items


def _convert_result(block: ToolResultBlock) -> Item:
    content = block.content
    output: str | list[Item]
    if content is None or isinstance(content, str):
        output = f"{_FAILED if block.is_error else ''}{content or ''}"
    else:
        output = [{"type": "input_text", "text": _FAILED}] if block.is_error else []
        for each in content:
            output += _convert_content(each)
        if all(part["type"] == "input_text" for part in output):
            output = "\n".join(part["text"] for part in output)
    return {"type": "function_call_output", "call_id": block.tool_use_id, "output": output}


def _convert_content(block: ContentBlock) -> list[Item]:
    match block:
        case TextBlock():
            return [_text_part(block.text)] if block.text else []
        case ImageBlock():
            return [{"type": "input_image", **_convert_image_source(block.source)}]
        case DocumentBlock():
            return _convert_document(block)
        case SearchResultBlock():
            text = "\n".join(part.text for part in block.content)
            return [_text_part(f"{block.title}\n{block.source}\n{text}")]
        case ToolReferenceBlock():
            return [_text_part(f"The tool `{block.tool_name}` is available.")]
        case _:
            assert_never(block)


def _convert_image_source(source: Base64Source | UrlSource | FileSource) -> Item:
    match source:
        case Base64Source():
            return {"image_url": f"data:{source.media_type};base64,{source.data}"}
        case UrlSource():
            return {"image_url": source.url}
        case FileSource():
            return {"file_id": source.file_id}
        case _:
            assert_never(source)


def _convert_document(block: DocumentBlock) -> list[Item]:
    """Return a document: a file that the server reads, or its text after its title."""
    head = "\n".join(text for text in (block.title, block.context) if text)
    parts = [_text_part(head)] if head else []
    source = block.source
    match source:
        case TextSource():
            return [_text_part(f"{head}\n{source.data}" if head else source.data)]
        case ContentSource():
            if isinstance(source.content, str):
                return [*parts, _text_part(source.content)]
            return [*parts, *(part for each in source.content for part in _convert_content(each))]
        case UrlSource():
            return [*parts, {"type": "input_file", "file_url": source.url}]
        case FileSource():
            return [*parts, {"type": "input_file", "file_id": source.file_id}]
        case Base64Source():
            data = f"data:{source.media_type};base64,{source.data}"
            name = _file_name(block.title, source.media_type)
            return [*parts, {"type": "input_file", "file_data": data, "filename": name}]
        case _:
            assert_never(source)


def _file_name(title: str | None, media_type: str) -> str:
    """Return a name by whose end the kind of the file can be known."""
    ending = ".pdf" if media_type == "application/pdf" else ".txt"
    name = (title or "document").replace("/", "_")[:200]
    return name if name.endswith(ending) else f"{name}{ending}"


def _text_part(text: str) -> Item:
    return {"type": "input_text", "text": text}
