"""/v1/organization/audit_logs, and the actor whose name the records have."""

from collections.abc import Iterable
from dataclasses import replace
from functools import wraps
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.audit import CURRENT_ACTOR, AuditActor, AuditLogQuery, AuditRecord
from stack.http.context import HttpContext, Services
from stack.http.route import ADMINISTRATION, Handler, Route
from stack.http.routes.calls import ApiCalls
from stack.http.routes.organization.objects import JsonObject, require_organization

_READ_METHODS: Final = frozenset({"GET", "HEAD"})


def _record_to_json(record: AuditRecord) -> JsonObject:
    """Return an audit log object. `ip_address` of an `api_key` is an extension."""
    actor, project = record.actor, None
    if record.project_id is not None:
        project = {"id": record.project_id, "name": record.project_name}
    address = actor.ip_address or None
    if actor.type == "api_key":
        actor_fields: JsonObject = {"id": actor.id or None, "type": "user", "ip_address": address}
    else:
        actor_fields = {"ip_address": address, "user": {"id": actor.id}}
    return {
        "id": record.id,
        "object": "organization.audit_log",
        "type": record.type,
        "effective_at": record.effective_at,
        "actor": {"type": actor.type, actor.type: actor_fields},
        "project": project,
        record.type: dict(record.details),
    }


_audit_log = ApiCalls(lambda services: require_organization(services).audit_log, _record_to_json, of_tenants=False)
list_audit_logs = _audit_log.calling("list_audit_logs", lambda audit_log: audit_log.list_records)

AUDIT_LOG_ROUTES: Final = (
    Route("GET", "/organization/audit_logs", ADMINISTRATION, list_audit_logs, query=AuditLogQuery),
)


def with_actor(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return the routes with the sender of each request that changes something as the actor of what it changes."""
    return tuple(
        route if route.method in _READ_METHODS else replace(route, handler=_act(route.handler)) for route in routes
    )


def _act(handler: Handler) -> Handler:
    @wraps(handler)  # the OpenAPI document shows its name
    async def handle(http: Request, context: HttpContext, services: Services) -> Response:
        address = http.client.host if http.client else ""
        token = CURRENT_ACTOR.set(AuditActor("api_key", context.caller.key_id, address))
        try:
            return await handler(http, context, services)
        finally:  # the next request on the connection may start in this context
            CURRENT_ACTOR.reset(token)

    return handle
