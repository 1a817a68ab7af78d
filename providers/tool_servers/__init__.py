"""Clients of servers that offer tools."""
