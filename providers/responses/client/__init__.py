"""Tools with typed items that the client runs: one file per type of tool."""
