"""GET /v1/stack/overview, an extension of OpenAI's API: background responses, workers, providers and key figures.

A tenant sees its own background responses, and which tools the server runs. All else is about the whole server, and is
null, names of workers included, unless the server has one tenant and lets it read `/metrics`.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from apis.inference import Inference
from apis.observation.background import BackgroundOverview
from apis.provider import Provider
from stack import __version__
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.route import RESPONSES, Route
from stack.http.routes.console.local_models import LOCAL_MODEL_ROUTES, may_install
from stack.http.routes.console.tool_servers import TOOL_SERVER_ROUTES

_GAUGES: Final = {
    "stack_requests_in_flight": "requests_in_flight",
    "stack_streams_open": "open_streams",
    "stack_websockets_open": "open_websockets",
}
_PROCESS_PREFIX: Final = "process_"


async def get_overview(_http: Request, context: HttpContext, services: Services) -> Response:
    observation = services.stack.responses.observation()
    background = await observation.list_runs(tenant=context.tenant)
    overview: dict[str, Any] = {
        "object": "stack.overview",
        "version": __version__,
        "time": time.time(),
        "scope": "server",
        "background": background,
        "may_install_models": may_install(context, services),
        "tools": [asdict(tool) for tool in services.stack.responses.describe_tools(tenant=context.tenant)],
    }
    if not (services.stack.config.shows_server or context.is_administrator):
        hidden = dict.fromkeys(("workers", "providers", "figures", "processes"))
        return value_response({**overview, "scope": "tenant", "background": _hide_workers(background), **hidden})
    await services.refresh_metrics()
    metrics = await services.metrics.collect()
    return value_response(
        {
            **overview,
            "workers": await observation.list_workers(),
            "providers": [*_summarize_providers(services)],
            "figures": _collect_figures(metrics),
            "processes": _collect_processes(metrics),
        }
    )


OVERVIEW_ROUTES: Final = (
    Route("GET", "/stack/overview", RESPONSES, get_overview),
    *LOCAL_MODEL_ROUTES,
    *TOOL_SERVER_ROUTES,
)
"""The overview, and what the page shows with it: models to fetch, and MCP servers."""


def _hide_workers(background: BackgroundOverview) -> BackgroundOverview:
    return replace(background, runs=[replace(run, worker=None) for run in background.runs])


def _summarize_providers(services: Services) -> Iterable[dict[str, Any]]:
    """Yield each provider by its path in the run config, with its own figures and the servers that it sends to."""
    for path, provider in services.stack.providers_by_path.items():
        upstreams = provider.upstreams() if isinstance(provider, Inference) else ()
        yield {
            "path": path,
            "provider": type(provider).__name__,
            "figures": _provider_figures(provider),
            "upstreams": [asdict(upstream) for upstream in upstreams],
        }


def _provider_figures(provider: Provider) -> dict[str, float]:
    figures = provider.metrics()
    return {} if figures is None else {field.name: float(getattr(figures, field.name)) for field in fields(figures)}


def _collect_figures(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return the key figures of the metrics since the server started: sums over all its workers."""
    figures: dict[str, Any] = dict.fromkeys(_GAUGES.values(), 0)
    requests: dict[str, float] = {}
    responses: dict[str, float] = {}
    tokens: dict[str, dict[str, float]] = {}
    first_output = {"count": 0.0, "sum_s": 0.0}
    for sample in (sample for metric in metrics for sample in metric.samples):
        labels = sample.labels
        match sample.name:
            case "stack_requests_total":
                requests[labels["status"]] = requests.get(labels["status"], 0) + sample.value
            case "stack_responses_total":
                responses[labels["status"]] = sample.value
            case "stack_tokens_total":
                tokens.setdefault(labels["model"], {})[labels["kind"]] = sample.value
            case "stack_time_to_first_output_seconds_count":
                first_output["count"] = sample.value
            case "stack_time_to_first_output_seconds_sum":
                first_output["sum_s"] = sample.value
            case name if name in _GAUGES:
                figures[_GAUGES[name]] = sample.value
            case _:
                pass
    return {
        **figures,
        "requests": requests,
        "responses": responses,
        "tokens": tokens,
        "time_to_first_output": first_output,
    }


def _collect_processes(metrics: Iterable[Metric]) -> list[dict[str, Any]]:
    """Return the processes that answer on this port, by the numbers of workers; a process that serves alone has an
    empty one."""
    processes: dict[str, dict[str, Any]] = {}
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name.startswith(_PROCESS_PREFIX):
            number = sample.labels.get("worker", "")
            process = processes.setdefault(number, {"worker": number})
            process[sample.name.removeprefix(_PROCESS_PREFIX).removesuffix("_total")] = sample.value
    return list(processes.values())
