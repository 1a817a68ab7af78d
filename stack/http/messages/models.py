"""The models of the server as Anthropic's API lists them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from apis.inference import Model
from apis.messages import MessagePart


class ModelPageParams(MessagePart):
    """The page of models to list: those after one id, or those before one."""

    after_id: str | None = Field(None, max_length=256)
    before_id: str | None = Field(None, max_length=256)
    limit: int = Field(20, ge=1, le=1000)


def build_model_info(model: Model, model_id: str) -> dict[str, Any]:
    """Return a model under the name that the client knows."""
    return {
        "type": "model",
        "id": model_id,
        "display_name": model_id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.context_tokens,
        "capabilities": None,
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


def build_model_page(models: Sequence[Model], params: ModelPageParams) -> dict[str, Any]:
    """Return a page of the models that answer messages."""
    listed = [model for model in models if model.embedding_dimensions is None]
    ids = [model.id for model in listed]
    start, end = 0, len(listed)
    if params.after_id in ids:
        start = ids.index(params.after_id) + 1
    if params.before_id in ids:
        end = ids.index(params.before_id)
        start = max(start, end - params.limit)
    page = listed[start:end][: params.limit]
    return {
        "data": [build_model_info(model, model.id) for model in page],
        "has_more": start + len(page) < len(listed) if params.before_id is None else start > 0,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }
