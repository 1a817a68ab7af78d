"""What the served models say of themselves: their own tools, and what they take beside text. Asked of the inference
rarely: it may have to ask others."""

import logging
import time
from collections.abc import Mapping
from typing import Final

from apis.chat import NativeToolName
from apis.errors import StackError
from apis.inference import Inference, Modality, Model

_log = logging.getLogger(__name__)
_MAX_AGE_S: Final = 60


class ModelCatalog:
    """Over one Inference."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._models: Mapping[str, Model] = {}
        self._read_at = -float("inf")

    async def native_tools(self, model: str) -> frozenset[NativeToolName]:
        """The model's own tools; none where nobody says so, as it is for most."""
        found = await self._find_model(model)
        return found.native_tools if found is not None else frozenset()

    async def modalities(self, model: str) -> frozenset[Modality] | None:
        """What the model takes beside text; None where nobody says so."""
        found = await self._find_model(model)
        return found.modalities if found is not None else None

    async def _find_model(self, model: str) -> Model | None:
        if time.monotonic() - self._read_at > _MAX_AGE_S:
            try:
                models = await self._inference.models()
            except StackError as exc:
                _log.debug("no models were listed: %s", exc.message)
                return None
            self._models = {each.id: each for each in models}
            self._read_at = time.monotonic()
        return self._models.get(model)
