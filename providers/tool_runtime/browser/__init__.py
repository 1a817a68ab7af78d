"""The browser tool: pages opened through the Fetcher and read as text."""
