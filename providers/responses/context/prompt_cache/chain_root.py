"""The root of a chain: an opaque id by which all its turns reach the replica that has their prefix in its cache."""

import hashlib
import time
from typing import Final

from apis.responses import CreateResponse
from providers.common.recent import RecentEntries

_MIN_SHARED_CHARS: Final = 4096
"""Length of instructions and tools from which chains that begin with them share a replica."""
_MAX_SHARING_CHAINS: Final = 4
"""Chains that share a root for their common beginning; those after them spread over all replicas, which then each have
that beginning in their caches."""
_SHARING_S: Final = 600.0
"""Seconds after which an engine may have evicted a beginning, and its chains are counted from zero."""
_MAX_BEGINNINGS: Final = 1024


class ChainRoots:
    """Chooses the roots of new chains. A chain, its branches and a conversation have one root each; it holds a digest
    of the tenant and a random id, so that nothing outside learns or guesses the ids of responses."""

    def __init__(self) -> None:
        self._beginnings = RecentEntries[str, tuple[float, int]](_MAX_BEGINNINGS)

    def choose(self, request: CreateResponse, tenant: str, inherited_root: str, own_id: str | None) -> str:
        """Return the root of a response: that of its conversation or of the chain that it continues, else a new one,
        which equals that of a few others with the same long instructions and tools. `own_id` is None for a response
        that nothing can continue, which has no root."""
        if request.conversation_id is not None:
            return _digest(tenant, request.conversation_id)
        if inherited_root or own_id is None:
            return inherited_root
        shared_root = self._shared_root(request, tenant) if request.instructions or request.tools else ""
        return shared_root or _digest(tenant, own_id)

    def _shared_root(self, request: CreateResponse, tenant: str) -> str:
        beginning = "\n".join(
            [request.instructions or "", *(tool.model_dump_json(exclude_none=True) for tool in request.tools or ())]
        )
        if len(beginning) < _MIN_SHARED_CHARS:
            return ""
        root, now = _digest(tenant, f"{request.model}\n{beginning}"), time.monotonic()
        first_at, count = self._beginnings.get(root, (now, 0))
        if now - first_at > _SHARING_S:
            first_at, count = now, 0
        if count >= _MAX_SHARING_CHAINS:
            return ""
        self._beginnings[root] = (first_at, count + 1)
        return root


def _digest(tenant: str, identity: str) -> str:
    text = f"{tenant}\n{identity}"
    return f"root_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
