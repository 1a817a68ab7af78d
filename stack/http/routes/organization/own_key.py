"""GET /v1/stack/key and /v1/stack/usage, extensions: the rights, the limits and the usage of the key that asks."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.accounts import Caller
from apis.accounts.limits import KEY_SUBJECT_PREFIX, WHOLE_PROJECT
from apis.accounts.requests import UsageQuery
from apis.accounts.scopes import PROJECT_SCOPES
from apis.errors import Unsupported
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_query
from stack.http.route import ANY_KEY, Route
from stack.http.routes.organization.rate_limits import limit_to_json
from stack.http.routes.organization.usage import read_completions_usage


async def get_own_key(_http: Request, context: HttpContext, services: Services) -> Response:
    """Return a `stack.key`. `models` and `tools` are null where any may be used; `limits` are `project.rate_limit`s."""
    caller, organization = context.caller, services.stack.organization
    grant, is_of_project = caller.grant, not caller.grant.scopes.isdisjoint(PROJECT_SCOPES)
    return value_response(
        {
            "object": "stack.key",
            "id": caller.key_id or None,
            "project_id": caller.tenant if is_of_project else None,
            "scopes": sorted(grant.scopes),
            "models": None if grant.models is None else sorted(grant.models),
            "tools": None if grant.tools is None else sorted(grant.tools),
            "expires_at": None if caller.expires_at is None else int(caller.expires_at),
            "limits": [limit_to_json(subject, caller.limits[subject]) for subject in _own_subjects(caller)],
            "manages_accounts": caller.is_administrator and organization is not None,
            "records_usage": is_of_project and organization is not None,
            "currency": "USD" if organization is None else organization.currency.upper(),
        }
    )


async def list_own_usage(http: Request, context: HttpContext, services: Services) -> Response:
    """Return one page of buckets of the key's own usage, also where the query names other projects and keys."""
    organization = services.stack.organization
    if organization is None:
        raise Unsupported(
            "Usage is not stored here: set `accounts: {provider: stored}` to record it.", code="not_configured"
        )
    query = read_query(http, UsageQuery).of_key(context.caller.tenant, context.caller.key_id)
    return value_response(await read_completions_usage(organization.usage_log, query))


OWN_KEY_ROUTES: Final = (
    Route("GET", "/stack/key", ANY_KEY, get_own_key),
    Route("GET", "/stack/usage", ANY_KEY, list_own_usage, query=UsageQuery),
)


def _own_subjects(caller: Caller) -> list[str]:
    """Return the subjects of limits that may apply to the key: its project, itself, and the models that it may use."""
    own, models = f"{KEY_SUBJECT_PREFIX}{caller.key_id}", caller.grant.models
    return [
        subject
        for subject in sorted(caller.limits)
        if subject in (own, WHOLE_PROJECT)
        or not (subject.startswith(KEY_SUBJECT_PREFIX) or (models is not None and subject not in models))
    ]
