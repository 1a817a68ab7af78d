"""Shares of what requests hold in one process: bytes of bodies and answers, uploads, open streams, open WebSockets."""

import shutil
import tempfile
from typing import Final

from apis.errors import RateLimited
from apis.fair_share import FairShare, Place
from providers.common.held_bytes import PLACE_BYTES, UNCOUNTED_BYTES, take_places, too_many_bytes_error
from stack.server_config import HttpServerConfig

_DISK_PART: Final = 0.8
"""Part of the disk for temporary files that uploads may fill."""


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
