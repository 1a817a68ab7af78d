"""/v1/agents: stored agents, and sessions in which they work."""

from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from apis.agents.agents import AgentListParams, CreateAgent, UpdateAgent
from apis.agents.sessions import (
    CreateSession,
    EventStreamParams,
    SendEvents,
    SessionListParams,
    UpdateSession,
)
from apis.sink import put_all
from apis.wire.base import ListParams
from providers.common.fair_turns import run_long
from stack.http.answers import value_response
from stack.http.context import HttpContext, Services
from stack.http.metering import grant_request
from stack.http.request_body import read_model, read_query
from stack.http.routes.agent_beta import (
    CREATED,
    delete_route,
    read_request_key,
    read_route,
    require_agents,
    write_route,
)
from stack.http.routes.automations import AUTOMATION_ROUTES
from stack.http.routes.calls import ApiCalls
from stack.http.routes.environments import ENVIRONMENT_ROUTES
from stack.http.routes.vaults import VAULT_ROUTES
from stack.http.sse import frame_encoder
from stack.http.streams import EventStream


async def create_session(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, CreateSession)
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
        return value_response(session, CREATED)
    obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
    batches = agents.sessions.follow_creation(session["id"], tenant=tenant)
    return _CreatedStream(
        partial(put_all, batches), frame_encoder("openai", obfuscate), services.monitor, context.request_record
    )


async def send_events(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, SendEvents)
    await require_agents(services).activity.send(
        http.path_params["session_id"],
        request,
        tenant=context.tenant,
        key_id=await services.stack.accounts.find_lasting_key(context.caller),
        key=read_request_key(http, request),
    )
    return Response(status_code=HTTPStatus.ACCEPTED)


async def stream_events(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, EventStreamParams)
    batches = require_agents(services).sessions.follow(http.path_params["session_id"], params, tenant=context.tenant)
    return EventStream(
        partial(put_all, batches),
        frame_encoder("openai", bool(params.include_obfuscation)),
        services.monitor,
        context.request_record,
    )


async def list_items(http: Request, context: HttpContext, services: Services) -> Response:
    page = await require_agents(services).activity.list_items(
        http.path_params["session_id"],
        read_query(http, AgentListParams),
        tenant=context.tenant,
        turn_id=http.path_params.get("turn_id"),
        subagent_id=http.path_params.get("subagent_id"),
    )
    return await run_long(value_response, page)


async def list_turns(http: Request, context: HttpContext, services: Services) -> Response:
    page = await require_agents(services).activity.list_turns(
        http.path_params["session_id"],
        read_query(http, ListParams),
        tenant=context.tenant,
        subagent_id=http.path_params.get("subagent_id"),
    )
    return value_response(page)


async def get_turn(http: Request, context: HttpContext, services: Services) -> Response:
    turn = await require_agents(services).activity.get_turn(
        http.path_params["session_id"],
        http.path_params["turn_id"],
        tenant=context.tenant,
        subagent_id=http.path_params.get("subagent_id"),
    )
    return value_response(turn)


class _CreatedStream(EventStream):
    """The events of a session that the request has created."""

    status = CREATED


_agents = ApiCalls(lambda services: require_agents(services).definitions)
_sessions = ApiCalls(lambda services: require_agents(services).sessions)
_activity = ApiCalls(lambda services: require_agents(services).activity)
create_agent = _agents.calling("create_agent", lambda agents: agents.create, CREATED)
list_agents = _agents.calling("list_agents", lambda agents: agents.list)
get_agent = _agents.calling("get_agent", lambda agents: agents.get)
update_agent = _agents.calling("update_agent", lambda agents: agents.update)
delete_agent = _agents.calling("delete_agent", lambda agents: agents.delete)
list_sessions = _sessions.calling("list_sessions", lambda sessions: sessions.list)
get_session = _sessions.calling("get_session", lambda sessions: sessions.get)
update_session = _sessions.calling("update_session", lambda sessions: sessions.update)
delete_session = _sessions.calling("delete_session", lambda sessions: sessions.delete)
list_subagents = _activity.calling("list_subagents", lambda activity: activity.list_subagents)
get_subagent = _activity.calling("get_subagent", lambda activity: activity.get_subagent)

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
    read_route(f"{_SESSION_PATH}/subagents", list_subagents, ListParams),
    read_route(_SUBAGENT_PATH, get_subagent),
    *(
        route
        for path in (_SESSION_PATH, _SUBAGENT_PATH)
        for route in (
            read_route(f"{path}/items", list_items, AgentListParams),
            read_route(f"{path}/turns", list_turns, ListParams),
            read_route(f"{path}/turns/{{turn_id}}", get_turn),
            read_route(f"{path}/turns/{{turn_id}}/items", list_items, AgentListParams),
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
