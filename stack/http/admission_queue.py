"""AdmissionQueue: a bound on the requests that models answer at once for one process, and the queue before it."""

import asyncio
from typing import Final

from pydantic import BaseModel

from apis.errors import Overloaded
from apis.fair_share import FairShare, Place
from stack.server_config import HttpServerConfig

_TIER_RANKS: Final = {"ultrafast": -2, "fast": -1, "priority": -1, "flex": 1}
"""Ranks by `service_tier`, smaller first; every other tier has rank 0."""
_RETRY_AFTER_S: Final = 2.0


class AdmissionQueue:
    """Places for `max_running` requests of clients, with a queue of `max_waiting`.

    A tenant has at most half of both once a second one has come, and a place that becomes free goes to the waiting
    tenant that uses the fewest. Within a tenant, `service_tier` ranks the requests; of all tenants, those with `flex`
    wait for all others. So no tenant gains over another one by a tier.
    """

    def __init__(self, config: HttpServerConfig, *, several_tenants: bool) -> None:
        self._max_running = config.max_running
        self._max_waiting = config.max_waiting
        self._max_wait_s = config.max_wait_s
        self._share = FairShare(
            "requests",
            config.max_running,
            tenant_waiting=max(1, config.max_waiting // 2) if several_tenants else None,
            several_tenants=several_tenants,
        )

    @property
    def running(self) -> int:
        """Number of requests that models answer now."""
        return self._share.used

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return self._share.waiting

    def try_enter(self, tenant: str) -> Place | None:
        """Return a place, None if the request would have to wait."""
        return self._share.try_acquire(tenant)

    async def enter(self, tenant: str, request: BaseModel) -> Place:
        """Return a place as soon as it is the request's turn. Raises Overloaded if too many requests wait, or the
        request has waited for too long, and RateLimited if too many of the tenant wait."""
        place = self.try_enter(tenant)
        if place is not None:
            return place
        if self._share.waiting >= self._max_waiting:
            raise Overloaded(
                f"This server answers {self._max_running} requests (`server.max_running`), and {self._max_waiting} "
                "wait (`server.max_waiting`). Try again in a moment.",
                retry_after_s=_RETRY_AFTER_S,
            )
        rank = _TIER_RANKS.get(getattr(request, "service_tier", None) or "", 0)
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await self._share.acquire(tenant, rank=rank)
        except TimeoutError:
            raise Overloaded(
                f"No place became free for this request in {self._max_wait_s:g} s (`server.max_wait_s`).",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
