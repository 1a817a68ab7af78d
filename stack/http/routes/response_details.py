"""Below /v1/responses/{id}: the tree of its chain and its webhook deliveries, extensions of OpenAI's API for the
built-in page and operators."""

from dataclasses import asdict
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.observation.details import ResponseTreeParams
from stack.http.answers import list_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_query
from stack.http.route import RESPONSES, Route


async def list_tree(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, ResponseTreeParams)
    tree = await services.stack.responses.list_tree(http.path_params["response_id"], params, tenant=context.tenant)
    return value_response(tree.model_dump())


async def list_webhook_deliveries(http: Request, context: HttpContext, services: Services) -> Response:
    response_id = http.path_params["response_id"]
    deliveries = await services.stack.responses.list_webhook_deliveries(response_id, tenant=context.tenant)
    return list_response([asdict(delivery) for delivery in deliveries], has_more=False)


RESPONSE_DETAIL_ROUTES: Final = (
    Route("GET", "/responses/{response_id}/tree", RESPONSES, list_tree, query=ResponseTreeParams),
    Route("GET", "/responses/{response_id}/webhook_deliveries", RESPONSES, list_webhook_deliveries),
)
