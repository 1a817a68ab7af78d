"""create_app: the HTTP API over the live providers of one stack, as an ASGI app."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, get_args

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as ResponseObject
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from apis.batches.spare_capacity import SpareCapacity
from apis.fair_share import FairShare
from providers.common.held_bytes import count_answers_in
from providers.common.supervision import supervise
from stack.build import Stack, open_stack
from stack.config import StackConfig
from stack.http.cache_salts import CacheSalts
from stack.http.context import Services
from stack.http.dispatch import dispatch
from stack.http.edge import Edge
from stack.http.freed_memory import find_trim, return_freed_memory
from stack.http.idempotency import Idempotency
from stack.http.metrics import Metrics
from stack.http.readiness import StoreProbe
from stack.http.route_table import RouteTable
from stack.http.routes.batch_lines import RouteLineExecutor
from stack.http.routes.console.page import Console
from stack.http.routes.server import METRICS_ROUTE, SERVER_ROUTES
from stack.http.routes.table import API_ROUTES, EXTENSION_ROUTES, REFUSED_ROUTES
from stack.http.shares import AdmissionQueue, RequestShares, read_free_disk_bytes
from stack.http.streams import StreamMonitor
from stack.retention.sweeper import RetentionSweeper
from stack.telemetry.setup import observe_inference, running_telemetry

_DEFERRED_PLACES: Final = 32
"""Background responses with a completion window that a stack without batches executes at a time in one process."""


def create_app(config: StackConfig) -> Starlette:
    """Return the app of one run config; its lifespan opens the stack and closes it."""
    metrics, api_routes = Metrics(), (*API_ROUTES, *EXTENSION_ROUTES, *REFUSED_ROUTES)
    server_routes = SERVER_ROUTES if config.server.metrics == "closed" else (*SERVER_ROUTES, METRICS_ROUTE)
    table = RouteTable(api_routes, server_routes)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with (
            running_telemetry(metrics.count_dropped_telemetry, several_tenants=config.has_several_tenants) as recorder,
            open_stack(config, observe_inference(recorder)) as stack,
        ):
            free_disk_bytes = await asyncio.to_thread(read_free_disk_bytes)
            services = app.state.services = _build_services(stack, metrics, free_disk_bytes)
            stack.responses.execute_deferred_with(_execute_lines(stack, RouteLineExecutor(services, app, api_routes)))
            if stack.agents is not None:
                stack.agents.drive_with(RouteLineExecutor(services, app, api_routes, is_batch=False, name="agents"))
            app.state.drain = partial(_drain, stack)
            app.state.count_background = stack.responses.count_running
            app.state.end_running = services.end_running
            build_sdk_schemas()
            tasks = {supervise("the monitor of streams", services.monitor.run)}
            if stack.accounts.organization() is not None:
                tasks.add(supervise("the sweep of data that is too old", RetentionSweeper(stack).run))
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

    app = _App(lifespan=lifespan)
    app.state.draining = False
    app.state.services = None
    described = (*API_ROUTES, *EXTENSION_ROUTES)
    app.state.routes = (
        *((f"/v1{route.path}", route) for route in described),
        *((route.path, route) for route in server_routes),
    )
    # the only layers around the handlers: Starlette's own ones would cost more than all else a request does here
    edge = Edge(Idempotency(dispatch, table), config, metrics, table)
    app.middleware_stack = Console(edge) if config.serves_console else edge
    return app


class _App(Starlette):
    """Starlette without a coroutine of its own, which each step of every request would pass through."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]  # see above
        assert self.middleware_stack is not None
        scope["app"] = self
        if scope["type"] == "lifespan":
            return self.router(scope, receive, send)
        return self.middleware_stack(scope, receive, send)


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


def build_sdk_schemas() -> None:
    """Build the schemas of the SDK's models, which the SDK puts off: else the first requests would wait for them.

    Events that hold a response or an item are written by the schemas of those.
    """
    kinds = get_args(get_args(ResponseStreamEvent)[0])
    events = [kind for kind in kinds if kind.model_fields.keys().isdisjoint(("response", "item"))]
    items = (ResponseOutputMessage, ResponseReasoningItem, ResponseFunctionToolCall)
    for kind in (ResponseObject, *items, *events, ChatCompletion, ChatCompletionChunk):
        kind.model_rebuild()
