"""/v1/organization/projects/{project_id}/rate_limits: the limits of a project, its keys and its models."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.limits import LIMIT_FIELDS, WHOLE_PROJECT, RateLimit, unbounded_value
from apis.accounts.requests import RateLimitPage, UpdateRateLimit
from apis.errors import InvalidRequest
from apis.storage.pages import page_between
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import JsonObject, require_organization

_LIMITS: Final = "/organization/projects/{project_id}/rate_limits"
_ID_PREFIX: Final = "rl-"


async def list_rate_limits(http: Request, _context: HttpContext, services: Services) -> Response:
    """List the limits that are set, and one without a bound for the whole project and for every other model."""
    query = read_query(http, RateLimitPage)
    limits = dict(await require_organization(services).limiter.list_limits(http.path_params["project_id"]))
    for subject in (WHOLE_PROJECT, *(model.id for model in await services.stack.inference.models())):
        limits.setdefault(subject, RateLimit())
    rows = [limit_to_json(subject, limits[subject]) for subject in sorted(limits)]
    return value_response(page_between(rows, query, query.before, lambda row: str(row["id"])))


async def update_rate_limit(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateRateLimit)
    limit_id: str = http.path_params["rate_limit_id"]
    subject = limit_id.removeprefix(_ID_PREFIX)
    if subject in ("", limit_id):
        raise InvalidRequest(
            "A rate limit's id is 'rl-' with a model, 'rl-*' for the whole project, or 'rl-key:' with the id of a key.",
            param="rate_limit_id",
            code="invalid_value",
        )
    limit = await require_organization(services).limiter.set_limit(http.path_params["project_id"], subject, request)
    return value_response(limit_to_json(subject, limit))


RATE_LIMIT_ROUTES: Final = (
    Route("GET", _LIMITS, ADMINISTRATION, list_rate_limits, query=RateLimitPage),
    Route(
        "POST",
        f"{_LIMITS}/{{rate_limit_id:path}}",
        ADMINISTRATION,
        update_rate_limit,
        body=UpdateRateLimit,
        stores=False,
    ),
)


def limit_to_json(subject: str, limit: RateLimit) -> JsonObject:
    """Return a `project.rate_limit`. The fields after OpenAI's own four are extensions, and large numbers stand for no
    bound."""
    values = {field: getattr(limit, field) for field in LIMIT_FIELDS.values()}
    bounds = {
        name: unbounded_value(field) if values[field] is None else values[field] for name, field in LIMIT_FIELDS.items()
    }
    return {"id": f"{_ID_PREFIX}{subject}", "object": "project.rate_limit", "model": subject, **bounds}
