"""/v1/agents: stored agents, and sessions in which they work."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from apis.agents.agents import AgentListParams, CreateAgent, UpdateAgent
from apis.agents.sessions import (
    CreateSession,
    EventStreamParams,
    SendEvents,
    SessionItemListParams,
    SessionListParams,
    SubagentListParams,
    TurnListParams,
    UpdateSession,
)
from apis.sink import put_all
from providers.common.fair_turns import run_long
from stack.http.answers import list_response
from stack.http.context import HttpContext, Services
from stack.http.metering import grant_request
from stack.http.request_body import read_model, read_query
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    object_response,
    read_request_key,
    read_route,
    require_agents,
    write_route,
)
from stack.http.routes.automations import AUTOMATION_ROUTES
from stack.http.routes.environments import ENVIRONMENT_ROUTES
from stack.http.routes.vaults import VAULT_ROUTES
from stack.http.sse import encode_frames
from stack.http.streams import EventStream

_ACCEPTED: Final = 202


async def create_agent(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateAgent)
    agent = await require_agents(services).definitions.create(request, tenant=context.tenant)
    return object_response(agent, CREATED)


async def list_agents(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, AgentListParams)
    page = await require_agents(services).definitions.list(params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_agent(http: Request, context: HttpContext, services: Services) -> Response:
    definitions = require_agents(services).definitions
    return object_response(await definitions.get(http.path_params["agent_id"], tenant=context.tenant))


async def update_agent(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateAgent)
    definitions = require_agents(services).definitions
    return object_response(await definitions.update(http.path_params["agent_id"], request, tenant=context.tenant))


async def delete_agent(http: Request, context: HttpContext, services: Services) -> Response:
    definitions = require_agents(services).definitions
    return object_response(await definitions.delete(http.path_params["agent_id"], tenant=context.tenant))


async def create_session(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateSession)
    agents, tenant = require_agents(services), context.tenant
    agent = await agents.sessions.resolve_agent(request, tenant=tenant)
    is_hosted = request.environment.type == "openai_hosted"
    await grant_request(
        services.stack, context.caller, agents.build_request(agent[1], request.vault_ids, is_hosted=is_hosted)
    )
    session = await agents.sessions.create(
        request,
        agent,
        tenant=tenant,
        key_id=await services.stack.accounts.find_lasting_key(context.caller),
        key=read_request_key(http, request),
    )
    if not request.stream:
        return object_response(session, CREATED)
    obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
    batches = agents.sessions.follow_creation(session["id"], tenant=tenant)
    return _CreatedStream(
        partial(put_all, batches), _frame_encoder(obfuscate), services.monitor, context.request_record
    )


async def list_sessions(http: Request, context: HttpContext, services: Services) -> Response:
    page = await require_agents(services).sessions.list(read_query(http, SessionListParams), tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more, last_id=page.last_id)


async def get_session(http: Request, context: HttpContext, services: Services) -> Response:
    return object_response(await require_agents(services).sessions.get(_session_id(http), tenant=context.tenant))


async def update_session(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateSession)
    sessions = require_agents(services).sessions
    return object_response(await sessions.update(_session_id(http), request, tenant=context.tenant))


async def delete_session(http: Request, context: HttpContext, services: Services) -> Response:
    return object_response(await require_agents(services).sessions.delete(_session_id(http), tenant=context.tenant))


async def send_events(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, SendEvents)
    await require_agents(services).activity.send(
        _session_id(http),
        request,
        tenant=context.tenant,
        key_id=await services.stack.accounts.find_lasting_key(context.caller),
        key=read_request_key(http, request),
    )
    return Response(status_code=_ACCEPTED)


async def stream_events(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, EventStreamParams)
    batches = require_agents(services).sessions.follow(_session_id(http), params, tenant=context.tenant)
    return EventStream(
        partial(put_all, batches),
        _frame_encoder(bool(params.include_obfuscation)),
        services.monitor,
        context.request_record,
    )


async def list_items(http: Request, context: HttpContext, services: Services) -> Response:
    page = await require_agents(services).activity.list_items(
        _session_id(http),
        read_query(http, SessionItemListParams),
        tenant=context.tenant,
        turn_id=http.path_params.get("turn_id"),
        subagent_id=http.path_params.get("subagent_id"),
    )
    return await run_long(partial(list_response, page.data, has_more=page.has_more))


async def list_turns(http: Request, context: HttpContext, services: Services) -> Response:
    page = await require_agents(services).activity.list_turns(
        _session_id(http),
        read_query(http, TurnListParams),
        tenant=context.tenant,
        subagent_id=http.path_params.get("subagent_id"),
    )
    return list_response(page.data, has_more=page.has_more)


async def get_turn(http: Request, context: HttpContext, services: Services) -> Response:
    turn = await require_agents(services).activity.get_turn(
        _session_id(http),
        http.path_params["turn_id"],
        tenant=context.tenant,
        subagent_id=http.path_params.get("subagent_id"),
    )
    return object_response(turn)


async def list_subagents(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, SubagentListParams)
    page = await require_agents(services).activity.list_subagents(_session_id(http), params, tenant=context.tenant)
    return list_response(page.data, has_more=page.has_more)


async def get_subagent(http: Request, context: HttpContext, services: Services) -> Response:
    activity, subagent_id = require_agents(services).activity, http.path_params["subagent_id"]
    return object_response(await activity.get_subagent(_session_id(http), subagent_id, tenant=context.tenant))


class _CreatedStream(EventStream):
    """The events of a session that the request has created."""

    status = CREATED


@cache
def _frame_encoder(obfuscate: bool) -> Callable[[Sequence[Any]], bytes]:  # noqa: FBT001 - a key
    return partial(encode_frames, dialect="openai", obfuscate=obfuscate)


def _session_id(http: Request) -> str:
    return http.path_params["session_id"]


_AGENT_PATH: Final = "/agents/{agent_id}"
_SESSION_PATH: Final = "/agents/sessions/{session_id}"
_SUBAGENT_PATH: Final = f"{_SESSION_PATH}/subagents/{{subagent_id}}"

AGENT_ROUTES: Final = (
    write_route("/agents/sessions", create_session, CreateSession),
    read_route("/agents/sessions", list_sessions, SessionListParams),
    read_route(_SESSION_PATH, get_session),
    write_route(_SESSION_PATH, update_session, UpdateSession),
    delete_route(_SESSION_PATH, delete_session),
    write_route(f"{_SESSION_PATH}/events", send_events, SendEvents),
    read_route(f"{_SESSION_PATH}/events", stream_events, EventStreamParams),
    read_route(f"{_SESSION_PATH}/subagents", list_subagents, SubagentListParams),
    read_route(_SUBAGENT_PATH, get_subagent),
    *(
        route
        for path in (_SESSION_PATH, _SUBAGENT_PATH)
        for route in (
            read_route(f"{path}/items", list_items, SessionItemListParams),
            read_route(f"{path}/turns", list_turns, TurnListParams),
            read_route(f"{path}/turns/{{turn_id}}", get_turn),
            read_route(f"{path}/turns/{{turn_id}}/items", list_items, SessionItemListParams),
        )
    ),
    *AUTOMATION_ROUTES,
    *VAULT_ROUTES,
    *ENVIRONMENT_ROUTES,
    write_route("/agents", create_agent, CreateAgent),
    read_route("/agents", list_agents, AgentListParams),
    read_route(_AGENT_PATH, get_agent),
    write_route(_AGENT_PATH, update_agent, UpdateAgent),
    delete_route(_AGENT_PATH, delete_agent),
)
