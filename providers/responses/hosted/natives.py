"""Which tools of their own the served models have. Asked of the inference rarely: it may have to ask others."""

import logging
import time
from collections.abc import Mapping
from typing import Final

from apis.errors import StackError
from apis.inference import Inference, Native

_log = logging.getLogger(__name__)
_MAX_AGE_S: Final = 60


class Natives:
    """Over one Inference."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._known: Mapping[str, frozenset[Native]] = {}
        self._read_at = -float("inf")

    async def of(self, model: str) -> frozenset[Native]:
        """The model's own tools; none where nobody says so, as it is for most."""
        if time.monotonic() - self._read_at > _MAX_AGE_S:
            try:
                models = await self._inference.models()
            except StackError as exc:
                _log.debug("no models were listed: %s", exc.message)
                return frozenset()
            self._known = {each.id: each.native_tools for each in models}
            self._read_at = time.monotonic()
        return self._known.get(model, frozenset())
