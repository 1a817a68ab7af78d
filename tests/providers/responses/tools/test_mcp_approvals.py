"""MCP tools: which calls must be approved, which tools are allowed, and how a listed tool is read."""

from typing import Any

import pytest

from apis.tool_servers import ServerPolicy, ServerTool, allowed_tool_filter, matches_filter
from apis.wire.tool_items import ListedTool
from apis.wire.tools import McpTool
from providers.responses.tools.mcp.approvals import needs_approval
from providers.responses.tools.mcp.tool import read_listed_tool

LISTED: list[dict[str, Any]] = [
    {"name": "read", "annotations": {"readOnlyHint": True}},
    {"name": "write", "annotations": {"readOnlyHint": False}},
    {"name": "silent"},
    {"name": "odd", "annotations": ["readOnlyHint"]},
]
ALL = ["read", "write", "silent", "odd"]


def read(**fields: Any) -> ServerTool | None:
    return read_listed_tool(ListedTool.model_validate(fields))


TOOLS = [tool for fields in LISTED if (tool := read(input_schema={}, **fields))]


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
def test_a_call_waits_unless_the_request_exempts_it(required: Any, waiting: list[str]) -> None:
    declaration = declared(require_approval=required)
    assert [tool.name for tool in TOOLS if needs_approval(declaration, ServerPolicy(), tool)] == waiting


@pytest.mark.parametrize("required", ["never", {"never": {"tool_names": ALL}}])
def test_the_operator_may_require_an_approval_that_the_request_does_not(required: Any) -> None:
    """The stricter of both rules wins."""
    declaration = declared(require_approval=required)
    for policy, waiting in ((frozenset({"write"}), ["write"]), (None, ALL)):
        rules = ServerPolicy(approval_required=policy)
        assert [tool.name for tool in TOOLS if needs_approval(declaration, rules, tool)] == waiting


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
def test_only_allowed_tools_are_selected(allowed: Any, names: list[str]) -> None:
    tool_filter = allowed_tool_filter(declared(allowed_tools=allowed))
    assert [tool.name for tool in TOOLS if matches_filter(tool_filter, tool)] == names


def test_a_listed_tool_that_a_client_sends_back_equals_the_servers() -> None:
    tool = ServerTool("a", "", {"type": "object"})
    schema = {"type": "object"}
    assert read(name="a", input_schema=schema) == tool
    assert read(name="a", input_schema=schema, description=None, annotations=None) == tool
    assert read(name="a", input_schema=schema, description="", annotations={}) == tool
    assert read(name="a", input_schema=schema, annotations={"readOnlyHint": True}) != tool
    assert read(name="a", input_schema="object") is None
