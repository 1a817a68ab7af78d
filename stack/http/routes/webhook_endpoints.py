"""/v1/webhook_endpoints and /v1/webhook_event_types."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.webhooks import (
    WEBHOOK_EVENTS,
    CreateWebhookEndpoint,
    RotateWebhookSecret,
    SendTestEvent,
    UpdateWebhookEndpoint,
    WebhookEndpoint,
    WebhookEndpointPage,
)
from providers.webhooks.endpoints import StoredWebhookEndpoints
from providers.webhooks.kv import StoredWebhooks
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.request_body import read_model
from stack.http.route import RESPONSES, Route
from stack.http.routes.calls import ApiCalls

_ENDPOINTS: Final = "/webhook_endpoints"
_ENDPOINT: Final = f"{_ENDPOINTS}/{{webhook_endpoint_id}}"


async def create_webhook_endpoint(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateWebhookEndpoint)
    endpoint, secret = await _require_endpoints(services).create(request, tenant=context.tenant)
    return value_response(_endpoint_to_json(endpoint, signing_secret=secret))


async def rotate_webhook_secret(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, RotateWebhookSecret)
    endpoint, secret = await _require_endpoints(services).rotate_secret(
        http.path_params["webhook_endpoint_id"],
        keep_old=bool(request.keep_old_secret_active_for_24_hours),
        tenant=context.tenant,
    )
    return value_response(_endpoint_to_json(endpoint, signing_secret=secret))


async def send_test_event(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, SendTestEvent)
    endpoint_id = http.path_params["webhook_endpoint_id"]
    status_code = await _require_endpoints(services).send_test(endpoint_id, request.event_type, tenant=context.tenant)
    fields = {"event_type": request.event_type, "status_code": status_code, "webhook_endpoint_id": endpoint_id}
    return value_response({"object": "webhook_endpoint.test", **fields, "success": True})


async def list_webhook_event_types(_http: Request, _context: HttpContext, services: Services) -> Response:
    _require_endpoints(services)
    return value_response({"object": "list", "data": WEBHOOK_EVENTS})


def _require_endpoints(services: Services) -> StoredWebhookEndpoints:
    webhooks = services.stack.webhooks
    endpoints = webhooks.endpoints if isinstance(webhooks, StoredWebhooks) else None
    return require_section(endpoints, "has the webhooks of its run config only", "webhooks.endpoints")


def _endpoint_to_json(endpoint: WebhookEndpoint, **secret: str) -> dict[str, Any]:
    """Return a `webhook_endpoint`. Importing the SDK's type would cost every start the types of all events."""
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        **secret,
    }


_endpoints = ApiCalls(_require_endpoints, _endpoint_to_json)
list_webhook_endpoints = _endpoints.calling("list_webhook_endpoints", lambda endpoints: endpoints.list_endpoints)
get_webhook_endpoint = _endpoints.calling("get_webhook_endpoint", lambda endpoints: endpoints.get)
update_webhook_endpoint = _endpoints.calling("update_webhook_endpoint", lambda endpoints: endpoints.update)
delete_webhook_endpoint = _endpoints.deleting(
    "delete_webhook_endpoint", lambda endpoints: endpoints.delete, "webhook_endpoint.deleted"
)

WEBHOOK_ENDPOINT_ROUTES: Final = (
    Route("POST", _ENDPOINTS, RESPONSES, create_webhook_endpoint, body=CreateWebhookEndpoint, stores=True),
    Route("GET", _ENDPOINTS, RESPONSES, list_webhook_endpoints, query=WebhookEndpointPage),
    Route("GET", _ENDPOINT, RESPONSES, get_webhook_endpoint),
    Route("POST", _ENDPOINT, RESPONSES, update_webhook_endpoint, body=UpdateWebhookEndpoint, stores=True),
    Route("DELETE", _ENDPOINT, RESPONSES, delete_webhook_endpoint),
    Route(
        "POST", f"{_ENDPOINT}/rotate_secret", RESPONSES, rotate_webhook_secret, body=RotateWebhookSecret, stores=False
    ),
    Route("POST", f"{_ENDPOINT}/test", RESPONSES, send_test_event, body=SendTestEvent, stores=True),
    Route("GET", "/webhook_event_types", RESPONSES, list_webhook_event_types),
)
