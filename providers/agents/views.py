"""Sessions and turns as the API shows them."""

from collections.abc import Sequence

from providers.agents.descriptions import show_tools
from providers.agents.records import Json, SessionRef, SessionState, StoredSession, TurnRecord


def show_session(ref: SessionRef, record: StoredSession, state: SessionState, required: Sequence[Json]) -> Json:
    """Return a session; `required` are the calls that wait for the client."""
    environment: Json = {"type": "none"}
    if record.environment is not None:
        environment = {**record.environment, "id": record.environment_id}
    agent = {name: value for name, value in record.agent.items() if name != "metadata"}
    return {
        "id": ref.id,
        "object": "agent.session",
        "agent": {**agent, "id": record.agent_id, "tools": show_tools(agent["tools"], in_session=True)},
        "environment": environment,
        "status": state.status,
        "required_actions": required,
        "usage": None if state.usage is None else state.usage.show(),
        "error": state.error,
        "metadata": record.metadata,
        "vault_ids": record.vault_ids,
        "review": record.review,
        "prompt_cache_options": None if record.cache_ttl is None else {"ttl": record.cache_ttl},
        "created_at": record.created_at,
        "last_active_at": state.last_active_at,
    }


def show_turn(ref: SessionRef, agent_id: str, turn_id: str, record: TurnRecord) -> Json:
    """Return a turn as the API shows it."""
    return {
        "id": turn_id,
        "object": "agent.session.turn",
        "session_id": ref.id,
        "agent_id": agent_id,
        "subagent_id": ref.subagent_id or None,
        "status": record.status,
        "error": record.error,
        "usage": None if record.usage is None else record.usage.show(),
        "created_at": record.created_at,
        "started_at": record.started_at,
        "completed_at": record.completed_at,
        "sequence_number": record.first_event,
        "prompt_cache_options": None if record.cache_ttl is None else {"ttl": record.cache_ttl},
    }
