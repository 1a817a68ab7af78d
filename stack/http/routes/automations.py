"""/v1/agents/automations: work that begins at the times of a schedule."""

from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.agents.agents import AgentListParams
from apis.agents.automations import (
    AutomationListParams,
    AutomationTarget,
    CreateAutomation,
    UpdateAutomation,
)
from apis.batches.batches import BatchOwner
from providers.common.permissions import require_request
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.metering import grant_request
from stack.http.request_body import read_model
from stack.http.route import Route
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    read_route,
    require_agents,
    write_route,
)
from stack.http.routes.calls import ApiCalls

if TYPE_CHECKING:  # its modules are loaded with the first request
    from providers.agents.live import LiveAgents

_PATH: Final = "/agents/automations/{automation_id}"
_INVOCATIONS_PATH: Final = f"{_PATH}/invocations"


async def create_automation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateAutomation)
    agents = require_agents(services)
    await _check_target(request.target, agents, context, services)
    owner = await _find_owner(context, services)
    return value_response(await agents.automations.create(request, owner=owner), CREATED)


async def update_automation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, UpdateAutomation)
    agents = require_agents(services)
    if request.target is not None:
        await _check_target(request.target, agents, context, services)
    automation_id: str = http.path_params["automation_id"]
    owner = await _find_owner(context, services)
    return value_response(await agents.automations.update(automation_id, request, owner=owner))


async def _check_target(
    target: AutomationTarget, agents: "LiveAgents", context: HttpContext, services: Services
) -> None:
    """Raise the error of a target that no invocation could be delivered to now."""
    require_request(context.caller, target, None)
    request = await agents.resolve_target(target, tenant=context.tenant)
    if request is not None:
        await grant_request(services.stack, context.caller, request)


async def _find_owner(context: HttpContext, services: Services) -> BatchOwner:
    """Return the key that sends a request, as the owner of an automation."""
    return BatchOwner(context.tenant, await services.stack.accounts.find_lasting_key(context.caller))


_automations = ApiCalls(lambda services: require_agents(services).automations)
list_automations = _automations.calling("list_automations", lambda automations: automations.list)
get_automation = _automations.calling("get_automation", lambda automations: automations.get)
delete_automation = _automations.calling("delete_automation", lambda automations: automations.delete)
pause_automation = _automations.calling("pause_automation", lambda automations: automations.pause)
resume_automation = _automations.calling("resume_automation", lambda automations: automations.resume)
invoke_automation = _automations.calling("invoke_automation", lambda automations: automations.invoke, CREATED)
list_invocations = _automations.calling("list_invocations", lambda automations: automations.list_invocations)
get_invocation = _automations.calling("get_invocation", lambda automations: automations.get_invocation)

AUTOMATION_ROUTES: Final[tuple[Route, ...]] = (
    write_route("/agents/automations", create_automation, CreateAutomation),
    read_route("/agents/automations", list_automations, AutomationListParams),
    read_route(_PATH, get_automation),
    write_route(_PATH, update_automation, UpdateAutomation),
    delete_route(_PATH, delete_automation),
    write_route(f"{_PATH}/pause", pause_automation),
    write_route(f"{_PATH}/resume", resume_automation),
    write_route(_INVOCATIONS_PATH, invoke_automation),
    read_route(_INVOCATIONS_PATH, list_invocations, AgentListParams),
    read_route(f"{_INVOCATIONS_PATH}/{{invocation_id}}", get_invocation),
)
