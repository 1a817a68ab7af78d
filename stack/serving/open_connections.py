"""OpenConnections: bounds on the connections of one process, above all on those that have not authenticated."""

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from providers.common.fair_turns import TenantTurn
from stack.http.peer import Peer

if TYPE_CHECKING:  # a connection has its peer
    from stack.serving.connection import HttpServerConnection

PROBE_RESERVE: Final = 64
"""Connections above `max_connections` that are accepted, because a probe may be among them."""
_MIN_AGE_S: Final = 1.0
"""A silent connection younger than this is closed only when the server is full: its request is on the way."""
_MAX_SCANNED: Final = 16
_MAX_LINGERING: Final = 1024
"""Refused connections at a time whose clients have a moment to read the refusal."""
_REGISTRY_KEY: Final = "stack.open_connections"


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
        "write_text",
    )

    def __init__(
        self,
        registry: "OpenConnections",
        connection: "HttpServerConnection",
        address: str,
        turn: TenantTurn,
        now: float,
    ) -> None:
        self._registry = registry
        self.connection: HttpServerConnection | None = connection
        self.address = address
        self.turn = turn
        self.cover_message = _cover_any
        self.write_text: Callable[[str], bool] = _write_nothing
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
    """Counts the open connections of one server, and closes silent ones where there are too many: those on which no
    request has passed authentication, and none is running. One address may have `max_silent` of them."""

    def __init__(self, max_connections: int, max_silent: int, admitted_idle_s: float) -> None:
        self._max_connections = max_connections
        self._max_silent = max_silent
        self._admitted_idle_s = admitted_idle_s
        self._count = 0
        self._anonymous: dict[TrackedPeer, None] = {}
        self._lingering: set[TrackedPeer] = set()
        self._by_address: dict[str, dict[TrackedPeer, None]] = {}
        self.drain_idle_s: float | None = None
        """Once the server drains, the seconds that a connection may wait for its last request."""

    @staticmethod
    def of(app_state: dict[str, Any]) -> "OpenConnections":
        """Return the registry of the server whose ASGI state this is."""
        registry = app_state.get(_REGISTRY_KEY)
        return registry if registry is not None else OpenConnections(8192, 5000, 75)

    def add_to(self, app_state: dict[str, Any]) -> None:
        """Make this the registry of the server whose ASGI state this is."""
        app_state[_REGISTRY_KEY] = self

    @property
    def is_crowded(self) -> bool:
        """True if more connections are open than are served; only probes are then."""
        return self._served > self._max_connections

    @property
    def _served(self) -> int:
        return self._count - len(self._lingering)

    def open(self, connection: "HttpServerConnection", address: str, turn: TenantTurn, now: float) -> TrackedPeer:
        """Return the peer of a new connection, whose address has `turn`.

        Where there are too many, the oldest silent one is closed, of the same address or, when the server is full, of
        any. The new one is closed if there is none in a server that has not even room for a probe.
        """
        peer = TrackedPeer(self, connection, address, turn, now)
        neighbours = self._by_address.setdefault(address, {})
        if len(neighbours) >= self._max_silent:
            self._refuse_oldest(neighbours, now - _MIN_AGE_S, at_once=False)
        self._count += 1
        if self.is_crowded:
            has_room = self._served <= self._max_connections + PROBE_RESERVE
            opened_before = now - _MIN_AGE_S if has_room else now
            if not (self._refuse_oldest(self._anonymous, opened_before, at_once=True) or has_room):
                connection.refuse_silent(at_once=True)
        self._anonymous[peer] = None
        self._by_address.setdefault(address, {})[peer] = None
        return peer

    def admit(self, peer: TrackedPeer) -> None:
        """Take the peer out of the bounds on anonymous connections."""
        self._discard_anonymous(peer)
        if peer.connection is not None and self.drain_idle_s is None:
            peer.connection.timeout_keep_alive = self._admitted_idle_s

    def forget(self, peer: TrackedPeer) -> None:
        """Take a closed connection out of all counts."""
        self._count -= 1
        self._lingering.discard(peer)
        self._discard_anonymous(peer)

    def _refuse_oldest(self, peers: dict[TrackedPeer, None], opened_before: float, *, at_once: bool) -> bool:
        """Close the oldest silent connection of `peers`, which are in the order of their age; return false without
        any."""
        for peer in islice(peers, _MAX_SCANNED):
            if peer.opened_at > opened_before:
                return False
            connection = peer.connection
            if connection is not None and connection.is_silent and not connection.transport.is_closing():
                self._discard_anonymous(peer)
                at_once = at_once or len(self._lingering) >= _MAX_LINGERING
                if not at_once:
                    self._lingering.add(peer)
                connection.refuse_silent(at_once=at_once)
                return True
        return False

    def _discard_anonymous(self, peer: TrackedPeer) -> None:
        self._anonymous.pop(peer, None)
        neighbours = self._by_address.get(peer.address)
        if neighbours is not None:
            neighbours.pop(peer, None)
            if not neighbours:
                del self._by_address[peer.address]


def _cover_any(_: int) -> bool:
    """Take the bytes of a message that the app does not bound."""
    return True


def _write_nothing(_: str | bytes) -> bool:
    """Write to a connection that is lost."""
    return False
