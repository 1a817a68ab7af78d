"""Targets of automations, as they are stored and shown."""

from typing import Any, Final

from pydantic import TypeAdapter

from apis.agents.automations import ExistingSessionTarget, NewSessionTarget, ResponseTarget
from apis.agents.environments import NoEnvironment
from apis.agents.sessions import CreateSession
from providers.agents.descriptions import Json, complete_agent, describe_options, show_tools
from providers.agents.environments.specs import show_configuration

Target = NewSessionTarget | ExistingSessionTarget | ResponseTarget


def complete_target(target: Target) -> Json:
    """Return the fields of a target to be stored, secrets included."""
    return target.model_dump(mode="json", by_alias=True, exclude_none=True)


def show_target(target: Json) -> Json:
    """Return a target as the API shows it: with all its fields, and without secrets."""
    if target["type"] != "new_session":
        return target
    parsed = NewSessionTarget.model_validate(target)
    agent: Json | None = None
    if parsed.agent is not None and parsed.agent_id is None:
        agent = complete_agent({"model": parsed.agent.model, **describe_options(parsed.agent)})
        agent["tools"] = show_tools(agent["tools"], in_session=True)
    messages = [{"type": "message", **message} for message in target["input"]]
    fields: Json = {
        "agent": agent,
        "agent_id": parsed.agent_id,
        "environment": _show_environment(parsed),
        "input": messages,
    }
    return {"type": "new_session", **fields, "metadata": parsed.metadata or {}, "vault_ids": parsed.vault_ids or []}


def _show_environment(target: NewSessionTarget) -> Json:
    environment = target.environment
    if isinstance(environment, NoEnvironment):
        return {"type": "none"}
    return {
        **show_configuration(environment),
        "type": "openai_hosted",
        "container_size": None,
        "environment_id": environment.environment_id,
        "environment_template_id": environment.environment_template_id,
    }


def build_session_request(target: NewSessionTarget) -> CreateSession:
    """Return the request for the session of an invocation."""
    sent = {
        name: getattr(target, name) for name in ("agent", "agent_id", "environment", "input", "metadata", "vault_ids")
    }
    return CreateSession(**{name: value for name, value in sent.items() if value is not None})


def parse_target(target: Json) -> Target:
    """Return the target of stored fields."""
    return _ADAPTER.validate_python(target)


_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter(Target)
