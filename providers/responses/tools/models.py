"""The abilities of the served models, cached: native tools, input modalities and windows."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from apis.errors import StackError
from apis.inference import Constraint, Inference, Model

_log = logging.getLogger(__name__)
_MAX_AGE_S: Final = 60
"""Seconds between two listings of the models, each of which may query upstream servers."""
_FAILURE_AGE_S: Final = 5
"""Seconds after a listing that failed: until then requests go on with what is known."""


class ModelCatalog:
    """Caches the models of one Inference."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._models: Mapping[str, Model] = {}
        self._next_listing_at = -float("inf")
        self._lock = asyncio.Lock()

    async def find(self, model: str) -> Model:
        """Return the model; one without abilities for an unknown name."""
        return await self._find_listed(model) or Model(model, "", shows_all_reasoning=False)

    async def enforces(self, model: str, constraint: Constraint) -> bool:
        """Return whether the model's engine promises to hold the constraint."""
        return constraint in (await self.find(model)).enforces

    async def find_window(self, model: str) -> int | None:
        """Return the tokens that prompt and answer may have together, under any name of the model; None if unknown."""
        entry = await self._find_listed(model)
        if entry is None:
            with suppress(StackError):
                entry = self._models.get((await self._inference.find_names(model)).name)
        return None if entry is None else entry.context_tokens

    async def _find_listed(self, model: str) -> Model | None:
        # while one request lists the models again, the others go on with what is known, or wait for it
        if time.monotonic() >= self._next_listing_at and not (self._lock.locked() and self._models):
            async with self._lock:
                if time.monotonic() >= self._next_listing_at:
                    await self._list_models()
        return self._models.get(model)

    async def _list_models(self) -> None:
        age_s = _FAILURE_AGE_S
        try:
            self._models = {entry.id: entry for entry in await self._inference.models()}
            age_s = _MAX_AGE_S
        except StackError as exc:
            _log.debug("listing the models failed: %s", exc.message)
        self._next_listing_at = time.monotonic() + age_s
