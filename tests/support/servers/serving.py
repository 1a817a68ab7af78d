"""A whole stack on a loopback port, in the test's own event loop. Every response stream it sends is held against the
laws of the stream when the test ends."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from starlette.types import Message, Receive, Scope, Send

from providers.common.fair_turns import TenantTurn
from stack.build import Stack
from stack.config import HttpServerConfig, StackConfig
from stack.http.app import App, create_app
from stack.http.peer import Peer, get_peer, peer_state
from stack.http.sse import DONE_FRAME
from stack.serving.serve import DrainingServer
from tests.support.laws.message_laws import check_message_frames
from tests.support.laws.stream_laws import check_frames, check_stream
from tests.support.sdk.client import sdk_client

SCRIPTED: dict[str, Any] = {"provider": "scripted"}
MEMORY: dict[str, Any] = {"provider": "memory"}


@dataclass
class Served:
    """A running stack: an SDK client of it, its URL without /v1, and what is inside."""

    client: AsyncOpenAI
    url: str
    app: App
    streams: "Recorder"
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, it ends the server as SIGTERM does."""
    inference: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The section of the config."""

    @property
    def stack(self) -> Stack:
        return self.app.state.services.stack


class Recorder:
    """ASGI middleware that keeps every response stream, and can check them all."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.state = app.state
        self.router = app.router
        self.bodies: list[tuple[bytearray, str]] = []
        self.check = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(("/responses", "/messages")):
            await self._app(scope, receive, send)
            return
        body: bytearray | None = None
        dialect = dict(scope["headers"]).get(b"x-responses-dialect", b"openai").decode()
        if scope["path"].endswith("/messages"):
            dialect = "messages"

        async def keep(message: Message) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                kinds = dict(message["headers"]).get(b"content-type", b"")
                if kinds.startswith(b"text/event-stream"):
                    body = bytearray()
                    self.bodies.append((body, dialect))
            elif body is not None:
                body += message.get("body", b"")
            await send(message)

        def keep_pushed(pushed: bytes) -> None:
            assert body is not None
            body.extend(pushed)

        await self._app(_with_peer(scope, keep_pushed), receive, keep)

    def assert_lawful(self) -> None:
        """Raise for the first stream that breaks a law. One that was left early is checked as far as it got."""
        for body, dialect in self.bodies:
            raw = bytes(body)
            if dialect == "messages":
                check_message_frames(raw, whole=b"event: message_stop" in raw or b"event: error" in raw)
            if dialect != "openai":
                continue
            whole = raw.endswith(DONE_FRAME)
            if not whole:
                raw = raw[: raw.rfind(b"\n\n") + 2] + DONE_FRAME
            check_stream(check_frames(raw), whole=whole)


class _RecordingPeer(Peer):
    """A peer that also records what is pushed past the ASGI layers."""

    def __init__(self, peer: Peer, record: Callable[[bytes], None]) -> None:
        self._peer = peer
        self._record = record
        self.turn = peer.turn
        self.cover_message = peer.cover_message
        self.write_text = peer.write_text

    def admit(self, turn: TenantTurn) -> None:
        self._peer.admit(turn)
        self.turn = turn

    def body_writer(self) -> Callable[[bytes], bool]:
        write_body = self._peer.body_writer()

        def record_and_write(body: bytes) -> bool:
            self._record(body)
            return write_body(body)

        return record_and_write

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        self._peer.watch(on_disconnect)

    def stop_watching(self) -> None:
        self._peer.stop_watching()

    def abort(self) -> None:
        self._peer.abort()


def _with_peer(scope: Scope, record: Callable[[bytes], None]) -> Scope:
    peer = get_peer(scope)
    return scope if peer is None else {**scope, "state": peer_state(scope["state"], _RecordingPeer(peer, record))}


@asynccontextmanager
async def serving(
    inference: Mapping[str, Any] | None = None,
    *,
    kv_store: Mapping[str, Any] | None = None,
    tool_runtime: Mapping[str, Any] | None = None,
    tool_servers: Mapping[str, Any] | None = None,
    responses: Mapping[str, Any] | None = None,
    webhooks: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> AsyncGenerator[Served]:
    """Serve a stack of these sections, `more` by API; without any, the scripted model and the memory store."""
    sections: dict[str, Any] = {"inference": inference or SCRIPTED, "kv_store": kv_store or MEMORY}
    sections["server"] = {"port": 0, **(server or {})}
    if tool_runtime is not None:
        sections["tool_runtime"] = tool_runtime
    if tool_servers is not None:
        sections["tool_servers"] = tool_servers
    sections["responses"] = {"provider": "loop", **(responses or {})}
    sections["webhooks"] = {"provider": "kv", **(webhooks or {})}
    config = StackConfig.model_validate({**sections, **(more or {})})
    app = create_app(config)
    recorder = Recorder(app)
    # asyncio turns Nagle's algorithm off only where the protocol is given: without it, small pieces wait for 40 ms
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listening = asyncio.Event()
    keys = config.server.api_keys
    key = keys[0].key.get_secret_value() if keys else "none"
    async with app.router.lifespan_context(app):
        server_ = _Quiet(recorder, config.server, listening.set)
        running = asyncio.create_task(server_.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(10):
                await listening.wait()
            async with sdk_client(url, key) as client:
                yield Served(client, url, app, recorder, server_.leaving, inference or SCRIPTED)
        finally:
            server_.leaving.set()
            async with asyncio.timeout(10):
                await running
            listener.close()
    if recorder.check:
        recorder.assert_lawful()


class _Quiet(DrainingServer):
    """The server without its signal handlers, which are the test runner's, and without its pauses, which add up."""

    def __init__(self, app: Any, config: HttpServerConfig, on_listening: Callable[[], None]) -> None:
        super().__init__(app, config, on_listening, lambda: False)
        self.leaving = asyncio.Event()

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.listeners:
            await listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks))


def scripted(*turns: list[dict[str, Any]], model: str = "scripted") -> dict[str, Any]:
    """An inference section that plays these turns."""
    return {"provider": "scripted", "model": model, "turns": list(turns)}
