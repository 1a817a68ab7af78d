"""What an MCP server says, as text for a model, and what went wrong with it, as errors that hold no secret."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, assert_never

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from apis.errors import ToolFailed

MAX_RESULT_BYTES: Final = 1024 * 1024
_TRUNCATION_MARK: Final = "\n[cut off here: the result is longer than 1 MiB]"
_MAX_MESSAGE_BYTES: Final = 1000
_MAX_ERROR_CONTENT_BYTES: Final = 64 * 1024
_CONTROL_CHARACTERS: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "\ufffd")


def protocol_error(code: int, message: str) -> ToolFailed:
    """`code` is one of JSON-RPC or of MCP."""
    told = one_line(message, _MAX_MESSAGE_BYTES)
    return ToolFailed(told, detail={"type": "mcp_protocol_error", "code": code, "message": told})


def http_error(status: int) -> ToolFailed:
    told = f"The MCP server answered with HTTP {status}."
    return ToolFailed(told, detail={"type": "http_error", "code": status, "message": told})


def execution_error(name: str, result: CallToolResult, secrets: Sequence[str]) -> ToolFailed:
    """What the tool itself said of its failure."""
    said = truncate_text(redact_secrets(_join_content(result), secrets), _MAX_ERROR_CONTENT_BYTES)
    told = one_line(said, _MAX_MESSAGE_BYTES) or f"The tool '{name}' failed and did not say why."
    content = [{"type": "text", "text": said}] if said else []
    return ToolFailed(told, detail={"type": "mcp_tool_execution_error", "content": content})


def result_to_text(result: CallToolResult, secrets: Sequence[str]) -> str:
    return truncate_text(redact_secrets(_join_content(result), secrets), MAX_RESULT_BYTES) or "[no output]"


def one_line(text: str, max_bytes: int) -> str:
    """Nothing unprintable and no line breaks: what a server says of itself must not look like another's words."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:max_bytes]).split())
    return line.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def truncate_text(text: str, max_bytes: int) -> str:
    """Storable text of at most so many bytes, with a mark where more was."""
    raw = text.translate(_CONTROL_CHARACTERS).encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    return raw[: max_bytes - len(_TRUNCATION_MARK)].decode(errors="ignore") + _TRUNCATION_MARK


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """A server may say the credentials that it was sent; from here on they would be stored and shown."""
    for secret in secrets:
        text = text.replace(secret, "[redacted]")
    return text


def _join_content(result: CallToolResult) -> str:
    parts = [_part_to_text(part) for part in result.content]
    # Servers repeat structured content as text, for clients that do not know it.
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _part_to_text(part: ContentBlock) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return _render_description(part.type, part.mime_type, f"{len(part.data) * 3 // 4} bytes")
        case ResourceLink():
            return _render_description(
                "resource", part.uri, part.mime_type, part.description or part.title or part.name
            )
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return f"{_render_description('resource', resource.uri, resource.mime_type)}\n{resource.text}"
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return _render_description(
                "resource", resource.uri, resource.mime_type, f"{len(resource.blob) * 3 // 4} bytes"
            )
        case EmbeddedResource():
            raise AssertionError("a resource is a text or a blob")
        case _:
            assert_never(part)


def _render_description(*parts: Any) -> str:
    return one_line(f"[{', '.join(str(word) for word in parts if word)}]", 4096)
