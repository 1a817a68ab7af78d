"""Speculation of the engine: if it is on, and how many of the drafted tokens were right."""

import asyncio
import re
from dataclasses import dataclass
from typing import Final

from apis.errors import StackError
from providers.inference.llama_cpp.client import EngineClient

_COUNTERS: Final = re.compile(r"^llamacpp:spec_decode_num_(draft|accepted)_tokens_total (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LlamaCppMetrics:
    """Figures of the provider. Tokens count since the start; of the drafted ones, `accepted_draft_tokens` were what the
    model itself would have made."""

    models_loaded: int
    requests_running: int
    drafted_tokens: int
    accepted_draft_tokens: int


class DraftCounts:
    """Counts of drafted and accepted tokens of one model, over all its engines. They are read after requests, one
    reading at a time."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._last = (0, 0)
        self._reading: asyncio.Task[None] | None = None
        self._is_stale = False

    def read_soon(self, client: EngineClient) -> None:
        """Read the counts of the client's engine without waiting for it."""
        self._is_stale = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(client))

    async def close(self) -> None:
        """End the reading in progress."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, client: EngineClient) -> None:
        while self._is_stale:
            self._is_stale = False
            try:
                counters = dict(_COUNTERS.findall(await client.read_metrics()))
            except StackError:
                return  # the engine has ended; the next one counts from zero
            drafted, accepted = (int(counters.get(name, 0)) for name in ("draft", "accepted"))
            last = self._last if drafted >= self._last[0] else (0, 0)
            self.drafted += drafted - last[0]
            self.accepted += accepted - last[1]
            self._last = (drafted, accepted)
