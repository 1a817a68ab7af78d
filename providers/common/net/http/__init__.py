"""The HTTP client of the token path: one connection class over httptools, and server-sent events read from bytes."""
