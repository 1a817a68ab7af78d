"""Automations: work that begins at the times of a schedule, in a new session, in an existing one, or as a response."""

from typing import Annotated, Literal

from pydantic import Field

from apis.agents.agents import AgentListParams, Cursor
from apis.agents.sessions import SessionAgent, SessionEnvironment, SessionMessage, Text
from apis.responses import CreateResponse
from apis.wire.base import Metadata, Wire
from apis.wire.tools import VaultIds

AutomationName = Annotated[str, Field(min_length=1, max_length=256)]
RunAt = Annotated[int, Field(ge=0, le=2**40)]


class NewSessionTarget(Wire):
    """A new session for each invocation, of a stored agent or of one that is described here."""

    type: Literal["new_session"]
    environment: SessionEnvironment
    input: list[SessionMessage] = Field(min_length=1, max_length=100)
    agent: SessionAgent | None = None
    agent_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    metadata: Metadata | None = None
    vault_ids: VaultIds | None = None


class ExistingSessionTarget(Wire):
    """Instructions that are sent to one session as a message of the user."""

    type: Literal["existing_session"]
    session_id: str = Field(min_length=1, max_length=256)
    instructions: Text


class ResponseTarget(Wire):
    """A background response for each invocation; an extension."""

    type: Literal["response"]
    request: CreateResponse


AutomationTarget = Annotated[
    NewSessionTarget | ExistingSessionTarget | ResponseTarget,
    Field(discriminator="type"),
]


class CreateAutomation(Wire):
    """Body that creates an automation: `periodic`, with the times of a cron expression in a time zone, or `once`, with
    one time in seconds of Unix time."""

    type: Literal["periodic", "once"]
    name: AutomationName
    target: AutomationTarget
    expression: str | None = Field(None, min_length=1)
    timezone: str | None = Field(None, min_length=1, max_length=64)
    run_at: RunAt | None = None
    metadata: Metadata | None = None


class UpdateAutomation(Wire):
    """Body that changes an automation: a field that is absent stays. The target keeps its type."""

    name: AutomationName | None = None
    expression: str | None = Field(None, min_length=1)
    timezone: str | None = Field(None, min_length=1, max_length=64)
    run_at: RunAt | None = None
    target: AutomationTarget | None = None
    metadata: Metadata | None = None


class AutomationListParams(AgentListParams):
    """Query of a listing of automations. With `session_id`, it lists those with this session as their target."""

    session_id: Cursor | None = None
