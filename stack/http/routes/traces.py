"""/v1/traces: takes traces of agents as the Agents SDKs send them; extensions of OpenAI's API read and delete them."""

from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.errors import InvalidRequest
from apis.observation.traces import IngestTraces, TraceListParams
from providers.traces.kv import StoredTraces
from stack.http.answers import json_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model
from stack.http.route import RESPONSES, Route
from stack.http.routes.calls import ApiCalls


async def ingest_traces(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, IngestTraces)
    await _get_traces(services).ingest(request, tenant=context.tenant)
    return Response(status_code=204)


async def get_trace(http: Request, context: HttpContext, services: Services) -> Response:
    detail = await _get_traces(services).get(http.path_params["trace_id"], tenant=context.tenant)
    return json_response(b'%b,"spans":[%b]}' % (orjson.dumps(detail.trace)[:-1], b",".join(detail.spans)))


def _get_traces(services: Services) -> StoredTraces:
    traces = services.stack.traces
    if traces is None:
        raise InvalidRequest("This server stores no traces: its run config has no `traces`.", code="not_configured")
    return traces


_traces = ApiCalls(_get_traces)
list_traces = _traces.calling("list_traces", lambda traces: traces.list)
delete_trace = _traces.deleting("delete_trace", lambda traces: traces.delete, "trace")

TRACE_ROUTES: Final = (
    Route("POST", "/traces/ingest", RESPONSES, ingest_traces, body=IngestTraces, stores=True),
    Route("GET", "/traces", RESPONSES, list_traces, query=TraceListParams),
    Route("GET", "/traces/{trace_id}", RESPONSES, get_trace),
    Route("DELETE", "/traces/{trace_id}", RESPONSES, delete_trace),
)
