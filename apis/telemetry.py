"""The trace that a request is part of, as its client told: handed on to the servers that are asked for its sake."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

TRACE_HEADERS: Final[ContextVar[Mapping[str, str]]] = ContextVar("trace", default=MappingProxyType({}))
"""The W3C headers `traceparent` and `tracestate`, in their valid form, by name; empty where there are none. It says
nothing of who asks: that travels as an argument."""
