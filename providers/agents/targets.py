"""Targets of automations, as they are stored and shown."""

from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter

from apis.agents.automations import ExistingSessionTarget, NewSessionTarget, ResponseTarget
from apis.agents.environments import NoEnvironment
from apis.agents.sessions import CreateSession
from providers.agents.descriptions import Json, complete_agent, describe_options, show_tools
from providers.agents.environments.specs import show_configuration

Target = NewSessionTarget | ExistingSessionTarget | ResponseTarget


def show_target(target: Target) -> Json:
    """Return a target as the API shows it: with all its fields, and without what is confidential."""
    if not isinstance(target, NewSessionTarget):
        return target.model_dump(mode="json", by_alias=True, exclude_none=True)
    agent: Json | None = None
    if target.agent is not None and target.agent_id is None:
        agent = complete_agent({"model": target.agent.model, **describe_options(target.agent)})
        agent["tools"] = show_tools(agent["tools"], in_session=True)
    fields: Json = {
        "agent": agent,
        "agent_id": target.agent_id,
        "environment": _show_environment(target),
        "input": [{"type": "message", **message.model_dump(exclude_none=True)} for message in target.input],
    }
    return {"type": "new_session", **fields, "metadata": target.metadata or {}, "vault_ids": target.vault_ids or []}


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


_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter(Target, config=ConfigDict(defer_build=True))
