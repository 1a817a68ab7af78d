"""Clients of MCP servers: sessions, transports, lists of tools."""
