"""Runs the app: one process that listens, drains on a signal and ends in time, even if something hangs."""

import asyncio
import faulthandler
import gc
import logging
import multiprocessing
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from apis.errors import ConfigError, Overloaded
from stack.config import HttpServerConfig
from stack.http.answers import error_response
from stack.http.edge import PROBE_PATHS
from stack.http.websocket import SHUTTING_DOWN_MESSAGE
from stack.serving.connection import HttpServerConnection
from stack.serving.socket_connection import WebSocketServerConnection

# An idle connection stays open longer than those of the load balancers in common use (60 s): were it the other way
# round, they would send a request into a connection that is being closed.
_IDLE_TIMEOUT_S = 75
_BACKLOG = 2048
_POLL_S = 0.1
_CANCEL_TIMEOUT_S = 0.3
_EXIT_TIMEOUT_S = 0.9
_FIRST_REQUEST_WAIT_S = 1.0
_OPEN_FILES_LIMIT = 65_536

_log = logging.getLogger(__name__)


class ServedApp(Protocol):
    """A Starlette or FastAPI application."""

    state: Any
    router: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class DrainingServer(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT and gives up waiting on the second.

    Draining: `app.state.draining` is true at once, running requests get `grace_period_s` to finish, and until they
    have, the port stays open to answer new requests with 503 and probes with the state. Requests that still run are
    then cancelled. The process is gone at most a second after the grace period, or after the second signal: if
    something hangs, with every thread's traceback on stderr and exit code 1.

    A worker that drains alone, while others serve the same port, stops accepting, and serves its own connections.
    """

    def __init__(
        self,
        app: ServedApp,
        config: HttpServerConfig,
        on_listening: Callable[[], None],
        others_keep_serving: Callable[[], bool],
    ) -> None:
        self._drain_gate = _DrainGate(app)
        super().__init__(
            uvicorn.Config(
                self._drain_gate,
                loop="asyncio",
                http=HttpServerConnection,
                ws=WebSocketServerConnection,
                ws_max_size=config.max_body_bytes,
                ws_ping_interval=config.keep_alive_s,
                # a client that runs a tool may not read for minutes, and is none the worse for that
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=_IDLE_TIMEOUT_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._app = app
        self._grace_s = config.grace_period_s
        self._on_listening = on_listening
        self._others_keep_serving = others_keep_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._drain_when_parent_exits()
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._drain_gate.closes_after_response = self._others_keep_serving()
        self._app.state.draining = True
        left_s = _EXIT_TIMEOUT_S if self.force_exit else self._grace_s + _EXIT_TIMEOUT_S
        faulthandler.dump_traceback_later(left_s, exit=True, file=sys.__stderr__ or sys.stderr)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain_gate.closes_after_response:
            await self._stop_accepting()
        for connection in list(self.server_state.connections):
            # one without a request yet is about to send it, and is answered that the server is shutting down
            if not isinstance(connection, HttpServerConnection) or connection.has_request:
                connection.shutdown()
        tasks = self.server_state.tasks
        draining = self._drain_app()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        while (running := {*tasks, *draining}) and not self.force_exit and loop.time() < deadline:
            await asyncio.wait(running, timeout=_POLL_S)
        for task in draining:
            task.cancel()
        if tasks:
            _log.warning("%d requests still ran when the grace period was over and are cut off.", len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.wait(set(tasks), timeout=_CANCEL_TIMEOUT_S)
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)

    async def _stop_accepting(self) -> None:
        """Stop accepting connections, and wait a moment for the requests of those accepted just before."""
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FIRST_REQUEST_WAIT_S
        while not self.force_exit and loop.time() < deadline:
            if all(getattr(each, "has_request", True) for each in self.server_state.connections):
                return
            await asyncio.sleep(_POLL_S)

    def _drain_app(self) -> set[asyncio.Task[None]]:
        """Return the task of the app's `state.drain`, which ends the work that no request waits for."""
        drain: Callable[[], Coroutine[Any, Any, None]] | None = getattr(self._app.state, "drain", None)
        if drain is None:
            return set()
        draining = {asyncio.create_task(drain())}
        for task in draining:
            task.add_done_callback(draining.discard)
        return draining

    def _drain_when_parent_exits(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is None:
            return
        loop = asyncio.get_running_loop()

        def orphaned() -> None:
            loop.remove_reader(parent.sentinel)
            self.handle_exit(signal.SIGTERM, None)

        loop.add_reader(parent.sentinel, orphaned)


class _DrainGate:
    """ASGI middleware that refuses new requests while the app drains. With `closes_after_response`, because other
    workers serve the port, it serves each open connection for the last time."""

    def __init__(self, app: ServedApp) -> None:
        self._app = app
        self.closes_after_response = False
        app.state.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app.state.draining and self.closes_after_response:
            send = _close_after_response(send)
        elif self._app.state.draining and scope["path"] not in PROBE_PATHS:
            await error_response(Overloaded(SHUTTING_DOWN_MESSAGE))(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Our own cancellation, at the end of the grace period, ends the request's task without a traceback.
            if not self._app.state.draining:
                raise


def _close_after_response(send: Send) -> Send:
    """Return `send` with `connection: close`, so that the client sends no other request into the connection."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_closing


async def serve(
    app: ServedApp,
    config: HttpServerConfig,
    listener: socket.socket,
    on_listening: Callable[[], None] = lambda: None,
    others_keep_serving: Callable[[], bool] = lambda: False,
) -> None:
    """Serve `app` on a bound socket until a signal ends it.

    The app's lifespan starts before the socket listens and ends after the last request, and its errors are raised here.
    `others_keep_serving` returns true if other workers serve the port after this process has ended.
    """
    _raise_file_limit()
    lifespan: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    async with lifespan:
        _tune_garbage_collector()
        await DrainingServer(app, config, on_listening, others_keep_serving).serve(sockets=[listener])


def _tune_garbage_collector() -> None:
    """Exclude the objects of the start from garbage collection, because they live as long as the server, and collect
    less often: nearly all objects of a request are freed by their reference counts."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def bind_listener(config: HttpServerConfig) -> socket.socket:
    """A socket bound to the config's host and port, not listening yet. Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only for a socket with its protocol: without it, deltas wait for 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ConfigError(
            f"server: cannot listen on {config.host} port {config.port}: {exc.strerror}. Choose another with "
            "server.host and server.port, or --host and --port."
        ) from exc
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL at which clients reach the listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def set_up_logging(level: str) -> None:
    """Log to stderr: our own packages at `level`, libraries from warnings on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("stack", "providers", "apis"):
        logging.getLogger(name).setLevel(level.upper())


def _raise_file_limit() -> None:
    """Raise the limit of open files: a stream holds two connections, and the usual 1,024 files end at 500 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES_LIMIT if hard == resource.RLIM_INFINITY else min(_OPEN_FILES_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
