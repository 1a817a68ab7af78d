"""The client of MCP servers: declarations, transports, sessions and tool lists."""
