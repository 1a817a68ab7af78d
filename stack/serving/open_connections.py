"""OpenConnections: bounds on the connections of one process, above all on those that have not authenticated."""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, Protocol

from providers.common.fair_turns import TenantTurn
from stack.http.peer import Peer

ANONYMOUS_PER_ADDRESS: Final = 200
"""Connections of one address that may be open without a request that has passed authentication; beyond it the oldest
idle one is closed, so that a flood of silent connections closes its own."""
PROBE_RESERVE: Final = 64
"""Connections above `max_connections` that are accepted, because a probe may be among them."""
_MIN_AGE_S: Final = 1.0
"""An anonymous connection younger than this is closed only when the server is full: its request is on the way."""
_MAX_SCANNED: Final = 16
_REGISTRY_KEY: Final = "stack.open_connections"


class TrackedConnection(Protocol):
    """A protocol instance of the server."""

    transport: Any
    timeout_keep_alive: Any

    @property
    def is_idle(self) -> bool:
        """True while no request runs on the connection."""
        ...

    def body_writer(self) -> Callable[[bytes], bool]:
        """Return the function of `Peer.body_writer`."""
        ...


class TrackedPeer(Peer):
    """One open connection and its state in the registry."""

    __slots__ = (
        "_on_disconnect",
        "_registry",
        "address",
        "connection",
        "cover_message",
        "is_admitted",
        "opened_at",
        "turn",
    )

    def __init__(
        self,
        registry: "OpenConnections",
        connection: TrackedConnection,
        address: str,
        turn: TenantTurn,
        now: float,
    ) -> None:
        self._registry = registry
        self.connection: TrackedConnection | None = connection
        self.address = address
        self.turn = turn
        self.cover_message = _cover_any
        self.opened_at = now
        self.is_admitted = False
        self._on_disconnect: Callable[[], None] | None = None

    def admit(self, turn: TenantTurn) -> None:
        self.turn = turn
        if not self.is_admitted:
            self.is_admitted = True
            self._registry.admit(self)

    def body_writer(self) -> Callable[[bytes], bool]:
        return _write_nothing if self.connection is None else self.connection.body_writer()

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        if self.connection is None:
            on_disconnect()
        else:
            self._on_disconnect = on_disconnect

    def stop_watching(self) -> None:
        self._on_disconnect = None

    def abort(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()

    def close(self) -> None:
        """Forget the connection, which is closed. A second call does nothing."""
        if self.connection is not None:
            self.connection = None
            self._registry.forget(self)
            on_disconnect, self._on_disconnect = self._on_disconnect, None
            if on_disconnect is not None:
                on_disconnect()


class OpenConnections:
    """Counts the open connections of one server, and closes idle anonymous ones where there are too many."""

    def __init__(self, max_connections: int, admitted_idle_s: float) -> None:
        self._max_connections = max_connections
        self._admitted_idle_s = admitted_idle_s
        self._count = 0
        self._anonymous: dict[TrackedPeer, None] = {}
        self._by_address: dict[str, dict[TrackedPeer, None]] = {}
        self.drain_idle_s: float | None = None
        """Once the server drains, the seconds that a connection may wait for its last request."""

    @staticmethod
    def of(app_state: dict[str, Any]) -> "OpenConnections":
        """Return the registry of the server whose ASGI state this is."""
        registry = app_state.get(_REGISTRY_KEY)
        return registry if registry is not None else OpenConnections(4096, 75)

    def add_to(self, app_state: dict[str, Any]) -> None:
        """Make this the registry of the server whose ASGI state this is."""
        app_state[_REGISTRY_KEY] = self

    @property
    def is_crowded(self) -> bool:
        """True if more connections are open than are served; only probes are then."""
        return self._count > self._max_connections

    def open(self, connection: TrackedConnection, address: str, turn: TenantTurn, now: float) -> TrackedPeer:
        """Return the peer of a new connection, whose address has `turn`.

        Where there are too many, the oldest idle anonymous one is closed, of the same address or, when the server is
        full, of any; if there is none in a full server, the new one is.
        """
        peer = TrackedPeer(self, connection, address, turn, now)
        self._count += 1
        self._anonymous[peer] = None
        neighbours = self._by_address.setdefault(address, {})
        neighbours[peer] = None
        if len(neighbours) > ANONYMOUS_PER_ADDRESS:
            _abort_oldest_idle(neighbours, now - _MIN_AGE_S)
        if self._count > self._max_connections + PROBE_RESERVE and not _abort_oldest_idle(self._anonymous, now):
            peer.abort()
        return peer

    def admit(self, peer: TrackedPeer) -> None:
        """Take the peer out of the bounds on anonymous connections."""
        self._discard_anonymous(peer)
        if peer.connection is not None and self.drain_idle_s is None:
            peer.connection.timeout_keep_alive = self._admitted_idle_s

    def forget(self, peer: TrackedPeer) -> None:
        """Take a closed connection out of all counts."""
        self._count -= 1
        self._discard_anonymous(peer)

    def _discard_anonymous(self, peer: TrackedPeer) -> None:
        self._anonymous.pop(peer, None)
        neighbours = self._by_address.get(peer.address)
        if neighbours is not None:
            neighbours.pop(peer, None)
            if not neighbours:
                del self._by_address[peer.address]


def _abort_oldest_idle(peers: dict[TrackedPeer, None], opened_before: float) -> bool:
    """Close the oldest idle connection of `peers`, which are in the order of their age; return false without any."""
    for peer in islice(peers, _MAX_SCANNED):
        if peer.opened_at > opened_before:
            return False
        connection = peer.connection
        if connection is not None and connection.is_idle and not connection.transport.is_closing():
            connection.transport.abort()
            return True
    return False


def _cover_any(_: int) -> bool:
    """Take the bytes of a message that the app does not bound."""
    return True


def _write_nothing(_: bytes) -> bool:
    """Write to a connection that is lost."""
    return False
