"""The HTTP API: the ASGI edge, request parsing, streams, WebSocket."""
