"""Demand: an estimate of what a request will use, which is reserved before it begins."""

from typing import Final, cast

from pydantic import BaseModel

from apis.accounts.charges import Demand
from apis.completion import CompletionRequest
from apis.decisions import DecisionRequest
from apis.documents.embeddings import EmbeddingRequest
from apis.images import CreateImage
from apis.inference import ModelNames
from apis.moderation import CATEGORIES, CreateModeration
from apis.wire.base import ToolWire

BYTES_PER_TOKEN: Final = 4
_DEFAULT_OUTPUT_TOKENS: Final = 1024
"""Tokens that are reserved for an output whose length the request does not bound."""
_OUTPUT_BOUNDS: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")


def build_demand(
    request: BaseModel, model: ModelNames | None, body_bytes: int, *, is_batch: bool = False, generates: bool = True
) -> Demand:
    """Return the demand of a request with a body of this length; one for which no model `generates` has no output."""
    return Demand(
        "" if model is None else model.name,
        body_bytes // BYTES_PER_TOKEN,
        _estimate_output(request) if generates else 0,
        _estimate_tool_calls(request),
        bool(getattr(request, "background", None)),
        is_batch,
        () if model is None else model.aliases,
    )


def _estimate_tool_calls(request: BaseModel) -> int:
    """Return the calls of hosted tools that are reserved for a request; each image is one."""
    if isinstance(request, CreateImage):
        return request.n or 1
    tools = cast("list[object]", getattr(request, "tools", None) or [])
    return int(any(isinstance(tool, ToolWire) and not tool.runs_at_client for tool in tools))


def _estimate_output(request: BaseModel) -> int:
    """Return the tokens that a model may generate for a request."""
    if isinstance(request, EmbeddingRequest | CreateImage):
        return 0
    if isinstance(request, CreateModeration):
        return len(request.list_inputs()) * len(CATEGORIES)
    if isinstance(request, DecisionRequest):
        return len(request.questions) * request.orders
    bounds = [bound for name in _OUTPUT_BOUNDS if (bound := getattr(request, name, None)) is not None]
    count = request.completion_count if isinstance(request, CompletionRequest) else getattr(request, "n", None) or 1
    return (bounds[0] if bounds else _DEFAULT_OUTPUT_TOKENS) * count
