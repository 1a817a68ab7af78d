"""Peer: the TCP connection of a request, as the layers above the protocol see it."""

from collections.abc import Callable
from typing import Any, Final, Protocol

from starlette.types import Scope

from providers.common.fair_turns import TenantTurn

DRAIN_MESSAGE_TYPE: Final = "websocket.drain"
"""The type of a message to the app, besides ASGI's, when the server drains: the app closes the WebSocket when it is
done."""
_STATE_KEY: Final = "stack.peer"


class Peer(Protocol):
    """One client's connection. All requests on it share the object, through the `state` of their scopes."""

    turn: TenantTurn
    """The turn in which the connection is read: its address's until a request has passed authentication."""

    cover_message: Callable[[int], bool]
    """Takes the bytes of a WebSocket's unfinished message; false where they find no place. The app sets it."""

    write_text: Callable[[str], bool]
    """Sends a message on the open WebSocket without waiting, past the ASGI layers; true if the client is ready for
    more. Where it has left, the message is lost. The server sets it."""

    def admit(self, turn: TenantTurn) -> None:
        """Record that a request on the connection has passed authentication: it may stay open between requests, and is
        read in the turns of the tenant."""
        ...

    def body_writer(self) -> Callable[[bytes], bool]:
        """Return the function that writes a part of the body of the response that is being sent, without waiting, past
        the ASGI layers; it returns true if the client is ready for more. It is for a response without a declared
        length, whose start was sent with the ASGI `send`."""
        ...

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` once when the client's connection is lost, at once if it is lost already. One request at
        a time watches the connection."""
        ...

    def stop_watching(self) -> None:
        """Forget the callback of `watch`."""
        ...

    def abort(self) -> None:
        """Close the connection at once, without sending what is buffered."""
        ...


def peer_state(app_state: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """Return the ASGI state of the requests on a connection."""
    return {**app_state, _STATE_KEY: peer}


def scope_without_peer(scope: Scope) -> Scope:
    """Return the scope for an app whose every message must pass through `send`, because a layer observes them."""
    return {**scope, "state": {name: value for name, value in scope.get("state", {}).items() if name != _STATE_KEY}}


def get_peer(scope: Scope) -> Peer | None:
    """Return the connection of a request; None where another server than ours runs the app."""
    return scope.get("state", {}).get(_STATE_KEY)
