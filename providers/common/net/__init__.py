"""Connections to servers elsewhere: hosts, their addresses, and the clients of services."""
