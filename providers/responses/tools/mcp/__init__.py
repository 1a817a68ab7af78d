"""The tools of MCP servers that a request declares: their lists, calls and approvals."""
