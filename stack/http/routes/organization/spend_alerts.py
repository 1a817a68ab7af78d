"""/v1/organization/spend_alerts, and those of each project: e-mails about the money that was spent in a month."""

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.accounts.spend_alerts import SaveSpendAlert, SpendAlert, SpendAlertPage
from apis.storage.pages import page_between
from stack.http.answers import deleted_response, value_response
from stack.http.context import HttpContext, Services
from stack.http.request_body import read_model, read_query
from stack.http.route import ADMINISTRATION, Route
from stack.http.routes.organization.objects import JsonObject, require_organization
from stack.http.routes.organization.spending import find_project_id, require_currency

_PATHS: Final = ("/organization/spend_alerts", "/organization/projects/{project_id}/spend_alerts")


async def create_spend_alert(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, SaveSpendAlert)
    require_currency(services, request)
    alert = await require_organization(services).spend_alerts.create(find_project_id(http), request)
    return value_response(_alert_to_json(services, alert))


async def list_spend_alerts(http: Request, _context: HttpContext, services: Services) -> Response:
    query = read_query(http, SpendAlertPage)
    alerts = await require_organization(services).spend_alerts.list(find_project_id(http))
    ordered = [*alerts] if query.order == "asc" else [*reversed(alerts)]
    page = page_between(ordered, query, query.before, lambda alert: alert.id)
    return value_response(page.map(partial(_alert_to_json, services)))


async def get_spend_alert(http: Request, _context: HttpContext, services: Services) -> Response:
    alert = await require_organization(services).spend_alerts.get(find_project_id(http), http.path_params["alert_id"])
    return value_response(_alert_to_json(services, alert))


async def update_spend_alert(http: Request, _context: HttpContext, services: Services) -> Response:
    request = await read_model(http, SaveSpendAlert)
    require_currency(services, request)
    alert = await require_organization(services).spend_alerts.update(
        find_project_id(http), http.path_params["alert_id"], request
    )
    return value_response(_alert_to_json(services, alert))


async def delete_spend_alert(http: Request, _context: HttpContext, services: Services) -> Response:
    await require_organization(services).spend_alerts.delete(find_project_id(http), http.path_params["alert_id"])
    return deleted_response(http.path_params["alert_id"], f"{_object_name(find_project_id(http))}.deleted")


SPEND_ALERT_ROUTES: Final = (
    *(Route("POST", path, ADMINISTRATION, create_spend_alert, body=SaveSpendAlert, stores=False) for path in _PATHS),
    *(Route("GET", path, ADMINISTRATION, list_spend_alerts, query=SpendAlertPage) for path in _PATHS),
    *(Route("GET", f"{path}/{{alert_id}}", ADMINISTRATION, get_spend_alert) for path in _PATHS),
    *(
        Route("POST", f"{path}/{{alert_id}}", ADMINISTRATION, update_spend_alert, body=SaveSpendAlert, stores=False)
        for path in _PATHS
    ),
    *(Route("DELETE", f"{path}/{{alert_id}}", ADMINISTRATION, delete_spend_alert) for path in _PATHS),
)


def _object_name(project_id: str | None) -> str:
    return "organization.spend_alert" if project_id is None else "project.spend_alert"


def _alert_to_json(services: Services, alert: SpendAlert) -> JsonObject:
    """Return an `organization.spend_alert` or a `project.spend_alert`."""
    return {
        "id": alert.id,
        "object": _object_name(alert.project_id),
        "currency": require_organization(services).currency.upper(),
        "interval": "month",
        "notification_channel": {
            "type": "email",
            "recipients": alert.recipients,
            "subject_prefix": alert.subject_prefix,
        },
        "threshold_amount": alert.threshold_amount,
    }
