"""SpareCapacity: the room that clients' requests leave in a process for work that may wait.

Lines of batches and background responses with a completion window are such work. They have one queue per process.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from apis.fair_share import FairShare

_YIELD_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Work that has a place and waits for its turn; `number` counts the arrivals."""

    tenant: str
    number: int
    is_alone: bool


class SpareCapacity:
    """Places shared by tenants, of which `busy_places` are used while the process answers requests of clients: in turns
    of the tenants, and each of them may use its part of these, though others use all of them.

    `interactive_requests` returns the number of those requests; `engine_priority` is sent to the engine with each
    request that has no `priority` of its own.
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
        self._running: Counter[str] = Counter()
        self._running_alone = False
        self._other_suspects: Collection[object] = ()
        self._waiting: list[_Waiter] = []
        self._arrivals = 0
        self._last_turns: dict[str, int] = {}

    @property
    def is_running_alone(self) -> bool:
        """True while work is executed which alone is to blame if the process ends."""
        return self._running_alone

    def isolate_from(self, suspects: Collection[object]) -> None:
        """Execute no work alone while `suspects` has anything: other work of the process, which may end it too."""
        self._other_suspects = suspects

    @asynccontextmanager
    async def admit(self, tenant: str, *, alone: bool = False) -> AsyncGenerator[None]:
        """Wait until it is the turn of the tenant's work, which is executed while the context is entered. With `alone`,
        no other work of this queue, and none of which it was isolated, is executed meanwhile: so it alone is to blame
        if the process ends."""
        with await self._places.acquire(tenant):
            self._arrivals += 1
            waiter = _Waiter(tenant, self._arrivals, alone)
            self._waiting.append(waiter)
            try:
                while not self._may_begin(waiter):  # noqa: ASYNC110 - requests are counted, and set no event
                    await asyncio.sleep(_YIELD_POLL_S)
            finally:
                self._waiting.remove(waiter)
            self._begin(waiter)
            try:
                yield
            finally:
                self._end(waiter)

    def _may_begin(self, waiter: _Waiter) -> bool:
        if self._running_alone:
            return False
        if waiter.is_alone:
            is_first = waiter is min(self._waiting, key=self._order)
            return is_first and not self._running and not self._other_suspects
        may_be_alone = () if self._other_suspects else self._waiting
        first_alone = min((self._order(each) for each in may_be_alone if each.is_alone), default=None)
        if first_alone is not None and self._order(waiter) > first_alone:
            return False
        if not self._interactive_requests():
            return True
        running = self._running[waiter.tenant]
        tenants = {each.tenant for each in self._waiting} | self._running.keys()
        if self._running.total() >= self._busy_places:
            return running < max(1, self._busy_places // len(tenants))
        return running == min(self._running[each.tenant] for each in self._waiting)

    def _order(self, waiter: _Waiter) -> tuple[int, int]:
        """Return the rank of waiting work: the tenant that was served the longest time ago comes first."""
        return self._last_turns.get(waiter.tenant, 0), waiter.number

    def _begin(self, waiter: _Waiter) -> None:
        self._running[waiter.tenant] += 1
        self._running_alone = waiter.is_alone
        self._last_turns[waiter.tenant] = 1 + max(self._last_turns.values(), default=0)

    def _end(self, waiter: _Waiter) -> None:
        self._running[waiter.tenant] -= 1
        self._running_alone = False
        if not self._running[waiter.tenant]:
            del self._running[waiter.tenant]
            if all(each.tenant != waiter.tenant for each in self._waiting):
                del self._last_turns[waiter.tenant]
