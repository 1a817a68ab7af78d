"""The views of a running stack for operators and the built-in page: background responses, and agents' own traces."""
