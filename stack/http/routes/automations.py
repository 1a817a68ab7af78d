"""/v1/agents/automations: work that begins at the times of a schedule."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.agents.automations import (
    AutomationListParams,
    AutomationTarget,
    CreateAutomation,
    InvocationListParams,
    UpdateAutomation,
)
from apis.batches.batches import BatchOwner
from providers.agents.kv import StoredAgents
from stack.http.answers import list_response
from stack.http.context import HttpContext, Services
from stack.http.metering import grant_request
from stack.http.request_body import read_model, read_query
from stack.http.route import Route
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    object_response,
    read_route,
    require_agents,
    write_route,
)

_PATH: Final = "/agents/automations/{automation_id}"
_INVOCATIONS_PATH: Final = f"{_PATH}/invocations"


async def create_automation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateAutomation)
    agents = require_agents(services)
    await _check_target(request.target, agents, context, services)
    owner = BatchOwner(context.tenant, await services.stack.accounts.find_lasting_key(context.caller))
    return object_response(await agents.automations.create(request, owner=owner), CREATED)


async def list_automations(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, AutomationListParams)
    page = await require_agents(services).automations.list(params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def update_automation(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateAutomation)
    agents = require_agents(services)
    if request.target is not None:
        await _check_target(request.target, agents, context, services)
    return object_response(await agents.automations.update(_automation_id(http), request, tenant=context.tenant))


async def get_automation(http: Request, context: HttpContext, services: Services) -> Response:
    automations = require_agents(services).automations
    return object_response(await automations.get(_automation_id(http), tenant=context.tenant))


async def delete_automation(http: Request, context: HttpContext, services: Services) -> Response:
    automations = require_agents(services).automations
    return object_response(await automations.delete(_automation_id(http), tenant=context.tenant))


async def pause_automation(http: Request, context: HttpContext, services: Services) -> Response:
    automations = require_agents(services).automations
    return object_response(await automations.pause(_automation_id(http), tenant=context.tenant))


async def resume_automation(http: Request, context: HttpContext, services: Services) -> Response:
    automations = require_agents(services).automations
    return object_response(await automations.resume(_automation_id(http), tenant=context.tenant))


async def invoke_automation(http: Request, context: HttpContext, services: Services) -> Response:
    automations = require_agents(services).automations
    return object_response(await automations.invoke(_automation_id(http), tenant=context.tenant), CREATED)


async def list_invocations(http: Request, context: HttpContext, services: Services) -> Response:
    params, automations = read_query(http, InvocationListParams), require_agents(services).automations
    page = await automations.list_invocations(_automation_id(http), params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_invocation(http: Request, context: HttpContext, services: Services) -> Response:
    automations, invocation_id = require_agents(services).automations, http.path_params["invocation_id"]
    invocation = await automations.get_invocation(_automation_id(http), invocation_id, tenant=context.tenant)
    return object_response(invocation)


async def _check_target(
    target: AutomationTarget, agents: StoredAgents, context: HttpContext, services: Services
) -> None:
    """Raise the error of a target that no invocation could be delivered to now."""
    request = await agents.resolve_target(target, tenant=context.tenant)
    if request is not None:
        await grant_request(services.stack, context.caller, request)


def _automation_id(http: Request) -> str:
    return http.path_params["automation_id"]


AUTOMATION_ROUTES: Final[tuple[Route, ...]] = (
    write_route("/agents/automations", create_automation, CreateAutomation),
    read_route("/agents/automations", list_automations, AutomationListParams),
    read_route(_PATH, get_automation),
    write_route(_PATH, update_automation, UpdateAutomation),
    delete_route(_PATH, delete_automation),
    write_route(f"{_PATH}/pause", pause_automation),
    write_route(f"{_PATH}/resume", resume_automation),
    write_route(_INVOCATIONS_PATH, invoke_automation),
    read_route(_INVOCATIONS_PATH, list_invocations, InvocationListParams),
    read_route(f"{_INVOCATIONS_PATH}/{{invocation_id}}", get_invocation),
)
