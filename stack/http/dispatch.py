"""The innermost ASGI app: it calls the handler of the request's route."""

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from apis.errors import MethodNotAllowed, NotFound
from apis.imports import import_from_string
from stack.http.answers import client_disconnected_response, error_response
from stack.http.context import get_context, get_services
from stack.http.messages.dialect import has_version
from stack.http.route_table import Match, get_match
from stack.http.routes.absences import WEBSOCKET_HINT, absence_message, message_absence
from stack.http.streams import ClientDisconnected, EventStream


async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the answer of the handler. Raises the handler's StackError, and NotFound where there is no route."""
    match = get_match(scope)
    if scope["type"] == "websocket":
        if match.route is None or not match.route.websocket:
            raise NotFound(f"There is no WebSocket at {scope['path'][:256]}.")
        await import_from_string("stack.http.websocket:serve_websocket")(scope, receive, send)
        return
    if has_version(scope) and (absence := message_absence(scope["path"])):
        raise NotFound(absence)
    if match.route is None:
        await _refuse(match, scope, receive, send)
        return
    context, services = get_context(scope), get_services(scope)
    try:
        response = await match.route.handler(Request(scope, receive, send), context, services)
    except ClientDisconnected:
        response = client_disconnected_response()
    if isinstance(response, EventStream):
        with services.shares.open_stream(context.tenant):
            await response(scope, receive, send)
    else:
        await response(scope, receive, send)


async def _refuse(match: Match, scope: Scope, receive: Receive, send: Send) -> None:
    method, path = scope["method"], scope["path"][:256]
    if not match.routes:
        raise NotFound(absence_message(path) or f"Unknown request URL: {method} {path}.")
    message = f"{path} does not take {method}."
    if method == "GET" and any(route.websocket for route in match.routes.values()):
        message += WEBSOCKET_HINT
    response = error_response(MethodNotAllowed(message), scope, get_context(scope).request_id)
    allowed = {*match.routes, "HEAD"} if "GET" in match.routes else {*match.routes}
    response.headers["allow"] = ", ".join(sorted(allowed))
    await response(scope, receive, send)
