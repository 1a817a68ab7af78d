"""Which calls of MCP tools must be approved, and which tools may be called at all."""

from typing import Any

import pytest

from apis.wire.tools import McpTool
from providers.responses.tools.mcp.approvals import is_allowed, needs_approval

READING = {"name": "read", "annotations": {"readOnlyHint": True}}
WRITING = {"name": "write", "annotations": {"readOnlyHint": False}}
SILENT = {"name": "silent"}
ODD = {"name": "odd", "annotations": ["readOnlyHint"]}
TOOLS: list[dict[str, Any]] = [READING, WRITING, SILENT, ODD]
ALL = ["read", "write", "silent", "odd"]


def declared(**fields: Any) -> McpTool:
    return McpTool.model_validate({"type": "mcp", "server_label": "a", "server_url": "https://a.example", **fields})


@pytest.mark.parametrize(
    ("required", "waiting"),
    [
        (None, ALL),
        ("always", ALL),
        ("never", []),
        ({}, ALL),
        ({"never": {}}, ALL),
        ({"never": {"tool_names": []}}, ALL),
        ({"never": {"tool_names": ["read", "odd"]}}, ["write", "silent"]),
        ({"never": {"read_only": True}}, ["write", "silent", "odd"]),
        ({"never": {"read_only": False}}, ["read"]),
        ({"never": {"read_only": True, "tool_names": ["write"]}}, ALL),
        ({"always": {"tool_names": ["write"]}}, ALL),
        ({"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read", "silent"]}}, ["read", "write", "odd"]),
        ({"always": {"read_only": False}, "never": {"tool_names": ["write", "read"]}}, ["write", "silent", "odd"]),
    ],
)
def test_a_call_waits_unless_the_request_waives_approval(required: Any, waiting: list[str]) -> None:
    tool = declared(require_approval=required)
    assert [each["name"] for each in TOOLS if needs_approval(tool, each)] == waiting


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ALL),
        ([], []),
        (["read", "gone"], ["read"]),
        ({}, ALL),
        ({"tool_names": ["write"]}, ["write"]),
        ({"read_only": True}, ["read"]),
        ({"read_only": False}, ["write", "silent", "odd"]),
        ({"read_only": True, "tool_names": ["write"]}, []),
    ],
)
def test_only_allowed_tools_are_offered(allowed: Any, names: list[str]) -> None:
    tool = declared(allowed_tools=allowed)
    assert [each["name"] for each in TOOLS if is_allowed(tool, each)] == names
