"""Sessions of agents: their creation, the events that a client sends to one, and the listings of what is in one."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag

from apis.agents.agents import AgentListParams, AgentOptions, AgentReasoning, Cursor, ModelName
from apis.agents.environments import HostedEnvironment, NoEnvironment
from apis.agents.tools import AgentTools
from apis.responses import StreamOptions
from apis.wire.base import Metadata, Wire
from apis.wire.item_parts import text_or_list
from apis.wire.tools import VaultIds

MAX_EVENTS = 16_384
"""Events of one request, and inputs of one session that no model has read yet."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Bytes of the inputs of one session that no model has read yet: one request reads all of them."""
Text = Annotated[str, Field(max_length=10 * 2**20)]


def _parse_number(text: Any) -> Any:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 else text


class SessionText(Wire):
    type: Literal["input_text"]
    text: Text


class SessionImage(Wire):
    type: Literal["input_image"]
    image_url: str = Field(min_length=1, repr=False)


SessionContent = Annotated[SessionText | SessionImage, Field(discriminator="type")]


class SessionMessage(Wire):
    """A message of the user."""

    type: Literal["message"] | None = None
    role: Literal["user"]
    content: list[SessionContent] = Field(min_length=1, max_length=1000)


SessionMessages = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Annotated[list[SessionMessage], Field(max_length=1000)], Tag("list")],
    Discriminator(text_or_list),
]
CallOutput = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Annotated[list[SessionContent], Field(max_length=1000)], Tag("list")],
    Discriminator(text_or_list),
]


SessionEnvironment = Annotated[NoEnvironment | HostedEnvironment, Field(discriminator="type")]


class CacheOptions(Wire):
    ttl: Literal["30m", "12h"] | None = None


class SessionAgent(AgentOptions):
    """The agent of a session, or the fields that replace those of a stored one."""

    model: ModelName = ""


class CreateSession(Wire):
    """Body that creates a session, of a stored agent or of one that it describes, and begins its first turn."""

    environment: SessionEnvironment
    agent: SessionAgent | None = None
    agent_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: SessionMessages | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    vault_ids: VaultIds | None = None
    review: Literal["none"] | None = None
    prompt_cache_options: CacheOptions | None = None


class ChangedSessionAgent(Wire):
    """The fields of the agent of a session that can be changed."""

    model: ModelName = ""
    reasoning: AgentReasoning | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "ultrafast"] | None = None
    tools: AgentTools | None = None


class UpdateSession(Wire):
    """Body that changes a session: a field that is absent stays. A running turn goes on as it began."""

    metadata: Metadata | None = None
    agent: ChangedSessionAgent | None = None
    review: Literal["none"] | None = None
    prompt_cache_options: CacheOptions | None = None


class MessageEvent(Wire):
    """Messages for the agent: a new turn of a session that rests, and a part of the turn of one that does not."""

    type: Literal["agent.session.input.message"]
    input: list[SessionMessage] = Field(min_length=1, max_length=1000)


class CancelEvent(Wire):
    """Cancels the turn of the session; without one, it does nothing."""

    type: Literal["agent.session.input.cancel"]


class ToolResultEvent(Wire):
    """The result of a function that the agent has called."""

    type: Literal["agent.session.input.tool_result"]
    turn_id: str = Field(max_length=256)
    call_id: str = Field(max_length=256)
    success: bool
    output: CallOutput | None = None
    error: Text | None = None


class McpDecision(Wire):
    type: Literal["mcp_tool_call"]
    decision: Literal["approve", "deny", "cancel"]


class McpApprovalEvent(Wire):
    """The answer to a call of an MCP server that waits for it."""

    type: Literal["agent.session.input.mcp_approval_request_result"]
    request_id: str = Field(max_length=256)
    response: McpDecision


SessionInput = Annotated[
    MessageEvent | CancelEvent | ToolResultEvent | McpApprovalEvent,
    Field(discriminator="type"),
]


class SendEvents(Wire):
    """Body that sends events to a session: all of them, or none."""

    events: list[SessionInput] = Field(max_length=MAX_EVENTS, fail_fast=True)


class RequestKey(NamedTuple):
    """The Idempotency-Key of a request, as a hash with its route, and a digest of its body."""

    name: str
    digest: str


class EventStreamParams(Wire):
    """Query of the event stream: with `starting_after`, an extension, it begins after the event of that sequence
    number, else with the next event."""

    include_obfuscation: Annotated[bool, BeforeValidator({"true": True, "false": False}.get)] | None = None
    starting_after: Annotated[int, BeforeValidator(_parse_number), Field(ge=0)] | None = None


class SessionListParams(AgentListParams):
    """Query of a listing of sessions. `metadata` has the pairs that a session must have."""

    agent_id: Cursor | None = None
    metadata: Metadata | None = None

    def accepts(self, agent_id: str, metadata: Mapping[str, str]) -> bool:
        """Return True for a session that is listed."""
        pairs: Mapping[str, Any] = self.metadata or {}
        return self.agent_id in (None, agent_id) and pairs.items() <= metadata.items()
