"""/v1/organization/spend_limit, and that of each project: the money that may be spent in a month."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.limits import NANOS_PER_CENT
from apis.accounts.spending import SpendLimit, UpdateSpendLimit
from apis.errors import InvalidRequest
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import JsonObject, require_organization

_PATHS: Final = ("/organization/spend_limit", "/organization/projects/{project_id}/spend_limit")


async def get_spend_limit(http: Request, _context: HttpContext, services: Services) -> Response:
    limit = await require_organization(services).spend_limits.get(find_project_id(http))
    return value_response(_limit_to_json(http, services, limit))


async def set_spend_limit(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateSpendLimit)
    require_currency(services, request)
    cost = request.threshold_amount * NANOS_PER_CENT
    limit = await require_organization(services).spend_limits.set(find_project_id(http), cost)
    return value_response(_limit_to_json(http, services, limit))


async def delete_spend_limit(http: Request, _context: HttpContext, services: Services) -> Response:
    await require_organization(services).spend_limits.delete(find_project_id(http))
    return value_response({"object": f"{_object_name(http)}.deleted", "deleted": True})


SPENDING_ROUTES: Final = (
    *(Route("GET", path, ADMINISTRATION, get_spend_limit) for path in _PATHS),
    *(Route("POST", path, ADMINISTRATION, set_spend_limit, body=UpdateSpendLimit, stores=False) for path in _PATHS),
    *(Route("DELETE", path, ADMINISTRATION, delete_spend_limit) for path in _PATHS),
)


def require_currency(services: Services, request: UpdateSpendLimit) -> None:
    """Raise InvalidRequest if the amount of the request is not in the currency of the prices."""
    currency = require_organization(services).currency.upper()
    if request.currency != currency:
        raise InvalidRequest(
            f"The prices of this server are in {currency} (`accounts.currency`).",
            param="currency",
            code="invalid_value",
        )


def find_project_id(http: Request) -> str | None:
    """Return the project that the path names; None on a path of all projects together."""
    return http.path_params.get("project_id")


def _object_name(http: Request) -> str:
    return "organization.spend_limit" if find_project_id(http) is None else "project.spend_limit"


def _limit_to_json(http: Request, services: Services, limit: SpendLimit) -> JsonObject:
    """Return an `organization.spend_limit` or a `project.spend_limit`. `spent_amount`, in cents, is an extension."""
    return {
        "object": _object_name(http),
        "currency": require_organization(services).currency.upper(),
        "interval": "month",
        "threshold_amount": limit.cost // NANOS_PER_CENT,
        "enforcement": {"status": "enforcing" if limit.is_enforcing else "inactive"},
        "spent_amount": limit.spent / NANOS_PER_CENT,
    }
