"""Routes about the server itself: probes, the version, the metrics, and the description of the API."""

import asyncio
from pathlib import Path
from typing import Final, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response

from stack import __version__
from stack.http.answers import json_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.metrics import CONTENT_TYPE, METRICS_PATH
from stack.http.route import ANY_KEY, NO_KEY, Route
from stack.http.sse import ApiDialect

_DOCUMENT: Final = Path(__file__).parents[1] / "openapi.json"
"""The description of all routes and requests, one of the generated pages."""


async def get_liveness(_http: Request, _context: HttpContext, _services: Services) -> Response:
    return value_response({"status": "ok"})


async def get_readiness(http: Request, _context: HttpContext, services: Services) -> Response:
    state = http.app.state
    if state.draining or state.services is None:
        return value_response({"status": "draining" if state.draining else "starting"}, 503)
    if failure := await services.store_probe.find_failure():
        store = services.stack.config.kv_store.provider
        return value_response({"status": "store_unavailable", "store": store, "message": failure}, 503)
    return value_response({"status": "ready"})


async def get_root(_http: Request, _context: HttpContext, _services: Services) -> Response:
    return value_response({"name": "responses-stack"})


async def get_version(_http: Request, _context: HttpContext, _services: Services) -> Response:
    return value_response({"name": "responses-stack", "version": __version__, "dialects": [*get_args(ApiDialect)]})


async def get_metrics(_http: Request, _context: HttpContext, services: Services) -> Response:
    await services.refresh_metrics()
    return Response(await services.metrics.render_text(), headers={"content-type": CONTENT_TYPE})


async def get_openapi(_http: Request, _context: HttpContext, services: Services) -> Response:
    is_open = services.stack.config.server.metrics != "closed"
    return json_response(await asyncio.to_thread(_read_document, has_metrics=is_open))


SERVER_ROUTES: Final = (
    Route("GET", "/", ANY_KEY, get_root),
    Route("GET", "/healthz", NO_KEY, get_liveness, probe=True),
    Route("GET", "/readyz", NO_KEY, get_readiness, probe=True),
    Route("GET", "/version", ANY_KEY, get_version),
    Route("GET", "/openapi.json", ANY_KEY, get_openapi),
)
METRICS_ROUTE: Final = Route("GET", METRICS_PATH, ANY_KEY, get_metrics, probe=True)
PROBE_PATHS: Final = frozenset(route.path for route in (*SERVER_ROUTES, METRICS_ROUTE) if route.probe)
"""Paths that are requested all the time, also while the server has no room for others."""


def _read_document(*, has_metrics: bool) -> bytes:
    """Return the description of the API. It is stored, because FastAPI would take two seconds to generate it."""
    document = _DOCUMENT.read_bytes()
    if has_metrics:
        return document
    fields = orjson.loads(document)
    del fields["paths"][METRICS_PATH]
    return orjson.dumps(fields)
