"""From the command line to listening processes: workers, connections, drain, exit codes."""
