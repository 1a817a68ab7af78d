"""Shares of what requests hold in one process: bytes of bodies and answers, uploads, open streams, open WebSockets, and
places among the requests that models answer, with the queue before them."""

import asyncio
import shutil
import tempfile
from typing import Final

from pydantic import BaseModel

from apis.errors import Overloaded, RateLimited
from apis.fair_share import FairShare, Place
from providers.common.held_bytes import PLACE_BYTES, UNCOUNTED_BYTES, take_places, too_many_bytes_error
from stack.server_config import HttpServerConfig

_DISK_PART: Final = 0.8
"""Part of the disk for temporary files that uploads may fill."""

_TIER_RANKS: Final = {"ultrafast": -2, "fast": -1, "priority": -1, "flex": 1}
"""Ranks by `service_tier`, smaller first; every other tier has rank 0."""
_RETRY_AFTER_S: Final = 2.0


class RequestShares:
    """Bounds over all requests of a process. One tenant has at most half of each once a second tenant has come, and of
    what fills memory and disk from the first request on where there are `several_tenants`."""

    def __init__(self, config: HttpServerConfig, free_disk_bytes: int, *, several_tenants: bool = False) -> None:
        """`free_disk_bytes` are those of the temporary folder."""
        places = config.max_bodies_bytes // PLACE_BYTES
        one_body = _count_places(config.max_body_bytes)
        self.bytes = FairShare(
            "bytes in progress",
            places,
            tenant_places=max(places // 2, one_body),
            several_tenants=several_tenants,
        )
        places = max(1, min(config.max_uploads_bytes, int(free_disk_bytes * _DISK_PART)) // PLACE_BYTES)
        self.max_upload_bytes = places * PLACE_BYTES
        """The largest upload that there can ever be room for."""
        self._uploads = FairShare("uploads in progress", places, several_tenants=several_tenants)
        self._streams = FairShare("streams", config.max_streams)
        self._websockets = FairShare("WebSockets", config.max_websockets)

    def cover_body(self, places: list[Place], size_bytes: int, tenant: str) -> None:
        """Add to `places` until they cover a body of which `size_bytes` have been received. They are released when the
        request is over, because what was parsed from the body lives as long. Raises Overloaded."""
        if size_bytes > UNCOUNTED_BYTES:
            _cover(places, size_bytes, self.bytes, tenant, "max_bodies_bytes")

    def add_bytes(self, places: list[Place], size_bytes: int, tenant: str) -> None:
        """Add to `places` those for so many bytes more, which are in memory until the request is over. Raises
        Overloaded."""
        if size_bytes > UNCOUNTED_BYTES and not take_places(places, _count_places(size_bytes), self.bytes, tenant):
            raise too_many_bytes_error()

    def cover_upload(self, places: list[Place], size_bytes: int, tenant: str, *, max_bytes: int) -> None:
        """Add to `places` until they cover so many bytes of an upload, which lie in the temporary folder until
        the request is over. The only upload of a tenant may have `max_bytes`, the limit of its route, even if half of
        the room is less. Raises Overloaded."""
        at_least = _count_places(max_bytes) if self._uploads.used_by(tenant) == len(places) else 0
        _cover(places, size_bytes, self._uploads, tenant, "max_uploads_bytes", at_least=at_least)

    def open_stream(self, tenant: str) -> Place:
        """Return a place for an event stream. Raises RateLimited."""
        return _acquire(self._streams, tenant, "streams", "max_streams")

    def open_websocket(self, tenant: str) -> Place:
        """Return a place for a WebSocket. Raises RateLimited."""
        return _acquire(self._websockets, tenant, "WebSockets", "max_websockets")


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


def read_free_disk_bytes() -> int:
    """Return the bytes that are free where temporary files lie. It blocks."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def _count_places(size_bytes: int) -> int:
    return -(-size_bytes // PLACE_BYTES)


def _cover(
    places: list[Place], size_bytes: int, share: FairShare, tenant: str, setting: str, *, at_least: int = 0
) -> None:
    if not take_places(places, _count_places(size_bytes) - len(places), share, tenant, at_least=at_least):
        raise too_many_bytes_error(setting)


def _acquire(share: FairShare, tenant: str, resource: str, setting: str) -> Place:
    place = share.try_acquire(tenant)
    if place is None:
        raise RateLimited(
            f"Too many {resource} are open (`server.{setting}`): let some of them end first.", retry_after_s=1
        )
    return place
