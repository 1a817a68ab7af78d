"""The form of the routes of the Agents API, which is a beta."""

import hashlib
from functools import wraps
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.project_settings import HostedTool
from apis.agents.sessions import RequestKey
from apis.errors import InvalidBeta
from stack.http.context import HttpContext, Services, require_section
from stack.http.idempotency import RAW_IDEMPOTENCY_HEADER, parse_key
from stack.http.parsing import find_header
from stack.http.route import AGENTS, Access, Handler, Route

if TYPE_CHECKING:  # its modules are loaded with the first request
    from providers.agents.live import LiveAgents

BETA: Final = "agents=v1"
_BETA_HEADER: Final = b"openai-beta"
CREATED: Final = 201


def require_agents(services: Services) -> "LiveAgents":
    """Return the agents of the server, for a handler of `_with_beta`. Raises Unsupported where it keeps none."""
    return require_section(services.stack.agents, "keeps no agents", "agents").live


def _with_beta(handler: Handler) -> Handler:
    """Return the handler for requests that name the beta; it raises InvalidBeta for any other. It is called after the
    agents are loaded."""

    @wraps(handler)
    async def handle(http: Request, context: HttpContext, services: Services) -> Response:
        betas = (find_header(http.scope, _BETA_HEADER) or "").split(",")
        if BETA not in [beta.strip() for beta in betas]:
            raise InvalidBeta(f"The Agents API is a beta: send the header 'OpenAI-Beta: {BETA}'.")
        if services.stack.agents is not None:
            await services.stack.agents.load()
        return await handler(http, context, services)

    return handle


def read_request_key(http: Request, request: BaseModel) -> RequestKey | None:
    """Return the Idempotency-Key of a request, None where it has none."""
    keys = [value for name, value in http.scope["headers"] if name == RAW_IDEMPOTENCY_HEADER]
    if not keys:
        return None
    target = f"{http.scope['path']} {parse_key(keys).decode()}"
    body = request.model_dump_json(by_alias=True)
    return RequestKey(*(hashlib.sha256(text.encode()).hexdigest() for text in (target, body)))


def read_route(path: str, handler: Handler, query: type[BaseModel] | None = None, access: Access = AGENTS) -> Route:
    """Return the row of a route that reads."""
    return Route("GET", path, access, _with_beta(handler), query=query)


def write_route(
    path: str,
    handler: Handler,
    body: type[BaseModel] | None = None,
    access: Access = AGENTS,
    *,
    tool: HostedTool | None = None,
) -> Route:
    """Return the row of a route that stores, and does the work of a tool."""
    return Route("POST", path, access, _with_beta(handler), body=body, stores=True, tool=tool)


def delete_route(path: str, handler: Handler, access: Access = AGENTS) -> Route:
    """Return the row of a route that deletes."""
    return Route("DELETE", path, access, _with_beta(handler))
