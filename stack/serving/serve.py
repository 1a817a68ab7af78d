"""Runs the app: one process that listens, drains on a signal and ends in time, even if something hangs."""

import asyncio
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import Server

from apis.errors import Overloaded
from apis.imports import import_from_string
from apis.ticks import wait_for_tick
from stack.http.answers import error_response
from stack.http.peer import get_peer
from stack.http.routes.server import PROBE_PATHS
from stack.server_config import HttpServerConfig
from stack.serving.connection import HttpServerConnection
from stack.serving.listener import Listener
from stack.serving.open_connections import OpenConnections

# An idle connection stays open longer than those of the load balancers in common use (60 s): were it the other way
# round, they would send a request into a connection that is being closed.
_IDLE_TIMEOUT_S = 75
_POLL_S = 0.1
_TICK_S = 0.5
_CANCEL_TIMEOUT_S = 1.0
_FLUSH_TIMEOUT_S = 0.2
_EXIT_TIMEOUT_S = 0.9
# Seconds that a draining server waits for a request which may be on its way.
_LAST_REQUEST_WAIT_S = 1.5
_OPEN_FILES_LIMIT = 65_536
_SWITCH_INTERVAL_S = 0.001
_M_ARENA_MAX = -8  # as in malloc.h
_MAX_ARENAS = 2

_log = logging.getLogger(__name__)


