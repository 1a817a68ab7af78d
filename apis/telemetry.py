"""The trace of the client that a request is part of, to be sent on to the upstream servers of the request."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

TRACE_HEADERS: Final[ContextVar[Mapping[str, str]]] = ContextVar("trace", default=MappingProxyType({}))
"""The valid W3C headers `traceparent` and `tracestate`, by name; empty if there are none. The tenant is not here: it is
passed as an argument."""
