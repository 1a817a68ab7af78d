"""Text of an MCP server for a model, bounded and redacted, and its failures as errors."""

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
from openai.types.responses.mcp_tool_call_error import HTTPError, McpProtocolError, McpToolExecutionError

from apis.tool_servers import ToolServerFailed

MAX_RESULT_BYTES: Final = 1024 * 1024
_TRUNCATION_MARK: Final = "\n[cut off here: the result is longer than 1 MiB]"
_MAX_MESSAGE_BYTES: Final = 1000
_MAX_ERROR_CONTENT_BYTES: Final = 64 * 1024
_CONTROL_CHARACTERS: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "\ufffd")


def protocol_error(code: int, message: str) -> ToolServerFailed:
    """Return the failure with one of the codes of JSON-RPC or of MCP."""
    line = one_line(message, _MAX_MESSAGE_BYTES)
    return ToolServerFailed(line, McpProtocolError(type="mcp_protocol_error", code=code, message=line))


def http_error(status: int) -> ToolServerFailed:
    message = f"The MCP server answered with HTTP {status}."
    return ToolServerFailed(message, HTTPError(type="http_error", code=status, message=message))


def execution_error(name: str, result: CallToolResult, secrets: Sequence[str]) -> ToolServerFailed:
    """Return the failure that the tool itself reports, in its words."""
    text = truncate_text(redact_secrets(_join_content(result), secrets), _MAX_ERROR_CONTENT_BYTES)
    message = one_line(text, _MAX_MESSAGE_BYTES) or f"The tool '{name}' failed and did not say why."
    content = [{"type": "text", "text": text}] if text else []
    return ToolServerFailed(message, McpToolExecutionError(type="mcp_tool_execution_error", content=content))


def result_to_text(result: CallToolResult, secrets: Sequence[str]) -> str:
    return truncate_text(redact_secrets(_join_content(result), secrets), MAX_RESULT_BYTES) or "[no output]"


def one_line(text: str, max_bytes: int) -> str:
    """Return the text's start on one line without unprintable characters, so that a server's words cannot pass for
    another role's."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:max_bytes]).split())
    return line.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def truncate_text(text: str, max_bytes: int) -> str:
    """Return the text without characters that cannot be stored, cut to `max_bytes` with a visible mark."""
    raw = text.translate(_CONTROL_CHARACTERS).encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    return raw[: max_bytes - len(_TRUNCATION_MARK)].decode(errors="ignore") + _TRUNCATION_MARK


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return the text without the credentials that its server was sent: it would be stored and shown."""
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
    return one_line(f"[{', '.join(str(part) for part in parts if part)}]", 4096)
