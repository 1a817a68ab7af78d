"""/v1/agents: stored agents, and sessions in which they work."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from apis.agents.agents import AgentListParams, CreateAgent, UpdateAgent
from apis.agents.sessions import (
    CreateSession,
    EventStreamParams,
    RequestKey,
    SendEvents,
    SessionItemListParams,
    SessionListParams,
    TurnListParams,
    UpdateSession,
)
from apis.errors import InvalidBeta
from providers.agents.kv import StoredAgents
from providers.common.fair_turns import run_long
from stack.http.answers import list_response, value_response
from stack.http.context import HttpContext, Services, require_section
from stack.http.idempotency import RAW_IDEMPOTENCY_HEADER, parse_key
from stack.http.metering import grant_request
from stack.http.parsing import find_header
from stack.http.request_body import read_model, read_query
from stack.http.route import AGENTS, Handler, Route
from stack.http.sse import encode_frames
from stack.http.streams import EventStream

BETA: Final = "agents=v1"
_BETA_HEADER: Final = b"openai-beta"
_CREATED: Final = 201
_ACCEPTED: Final = 202


async def create_agent(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateAgent)
    agent = await _require_agents(services).definitions.create(request, tenant=context.tenant)
    return _object_response(agent, _CREATED)


async def list_agents(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, AgentListParams)
    page = await _require_agents(services).definitions.list(params, tenant=context.tenant)
    return list_response([_to_fields(agent) for agent in page.data], has_more=page.has_more)


async def get_agent(http: Request, context: HttpContext, services: Services) -> Response:
    definitions = _require_agents(services).definitions
    return _object_response(await definitions.get(http.path_params["agent_id"], tenant=context.tenant))


async def update_agent(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateAgent)
    definitions = _require_agents(services).definitions
    return _object_response(await definitions.update(http.path_params["agent_id"], request, tenant=context.tenant))


async def delete_agent(http: Request, context: HttpContext, services: Services) -> Response:
    definitions = _require_agents(services).definitions
    return _object_response(await definitions.delete(http.path_params["agent_id"], tenant=context.tenant))


async def create_session(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, CreateSession)
    agents, tenant = _require_agents(services), context.tenant
    agent = await agents.sessions.resolve_agent(request, tenant=tenant)
    await grant_request(services.stack, context.caller, agents.build_request(agent[1]))
    session = await agents.sessions.create(
        request,
        agent,
        tenant=tenant,
        key_id=await services.stack.accounts.find_lasting_key(context.caller),
        key=_read_key(http, request),
    )
    if not request.stream:
        return _object_response(session, _CREATED)
    obfuscate = bool(request.stream_options and request.stream_options.include_obfuscation)
    batches = agents.sessions.follow_creation(session.id, tenant=tenant)
    return _CreatedStream(batches, _frame_encoder(obfuscate), services.monitor, context.request_record)


async def list_sessions(http: Request, context: HttpContext, services: Services) -> Response:
    page = await _require_agents(services).sessions.list(read_query(http, SessionListParams), tenant=context.tenant)
    return list_response([_to_fields(each) for each in page.data], has_more=page.has_more, last_id=page.last_id)


async def get_session(http: Request, context: HttpContext, services: Services) -> Response:
    return _object_response(await _require_agents(services).sessions.get(_session_id(http), tenant=context.tenant))


async def update_session(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, UpdateSession)
    sessions = _require_agents(services).sessions
    return _object_response(await sessions.update(_session_id(http), request, tenant=context.tenant))


async def delete_session(http: Request, context: HttpContext, services: Services) -> Response:
    return _object_response(await _require_agents(services).sessions.delete(_session_id(http), tenant=context.tenant))


async def send_events(http: Request, context: HttpContext, services: Services) -> Response:
    request = await read_model(http, services.max_body_bytes, SendEvents)
    await _require_agents(services).activity.send(
        _session_id(http),
        request,
        tenant=context.tenant,
        key_id=await services.stack.accounts.find_lasting_key(context.caller),
        key=_read_key(http, request),
    )
    return Response(status_code=_ACCEPTED)


async def stream_events(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, EventStreamParams)
    batches = _require_agents(services).sessions.follow(_session_id(http), params, tenant=context.tenant)
    return EventStream(
        batches, _frame_encoder(bool(params.include_obfuscation)), services.monitor, context.request_record
    )


async def list_items(http: Request, context: HttpContext, services: Services) -> Response:
    page = await _require_agents(services).activity.list_items(
        _session_id(http),
        read_query(http, SessionItemListParams),
        tenant=context.tenant,
        turn_id=http.path_params.get("turn_id"),
    )
    return await run_long(partial(list_response, page.data, has_more=page.has_more))


async def list_turns(http: Request, context: HttpContext, services: Services) -> Response:
    params = read_query(http, TurnListParams)
    page = await _require_agents(services).activity.list_turns(_session_id(http), params, tenant=context.tenant)
    return list_response([_to_fields(turn) for turn in page.data], has_more=page.has_more)


async def get_turn(http: Request, context: HttpContext, services: Services) -> Response:
    activity = _require_agents(services).activity
    turn = await activity.get_turn(_session_id(http), http.path_params["turn_id"], tenant=context.tenant)
    return _object_response(turn)


class _CreatedStream(EventStream):
    """The events of a session that the request has created."""

    status = _CREATED


@cache
def _frame_encoder(obfuscate: bool) -> Callable[[Sequence[Any]], bytes]:  # noqa: FBT001 - a key
    return partial(encode_frames, dialect="openai", obfuscate=obfuscate)


def _read_key(http: Request, request: BaseModel) -> RequestKey | None:
    """Return the Idempotency-Key of a request, None where it has none."""
    keys = [value for name, value in http.scope["headers"] if name == RAW_IDEMPOTENCY_HEADER]
    if not keys:
        return None
    target = f"{http.scope['path']} {parse_key(keys).decode()}"
    body = request.model_dump_json(by_alias=True)
    return RequestKey(*(hashlib.sha256(text.encode()).hexdigest() for text in (target, body)))


def _session_id(http: Request) -> str:
    return http.path_params["session_id"]


def _require_agents(services: Services) -> StoredAgents:
    return require_section(services.stack.agents, "keeps no agents", "agents")


def _to_fields(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, warnings=False)


def _object_response(model: BaseModel, status: int = 200) -> Response:
    return value_response(_to_fields(model), status)


def _with_beta(handler: Handler) -> Handler:
    """Return the handler for requests that name the beta; it raises InvalidBeta for any other."""

    @wraps(handler)
    async def handle(http: Request, context: HttpContext, services: Services) -> Response:
        betas = (find_header(http.scope["headers"], _BETA_HEADER) or "").split(",")
        if BETA not in [beta.strip() for beta in betas]:
            raise InvalidBeta(f"The Agents API is a beta: send the header 'OpenAI-Beta: {BETA}'.")
        return await handler(http, context, services)

    return handle


def _read(path: str, handler: Handler, query: type[BaseModel] | None = None) -> Route:
    return Route("GET", path, AGENTS, _with_beta(handler), query=query)


def _write(path: str, handler: Handler, body: type[BaseModel]) -> Route:
    return Route("POST", path, AGENTS, _with_beta(handler), body=body, stores=True)


def _delete(path: str, handler: Handler) -> Route:
    return Route("DELETE", path, AGENTS, _with_beta(handler))


_AGENT_PATH: Final = "/agents/{agent_id}"
_SESSION_PATH: Final = "/agents/sessions/{session_id}"

AGENT_ROUTES: Final = (
    _write("/agents/sessions", create_session, CreateSession),
    _read("/agents/sessions", list_sessions, SessionListParams),
    _read(_SESSION_PATH, get_session),
    _write(_SESSION_PATH, update_session, UpdateSession),
    _delete(_SESSION_PATH, delete_session),
    _write(f"{_SESSION_PATH}/events", send_events, SendEvents),
    _read(f"{_SESSION_PATH}/events", stream_events, EventStreamParams),
    _read(f"{_SESSION_PATH}/items", list_items, SessionItemListParams),
    _read(f"{_SESSION_PATH}/turns", list_turns, TurnListParams),
    _read(f"{_SESSION_PATH}/turns/{{turn_id}}", get_turn),
    _read(f"{_SESSION_PATH}/turns/{{turn_id}}/items", list_items, SessionItemListParams),
    _write("/agents", create_agent, CreateAgent),
    _read("/agents", list_agents, AgentListParams),
    _read(_AGENT_PATH, get_agent),
    _write(_AGENT_PATH, update_agent, UpdateAgent),
    _delete(_AGENT_PATH, delete_agent),
)
