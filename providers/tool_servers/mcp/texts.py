"""Text of an MCP server for a model, bounded and redacted, and its failures as errors."""

from collections.abc import Iterable, Sequence
from typing import Final

from mcp_types import CallToolResult, TextContent
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
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))
