"""Content of spans and events in the conventions' own form of messages, for operators who want it.

Source: https://github.com/open-telemetry/semantic-conventions-genai, model/gen-ai/gen-ai-{input,output}-messages.json.
Images and files that are sent inline are shown by their size only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from apis.chat import AudioPart, ChatRequest, ContentPart, FilePart, ImagePart, Message, RefusalPart, TextPart
from apis.deltas import DeltaBatch, Finish, ReasoningDelta, RefusalDelta, TextDelta, ToolArgumentsDelta, ToolCallStart

Content = dict[str, Any]
_MAX_ATTRIBUTE_BYTES: Final = 256 * 1024
"""Bytes of one attribute of a span; the oldest messages are left out of a longer one."""
_FINISH_REASONS: Final[Mapping[str, str]] = {"tool_calls": "tool_call"}


def to_json(content: Content) -> dict[str, str]:
    """Return the content as attributes of a span, whose values are JSON texts."""
    return {name: _bounded_json(value) for name, value in content.items()}


def _bounded_json(entries: Sequence[Any]) -> str:
    encoded = [orjson.dumps(entry) for entry in entries]
    size, first = 2, len(encoded)
    while first and size + len(encoded[first - 1]) + 1 <= _MAX_ATTRIBUTE_BYTES:
        first -= 1
        size += len(encoded[first]) + 1
    return f"[{b','.join(encoded[first:]).decode()}]"


def input_content(chat: ChatRequest) -> Content:
    """Return the messages of a chat and the tools that the model is offered."""
    content: Content = {"gen_ai.input.messages": [_message(message) for message in chat.messages]}
    if chat.tools:
        content["gen_ai.tool.definitions"] = [
            _tool_definition(tool.model_dump(exclude_none=True)) for tool in chat.tools
        ]
    return content


def _tool_definition(tool: dict[str, Any]) -> Content:
    function: dict[str, Any] = tool.get("function") or tool.get("custom") or {}
    definition: Content = {"type": tool["type"], "name": function.get("name", tool["type"])}
    for field in ("description", "parameters"):
        if field in function:
            definition[field] = function[field]
    return definition


def _message(message: Message) -> Content:
    if message.role == "tool":
        result = message.content if isinstance(message.content, str) else _parts(message.content or ())
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": result}
        return {"role": "tool", "parts": [part]}
    parts: list[Content] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if isinstance(message.content, str):
        parts.append(_text(message.content))
    else:
        parts += _parts(message.content or ())
    if message.refusal:
        parts.append(_text(message.refusal))
    for call in message.tool_calls or ():
        name, arguments = (
            (call.function.name, call.function.arguments)
            if call.type == "function"
            else (call.custom.name, call.custom.input)
        )
        parts.append(_tool_call(call.id, name, arguments))
    return {"role": "system" if message.role == "developer" else message.role, "parts": parts}


def _parts(content: Sequence[ContentPart]) -> list[Content]:
    return [_part(part) for part in content]


def _part(part: ContentPart) -> Content:
    match part:
        case TextPart():
            return _text(part.text)
        case RefusalPart():
            return _text(part.refusal)
        case ImagePart():
            url = part.image_url.url
            if url.startswith("data:"):
                return {"type": "inline_image", "size_bytes": len(url)}
            return {"type": "uri", "modality": "image", "uri": url}
        case AudioPart():
            return {"type": "inline_audio", "size_bytes": len(part.input_audio.data)}
        case FilePart():
            if part.file.file_id:
                return {"type": "file", "modality": "document", "file_id": part.file.file_id}
            return {"type": "inline_file", "size_bytes": len(part.file.file_data or "")}


def _text(text: str) -> Content:
    return {"type": "text", "content": text}


def _tool_call(call_id: str, name: str, arguments: str) -> Content:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": _parse(arguments)}


def _parse(text: str) -> Any:
    """Return the value of a JSON text, or the text itself where it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def output_content(batches: Sequence[DeltaBatch]) -> Content:
    """Return the message that the deltas of one model call make."""
    parts: list[Content] = []
    calls: dict[str, tuple[str, list[str]]] = {}
    reason = "error"
    for batch in batches:
        for delta in batch:
            match delta:
                case RefusalDelta():
                    _append_text(parts, "text", delta.text)
                case TextDelta():
                    _append_text(parts, "text", delta.text, is_new=delta.begins_message)
                case ReasoningDelta():
                    _append_text(parts, "reasoning", delta.text, is_new=delta.begins_message)
                case ToolCallStart():
                    calls[delta.id] = (delta.name, [])
                case ToolArgumentsDelta():
                    calls[delta.id][1].append(delta.text)
                case Finish():
                    reason = _FINISH_REASONS.get(delta.reason, delta.reason)
                case _:
                    pass
    for part in parts:
        part["content"] = "".join(part["content"])
    parts += [_tool_call(call_id, name, "".join(chunks)) for call_id, (name, chunks) in calls.items()]
    return {"gen_ai.output.messages": [{"role": "assistant", "parts": parts, "finish_reason": reason}]}


def _append_text(parts: list[Content], part_type: str, text: str, *, is_new: bool = False) -> None:
    if is_new or not parts or parts[-1]["type"] != part_type:
        parts.append({"type": part_type, "content": []})
    parts[-1]["content"].append(text)


def items_content(items: Sequence[ResponseOutputItem]) -> Content:
    """Return the output items of a response as one message."""
    parts: list[Content] = []
    for item in items:
        match item:
            case ResponseOutputMessage():
                parts += [_text(part.text if part.type == "output_text" else part.refusal) for part in item.content]
            case ResponseReasoningItem():
                texts = [part.text for part in item.content or item.summary]
                parts.append({"type": "reasoning", "content": "\n\n".join(texts)})
            case ResponseFunctionToolCall():
                parts.append(_tool_call(item.call_id, item.name, item.arguments))
            case _:
                call = item.model_dump(mode="json", exclude_none=True, exclude={"encrypted_content"}, warnings=False)
                parts.append(
                    {"type": "server_tool_call", "id": call.get("id"), "name": item.type, "server_tool_call": call}
                )
    return {"gen_ai.output.messages": [{"role": "assistant", "parts": parts, "finish_reason": "stop"}]}


def tool_content(arguments: str, result: str | None) -> dict[str, str]:
    """Return a call's arguments, and its result where it has one."""
    content = {"gen_ai.tool.call.arguments": arguments[:_MAX_ATTRIBUTE_BYTES]}
    return content if result is None else {**content, "gen_ai.tool.call.result": result[:_MAX_ATTRIBUTE_BYTES]}


def retrieval_content(queries: Sequence[str], documents: Sequence[tuple[str, float]]) -> dict[str, str]:
    """Return the queries of a search, and its hits by id and score."""
    return {
        "gen_ai.retrieval.query.text": "\n".join(queries)[:_MAX_ATTRIBUTE_BYTES],
        "gen_ai.retrieval.documents": _bounded_json([{"id": name, "score": score} for name, score in documents]),
    }
