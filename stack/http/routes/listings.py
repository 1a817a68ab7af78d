"""Listings of stored responses, their events, chains and webhook deliveries, and of conversations: extensions of
OpenAI's API, for the built-in page and operators."""

from dataclasses import asdict
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import ConversationListParams
from apis.errors import MethodNotAllowed
from apis.observation.background import EventListParams
from apis.observation.details import ResponseTreeParams
from apis.responses import ResponseListParams
from apis.storage.pages import Page
from stack.http.answers import json_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_query
from stack.http.route import RESPONSES, Route
from stack.http.routes.absences import WEBSOCKET_HINT
from stack.http.routes.calls import ApiCalls
from stack.http.routes.conversations import list_conversations
from stack.http.routes.responses import RESPONSE_PATH, parse_response_id
from stack.http.sse import events_to_json, read_dialect


async def list_responses(http: Request, context: HttpContext, services: Services) -> Response:
    if "sec-websocket-key" in http.headers:  # a handshake whose other headers a proxy dropped
        raise MethodNotAllowed(f"This is not a WebSocket's handshake.{WEBSOCKET_HINT}")
    params = read_query(http, ResponseListParams)
    return value_response(await services.stack.responses.list_responses(params, tenant=context.tenant))


async def list_events(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, EventListParams)
    dialect = read_dialect(http.scope, services.stack.config.server.dialect)
    observation = services.stack.responses.observation()
    page = await observation.list_events(parse_response_id(http), params, tenant=context.tenant)
    return json_response(
        b'{"object":"list","data":%b,"last_id":%b,"has_more":%b}'
        % (events_to_json(page.data, dialect), orjson.dumps(page.last_id), orjson.dumps(page.has_more))
    )


_responses = ApiCalls(lambda services: services.stack.responses)
list_tree = _responses.calling("list_tree", lambda responses: responses.list_tree)
_deliveries = ApiCalls(
    lambda services: services.stack.responses, lambda deliveries: Page([asdict(delivery) for delivery in deliveries])
)
list_webhook_deliveries = _deliveries.calling(
    "list_webhook_deliveries", lambda responses: responses.list_webhook_deliveries
)

LISTING_ROUTES: Final = (
    Route("GET", "/responses", RESPONSES, list_responses, query=ResponseListParams),
    Route("GET", f"{RESPONSE_PATH}/events", RESPONSES, list_events, query=EventListParams),
    Route("GET", f"{RESPONSE_PATH}/tree", RESPONSES, list_tree, query=ResponseTreeParams),
    Route("GET", f"{RESPONSE_PATH}/webhook_deliveries", RESPONSES, list_webhook_deliveries),
    Route("GET", "/conversations", RESPONSES, list_conversations, query=ConversationListParams),
)