class ServedApp(Protocol):
    """A Starlette or FastAPI application."""

    state: Any
    router: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class DrainingServer(Server):
    """Drains on the first SIGTERM, SIGINT or SIGHUP, or when its parent process has ended, and gives up waiting on the
    second signal.

    Draining: `app.state.draining` is true at once, which the readiness probe shows, and running requests get
    `grace_period_s` to finish. For a second the port stays open, unless other workers serve it or the server is idle;
    then new connections are refused, so that a proxy chooses another server. An open connection is served once more,
    with `connection: close`, and closed when it was idle for a while, because closing it at once would reset a request
    that is on its way. Requests that still run after the grace period are then ended by `app.state.end_running` and a
    cancellation, and get a moment to send their last event. After SIGINT background work does not go on until then, if
    no other process would: it waits for the next start, or ends. The process is gone at most a second after the grace
    period, or after the second signal: if something hangs, with every thread's traceback on stderr and exit code 1.
    """

    def __init__(
        self,
        app: ServedApp,
        config: HttpServerConfig,
        on_listening: Callable[[], None],
        others_keep_serving: Callable[[], bool],
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_connections = OpenConnections(config.max_connections, config.max_silent_per_address, _IDLE_TIMEOUT_S)
        super().__init__(
            Config(
                _RequestGate(app, self._open_connections),
                loop="asyncio",
                ws=cast("Any", _open_websocket),
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
                timeout_keep_alive=_IDLE_TIMEOUT_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._app = app
        self._grace_s = config.grace_period_s
        self._on_listening = on_listening
        self._others_keep_serving = others_keep_serving
        self._on_beat = on_beat
        self._last_request_wait_s = _LAST_REQUEST_WAIT_S
        self._is_interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup = asyncio.Event()
        self.listeners: list[Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._open_connections.add_to(self.lifespan.state)
        # the loop would keep a list of the open generators, six for each answer, to close them with itself: each is
        # closed by the code that iterates it
        sys.set_asyncgen_hooks(firstiter=None)
        create_connection = partial(
            HttpServerConnection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self.servers = []  # uvicorn's own listeners, of which there are none
        self.listeners = [Listener(each, create_connection) for each in sockets or ()]
        self.started = True
        self._on_listening()

    async def main_loop(self) -> None:
        # uvicorn's own looks ten times a second for a signal, which would be most of the work of an idle server
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            await wait_for_tick(self._wakeup, _TICK_S)
            self._wakeup.clear()

    async def on_tick(self, counter: int) -> bool:
        self._on_beat()
        if has_lost_parent() and not self.should_exit:
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        with super().capture_signals(), handle_hangup(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._app.state.draining = True
        if self._loop is not None:  # the signal itself does not wake it
            self._loop.call_soon_threadsafe(self._wakeup.set)
        if sig == signal.SIGINT:  # a person waits at the terminal
            self._is_interrupted = True
            self._last_request_wait_s = 0.0
        # from this moment on, as probes see the state from this moment on: `shutdown` begins a little later
        self._open_connections.drain_idle_s = self._last_request_wait_s
        left_s = _EXIT_TIMEOUT_S if self.force_exit else self._grace_s + _EXIT_TIMEOUT_S
        faulthandler.dump_traceback_later(left_s, exit=True, file=sys.__stderr__ or sys.stderr)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s
        app_tasks = self._drain_app()
        self._drain_connections()
        if self.server_state.tasks or app_tasks:
            await asyncio.wait({*self.server_state.tasks, *app_tasks}, timeout=_POLL_S)
        if running := self._describe_running():
            _log.info("Finishing %s for at most %g s. Ctrl-C or a second signal ends now.", running, self._grace_s)
        await self._stop_accepting(deadline)
        self._drain_connections()
        while (self._is_busy() or app_tasks) and not self.force_exit and loop.time() < deadline:
            self._on_beat()
            await _wait_for({*self.server_state.tasks, *app_tasks})
        for task in app_tasks:
            task.cancel()
        await self._end_requests()
        await self._close_connections()
        await super().shutdown(sockets)

    def _describe_running(self) -> str:
        """Return the numbers of requests and background responses that still run; empty if there are none."""
        count_background: Callable[[], int] = getattr(self._app.state, "count_background", lambda: 0)
        requests, background = len(self.server_state.tasks), count_background()
        parts = [_requests(requests)] if requests else []
        parts += [f"{background} background response{'s' if background > 1 else ''}"] if background else []
        return " and ".join(parts)

    def _is_busy(self) -> bool:
        return bool(self.server_state.tasks or self.server_state.connections)

    def _drain_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpServerConnection):
                connection.drain(self._last_request_wait_s)
            else:
                connection.shutdown()

    async def _stop_accepting(self, deadline: float) -> None:
        """Stop listening: at once if other workers serve the port, else after a moment in which probes can see the
        state, if there are any clients."""
        loop = asyncio.get_running_loop()
        deadline = min(deadline, loop.time() + (0 if self._others_keep_serving() else self._last_request_wait_s))
        while self._is_busy() and not self.force_exit and loop.time() < deadline:
            self._on_beat()
            await asyncio.sleep(_POLL_S)
        for listener in self.listeners:
            await listener.close()

    async def _end_requests(self) -> None:
        """End the requests that still run, so that each client receives an error or the last event of its stream."""
        tasks = self.server_state.tasks
        if not tasks:
            return
        _log.warning(
            "%s still ran %s and %s ended with an error.",
            _requests(len(tasks)),
            "at the second signal" if self.force_exit else f"when the grace period of {self._grace_s:g} s was over",
            "was" if len(tasks) == 1 else "were",
        )
        end_running: Callable[[], None] | None = getattr(self._app.state, "end_running", None)
        if end_running is not None:
            end_running()
        for task in tasks:
            task.cancel()
        await asyncio.wait(set(tasks), timeout=_CANCEL_TIMEOUT_S)

    async def _close_connections(self) -> None:
        """Close all connections, after sending what is buffered where the client reads."""
        connections = self.server_state.connections
        for connection in list(connections):
            connection.transport.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FLUSH_TIMEOUT_S
        while connections and loop.time() < deadline:  # noqa: ASYNC110  # connections set no event when they close
            await asyncio.sleep(_FLUSH_TIMEOUT_S / 10)
        for connection in list(connections):
            connection.transport.abort()

    def _drain_app(self) -> set[asyncio.Task[None]]:
        """Return the task of the app's `state.drain`, which ends the work that no request waits for."""
        drain: Callable[..., Coroutine[Any, Any, None]] | None = getattr(self._app.state, "drain", None)
        if drain is None:
            return set()
        draining = {asyncio.create_task(drain(at_once=self._is_interrupted))}
        for task in draining:
            task.add_done_callback(draining.discard)
        return draining


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


async def _wait_for(tasks: set[asyncio.Task[None]]) -> None:
    """Wait until one of the tasks ends, for `_POLL_S` at most."""
    if tasks:
        await asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(_POLL_S)


def has_lost_parent() -> bool:
    """Return true if `multiprocessing` started this process and the process that did so has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


@contextmanager
def handle_hangup(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle SIGHUP, which a closed terminal sends, like SIGTERM, unless it is ignored (`nohup`) or does not exist."""
    hangup = getattr(signal, "SIGHUP", None)
    if (
        hangup is None
        or signal.getsignal(hangup) == signal.SIG_IGN
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    before = signal.signal(hangup, handler)
    try:
        yield
    finally:
        signal.signal(hangup, before)


class _RequestGate:
    """ASGI middleware that refuses all but probes while too many connections are open, and ends cancelled requests."""

    def __init__(self, app: ServedApp, open_connections: OpenConnections) -> None:
        self._app = app
        self._open_connections = open_connections
        app.state.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._open_connections.is_crowded and scope["path"] not in PROBE_PATHS:
            error = Overloaded("This server has too many open connections. Try again in a moment.", retry_after_s=1)
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Our own cancellation, at the end of the grace period. Without a connection the task ends quietly.
            peer = get_peer(scope)
            if not self._app.state.draining or peer is None:
                raise
            peer.abort()
            await asyncio.sleep(0)


def _open_websocket(**arguments: Any) -> asyncio.Protocol:
    """Return the connection of a WebSocket, whose modules are imported for the first one."""
    return import_from_string("stack.serving.socket_connection:WebSocketServerConnection")(**arguments)


async def serve(
    app: ServedApp,
    config: HttpServerConfig,
    listener: socket.socket,
    on_listening: Callable[[], None] = lambda: None,
    others_keep_serving: Callable[[], bool] = lambda: False,
    on_beat: Callable[[], None] = lambda: None,
) -> None:
    """Serve `app` on a bound socket until a signal ends it.

    The app's lifespan starts before the socket listens and ends after the last request, and its errors are raised here.
    `others_keep_serving` returns true if other workers serve the port after this process has ended; `on_beat` is called
    twice a second while the event loop runs.
    """
    _raise_file_limit()
    _share_arenas()  # before the lifespan, which starts threads
    lifespan: AbstractAsyncContextManager[Any] = app.router.lifespan_context(app)
    async with lifespan:
        _tune_garbage_collector()
        # a thread that calculates lets the event loop go on after so many seconds, five times as often as by default
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        await DrainingServer(app, config, on_listening, others_keep_serving, on_beat).serve(sockets=[listener])


def _tune_garbage_collector() -> None:
    """Exclude the objects of the start from garbage collection, because they live as long as the server, and collect
    less often: nearly all objects of a request are freed by their reference counts."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def _share_arenas() -> None:
    """Have the threads of this process share the heaps of the C library: each would keep what it has freed."""
    if "torch" in sys.modules:  # the threads of an engine in this process allocate all the time
        return
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)


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
