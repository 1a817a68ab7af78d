"""A connection that is being accepted while the server stops listening."""

import asyncio
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from stack.server_config import HttpServerConfig
from stack.serving.listener import bind_listener
from stack.serving.serve import DrainingServer


class App:
    def __init__(self) -> None:
        self.state = self.router = SimpleNamespace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("served")(scope, receive, send)


class Server(DrainingServer):
    """Ends in the turn of the event loop in which it begins to accept the connection of `client`."""

    def __init__(self, client: socket.socket, address: Any) -> None:
        config = HttpServerConfig.model_validate({"port": 0})
        super().__init__(App(), config, lambda: None, lambda: True)
        self._client = client
        self._address = address

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self._client.connect(self._address)
        self._client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0)  # which sees the connection
        await asyncio.sleep(0)  # which begins to accept it


async def test_a_connection_that_is_being_accepted_is_served() -> None:
    listener = bind_listener(HttpServerConfig.model_validate({"port": 0}))
    with socket.socket() as client:
        client.settimeout(5)
        async with asyncio.timeout(10):
            await Server(client, listener.getsockname()).serve(sockets=[listener])
        assert client.recv(65536).endswith(b"served")
