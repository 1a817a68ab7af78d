"""The capabilities of the served models, cached: their native tools and input modalities."""

import logging
import time
from collections.abc import Mapping
from typing import Final

from apis.chat import NativeToolName
from apis.errors import StackError
from apis.inference import Constraint, Inference, Modality, Model

_log = logging.getLogger(__name__)
_MAX_AGE_S: Final = 60
"""Seconds between two listings of the models, each of which may query upstream servers."""


class ModelCatalog:
    """Caches the models of one Inference."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._models: Mapping[str, Model] = {}
        self._read_at = -float("inf")

    async def native_tools(self, model: str) -> frozenset[NativeToolName]:
        """Return the model's native tools; none for an unknown model."""
        entry = await self._find_model(model)
        return entry.native_tools if entry is not None else frozenset()

    async def modalities(self, model: str) -> frozenset[Modality] | None:
        """Return the model's input modalities besides text; None if they are unknown."""
        entry = await self._find_model(model)
        return entry.modalities if entry is not None else None

    async def enforces(self, model: str, constraint: Constraint) -> bool:
        """Return whether the model's engine promises to hold the constraint; False for an unknown model."""
        entry = await self._find_model(model)
        return entry is not None and constraint in entry.enforces

    async def caches_prefixes(self, model: str) -> bool:
        """Return whether the model's engine caches the prompts of chats; False for an unknown model."""
        entry = await self._find_model(model)
        return entry is not None and entry.caches_prefixes

    async def _find_model(self, model: str) -> Model | None:
        if time.monotonic() - self._read_at > _MAX_AGE_S:
            try:
                models = await self._inference.models()
            except StackError as exc:
                _log.debug("listing the models failed: %s", exc.message)
                return None
            self._models = {entry.id: entry for entry in models}
            self._read_at = time.monotonic()
        return self._models.get(model)
