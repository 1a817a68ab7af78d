"""Agents: a model with instructions and tools, stored under an id that sessions and requests refer to."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from apis.agents.tools import AgentTools
from apis.wire.base import Effort, JsonValue, ListParams, Metadata, Wire

MAX_PAGE: Final = 100
ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")]
Cursor = Annotated[str, Field(max_length=256)]


def _clamp(limit: Any) -> Any:
    return min(MAX_PAGE, max(1, limit)) if isinstance(limit, int) else limit


ClampedLimit = Annotated[int, BeforeValidator(_clamp)]
"""The number of objects of a page; one out of bounds means the nearest bound."""


class AgentReasoning(Wire):
    effort: Effort | None = None
    summary: Literal["concise", "detailed", "auto"] | None = None


class PlainText(Wire):
    type: Literal["text"]


class JsonText(Wire):
    """JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class AgentText(Wire):
    format: Annotated[PlainText | JsonText, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class AgentCompaction(Wire):
    is_async: bool | None = Field(None, alias="async")


class MultiAgent(Wire):
    """The subagents of an agent: how many may work at once, 6 by default."""

    enabled: bool
    max_concurrent_subagents: int | None = Field(None, ge=1, le=32)


class AgentOptions(Wire):
    """The fields that agents and the agents of sessions share."""

    instructions: str | None = Field(None, max_length=1024 * 1024)
    tools: AgentTools | None = None
    reasoning: AgentReasoning | None = None
    text: AgentText | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "fast", "ultrafast"] | None = None
    compaction: AgentCompaction | None = None
    multi_agent: MultiAgent | None = None


class CreateAgent(AgentOptions):
    """Body that creates an agent."""

    model: ModelName
    name: str | None = Field(None, max_length=256)
    metadata: Metadata | None = None


class UpdateAgent(AgentOptions):
    """Body that changes an agent: a field that is absent stays, and null sets it to its default."""

    model: ModelName = ""
    name: str | None = Field(None, max_length=256)
    metadata: Metadata | None = None


class AgentListParams(ListParams):
    """Query of a listing of agents, or of what belongs to them."""

    limit: ClampedLimit = 20
