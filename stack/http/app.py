"""create_app: the HTTP API over the live providers of one stack, as an ASGI app."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.datastructures import State
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from apis.batches.spare_capacity import SpareCapacity
from apis.fair_share import FairShare
from apis.imports import import_from_string
from providers.common.held_bytes import count_answers_in
from providers.common.supervision import supervise
from stack.build import Stack, open_stack
from stack.config import StackConfig
from stack.http.cache_salts import CacheSalts
from stack.http.context import Services
from stack.http.edge import Edge
from stack.http.freed_memory import find_trim, return_freed_memory
from stack.http.metrics import Metrics
from stack.http.readiness import StoreProbe
from stack.http.route_table import RouteTable
from stack.http.routes.batch_lines import RouteLineExecutor
from stack.http.routes.console.page import PAGE_PREFIX, serve_page
from stack.http.routes.server import METRICS_ROUTE, SERVER_ROUTES
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES, REFUSED_ROUTES, modules_by_resource
from stack.http.shares import AdmissionQueue, RequestShares, read_free_disk_bytes
from stack.http.streams import StreamMonitor
from stack.telemetry.setup import observe_inference, running_telemetry

_FIRST_RESOURCE: Final = "responses"
"""The resource whose routes are in memory before the first request."""
_DEFERRED_PLACES: Final = 32
"""Background responses with a completion window that a stack without batches executes at a time in one process."""


class App:
    """The ASGI app of one stack. It has the state and the router of a Starlette application, for the lifespan, and no
    coroutine of its own, which each step of every request would pass through. The page's files lie in front of the
    API."""

    def __init__(
        self, lifespan: Callable[["App"], AbstractAsyncContextManager[None]], edge: Edge, *, serves_page: bool
    ) -> None:
        self.state: Any = State()
        self.router = Router(lifespan=lifespan)
        self._edge = edge
        self._serves_page = serves_page

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["app"] = self
        if scope["type"] == "lifespan":
            return self.router(scope, receive, send)
        is_http = scope["type"] == "http"
        if self._serves_page and is_http and (scope["path"] == "/" or scope["path"].startswith(PAGE_PREFIX)):
            return serve_page(scope, receive, send)
        # the only layers around the handlers: Starlette's own ones would cost more than all else a request does here
        return self._edge(scope, receive, send)


def create_app(config: StackConfig) -> App:
    """Return the app of one run config; its lifespan opens the stack and closes it."""
    metrics = Metrics()
    server_routes = SERVER_ROUTES if config.server.metrics == "closed" else (*SERVER_ROUTES, METRICS_ROUTE)
    table = RouteTable((), server_routes, modules_by_resource(API_ROUTES, EXTENSION_ROUTES, REFUSED_ROUTES))
    table.load(_FIRST_RESOURCE)

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncGenerator[None]:
        async with (
            running_telemetry(metrics.count_dropped_telemetry, several_tenants=config.has_several_tenants) as recorder,
            open_stack(config, observe_inference(recorder)) as stack,
        ):
            free_disk_bytes = await asyncio.to_thread(read_free_disk_bytes)
            services = app.state.services = _build_services(stack, metrics, free_disk_bytes)
            stack.responses.execute_deferred_with(_execute_lines(stack, RouteLineExecutor(services, app, table)))
            if stack.agents is not None:
                stack.agents.drive_with(RouteLineExecutor(services, app, table, is_batch=False, name="agents"))
            app.state.drain = partial(_drain, stack)
            app.state.count_background = stack.responses.count_running
            app.state.end_running = services.end_running
            tasks = {supervise("the monitor of streams", services.monitor.run)}
            if stack.accounts.organization() is not None:
                sweeper = import_from_string("stack.retention.sweeper:RetentionSweeper")(stack)
                tasks.add(supervise("the sweep of data that is too old", sweeper.run))
            if (trim := find_trim()) is not None:
                work = partial(return_freed_memory, services.shares.bytes, trim)
                tasks.add(supervise("the return of freed memory", work))
            if metrics.is_shared:
                tasks.add(supervise("the refresh of metrics", services.keep_metrics_fresh))
            try:
                yield
            finally:
                app.state.services = None
                for task in tasks:
                    task.cancel()

    app = App(lifespan, Edge(config, metrics, table), serves_page=config.serves_console)
    app.state.draining = False
    app.state.services = None
    return app


def _execute_lines(stack: Stack, executor: RouteLineExecutor) -> SpareCapacity:
    """Execute the lines of batches in this process, and return the capacity for work that may wait."""
    if stack.batches is not None:
        return stack.batches.execute_with(executor)
    places = FairShare("deferred responses", _DEFERRED_PLACES)
    return SpareCapacity(places, executor.interactive_requests, busy_places=_DEFERRED_PLACES // 4)


async def _drain(stack: Stack, *, at_once: bool) -> None:
    """Return when the work that has no connection, background responses and lines of batches, can go on elsewhere; with
    `at_once`, where there is no other process, it goes on with the next start."""
    if stack.agents is not None:
        await stack.agents.drain()
    drains = [stack.responses.drain(at_once=at_once)]
    drains += [stack.batches.drain(at_once=at_once)] if stack.batches is not None else []
    await asyncio.gather(*drains)


def _build_services(stack: Stack, metrics: Metrics, free_disk_bytes: int) -> Services:
    config, organization = stack.config.server, stack.accounts.organization()
    shares = RequestShares(config, free_disk_bytes, several_tenants=stack.config.has_several_tenants)
    count_answers_in(shares.bytes)
    return Services(
        stack,
        StreamMonitor(config.keep_alive_s),
        metrics,
        CacheSalts(config, None if organization is None else organization.cache_salt_secret),
        shares,
        AdmissionQueue(config, several_tenants=stack.config.has_several_tenants),
        StoreProbe(stack.kv_store),
    )
