"""Listings of stored responses and conversations: extensions of OpenAI's API, for the built-in page and operators."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.conversations import ConversationListParams
from apis.errors import MethodNotAllowed
from apis.responses import ResponseListParams
from stack.http.admission import WEBSOCKET_HINT
from stack.http.answers import page_response, value_response
from stack.http.context import HttpContext, Route, Services
from stack.http.uploads import read_query


async def list_responses(http: Request, context: HttpContext, services: Services) -> Response:
    if "sec-websocket-key" in http.headers:  # a handshake whose other headers a proxy dropped
        raise MethodNotAllowed(f"This is not a WebSocket's handshake.{WEBSOCKET_HINT}")
    params = read_query(http, ResponseListParams)
    return value_response((await services.stack.responses.list_responses(params, tenant=context.tenant)).model_dump())


async def list_conversations(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, ConversationListParams)
    page = await services.stack.responses.conversations().list(params, tenant=context.tenant)
    return page_response(page)


LISTING_ROUTES: Final = (
    Route("GET", "/responses", list_responses, query=ResponseListParams),
    Route("GET", "/conversations", list_conversations, query=ConversationListParams),
)
