"""The facts of a request that reach every layer: its id for the log, and the trace of the client that it is part of."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

TRACE_HEADERS: Final[ContextVar[Mapping[str, str]]] = ContextVar("trace", default=MappingProxyType({}))
"""The valid W3C headers `traceparent` and `tracestate`, by name; empty if there are none. The tenant is not here: it is
passed as an argument."""

REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The id of the HTTP request in progress, for lines of the log; empty outside of a request."""
