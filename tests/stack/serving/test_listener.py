"""The listening socket of a server, on asyncio's own event loop and on the one that servers run on."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop

from stack.server_config import HttpServerConfig
from stack.serving import listener as listener_module
from stack.serving.listener import Listener, bind_listener

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]
on_each_loop = pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])


class Greeting(asyncio.Protocol):
    """Says hello to each client. `turns` holds the turn of the event loop in which each connection was made."""

    turns: list[int]
    turn = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self.turns.append(Greeting.turn)
        stream.write(b"hello")
        stream.close()


def run_on(loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(main, 10))


def bound() -> socket.socket:
    return bind_listener(HttpServerConfig.model_validate({"port": 0}))


async def greet(client: socket.socket) -> bytes:
    client.setblocking(False)
    return await asyncio.get_running_loop().sock_recv(client, 100)


@on_each_loop
def test_connections_that_wait_are_accepted_in_one_turn(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        Greeting.turns, Greeting.turn = [], 0
        server = bound()
        address = server.getsockname()
        listener = Listener(server, Greeting)
        clients = [socket.create_connection(address) for _ in range(20)]
        while len(Greeting.turns) < len(clients):
            await asyncio.sleep(0)
            Greeting.turn += 1
        assert max(Greeting.turns) - min(Greeting.turns) <= 1
        assert await asyncio.gather(*map(greet, clients)) == [b"hello"] * 20
        await listener.close()
        for client in clients:
            client.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    run_on(loop_factory, main())


@on_each_loop
def test_more_connections_than_one_turn_accepts_are_all_served(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_MAX_ACCEPTED", 3)

    async def main() -> None:
        Greeting.turns, Greeting.turn = [], 0
        server = bound()
        listener = Listener(server, Greeting)
        clients = [socket.create_connection(server.getsockname()) for _ in range(20)]
        assert await asyncio.gather(*map(greet, clients)) == [b"hello"] * 20
        await listener.close()
        for client in clients:
            client.close()

    run_on(loop_factory, main())


class ExhaustedSocket(socket.socket):
    """A socket whose first accept finds no file left."""

    accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.accepts += 1
        if self.accepts == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@on_each_loop
def test_without_a_file_for_a_connection_it_waits_and_tries_again(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener_module, "_RETRY_S", 0.1)

    async def main() -> None:
        Greeting.turns = []
        server = ExhaustedSocket(proto=socket.IPPROTO_TCP)
        server.bind(("127.0.0.1", 0))
        listener = Listener(server, Greeting)
        with socket.create_connection(server.getsockname()) as client:
            await asyncio.sleep(0.05)
            assert (server.accepts, Greeting.turns) == (1, [])
            assert await greet(client) == b"hello"
        await listener.close()

    with caplog.at_level(logging.ERROR):
        run_on(loop_factory, main())
    assert "Too many open files" in caplog.text


@on_each_loop
def test_a_client_that_has_gone_while_it_waited_disturbs_nothing(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        Greeting.turns = []
        server = bound()
        listener = Listener(server, Greeting)
        with socket.create_connection(server.getsockname()) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
        with socket.create_connection(server.getsockname()) as client:
            assert await greet(client) == b"hello"
        await listener.close()

    run_on(loop_factory, main())
