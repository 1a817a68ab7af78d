"""SpareCapacity: the room that clients' requests leave in a process for work that may wait.

Lines of batches and background responses with a completion window are such work. They have one queue per process.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from apis.fair_share import FairShare

_YIELD_POLL_S: Final = 0.05


class SpareCapacity:
    """Places shared by tenants, of which `busy_places` are used at most while the process answers requests of clients.

    `interactive_requests` returns the number of those; `engine_priority` is sent to the engine with each request that
    has no `priority` of its own.
    """

    def __init__(
        self,
        places: FairShare,
        interactive_requests: Callable[[], int],
        *,
        busy_places: int,
        engine_priority: int | None = None,
    ) -> None:
        self.engine_priority = engine_priority
        self._places = places
        self._interactive_requests = interactive_requests
        self._busy_places = busy_places
        self._running = 0

    @asynccontextmanager
    async def admit(self, tenant: str) -> AsyncGenerator[None]:
        """Wait until it is the turn of the tenant's work, which is executed while the context is entered."""
        with await self._places.acquire(tenant):
            while self._running >= self._busy_places and self._interactive_requests():  # noqa: ASYNC110 - requests are counted, and set no event
                await asyncio.sleep(_YIELD_POLL_S)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
