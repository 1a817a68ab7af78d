"""Responses: the API of the mission, and the request it takes. What it gives are the openai SDK's own types."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses import Response, ResponseStreamEvent, ResponseUsage
from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag

from apis.chat import Sampling
from apis.conversations import Conversations
from apis.events import LoggedEvent
from apis.provider import Provider
from apis.wire.base import Effort, Includable, Metadata, Wire
from apis.wire.item_parts import text_or_list
from apis.wire.items import Item
from apis.wire.text_format import TextFormatOption
from apis.wire.tool_choice import ToolChoice
from apis.wire.tools import Tool


class TextOptions(Wire):
    format: TextFormatOption | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ContextManagement(Wire):
    """Compact what the model would be told when it is longer than `compact_threshold` tokens; without one, when four
    fifths of the model's context are full."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1, le=2**31 - 1)


class StreamOptions(Wire):
    include_obfuscation: bool | None = None


Input = Annotated[
    Annotated[Annotated[str, Field(max_length=10 * 2**20)], Tag("text")]
    | Annotated[Annotated[list[Item], Field(max_length=100_000, fail_fast=True)], Tag("list")],
    Discriminator(text_or_list),
]
ConversationId = Annotated[str, Field(min_length=1, max_length=256)]


class ConversationRef(Wire):
    """A conversation, by its id."""

    id: ConversationId


def _conversation_tag(value: Any) -> str:
    return "id" if isinstance(value, str) else "object"


ConversationChoice = Annotated[
    Annotated[ConversationId, Tag("id")] | Annotated[ConversationRef, Tag("object")], Discriminator(_conversation_tag)
]


class CreateResponse(Sampling):
    """A request for a response. Null means unset; unknown fields are dropped.

    Beside OpenAI's own fields it takes those of `Sampling`, `cache_salt` and `priority`, which the engines here have.
    Fields that are read but refused (`UNSUPPORTED`) are here so that the refusal can name them.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Includable] | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=2**31 - 1)
    max_output_tokens: int | None = Field(None, ge=16, le=2**31 - 1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    safety_identifier: str | None = Field(None, max_length=128)
    prompt_cache_key: str | None = Field(None, max_length=256)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    user: str | None = Field(None, max_length=512)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)

    background: bool | None = None
    conversation: ConversationChoice | None = None
    prompt: JsonValue = None
    context_management: list[ContextManagement] | None = Field(None, max_length=1)
    moderation: JsonValue = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that it is a turn of."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


UNSUPPORTED_REQUEST_FIELDS = ("prompt", "moderation")
"""Fields of OpenAI's API that this stack does not offer: any value but null is refused by name."""


class CompactConversation(Wire):
    """A conversation to be compacted: what comes before `input` is that of the previous response. `instructions` are
    told to the model that sums it up, and to no other."""

    model: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=256)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "fast", "flex", "priority"] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)


class CompactedConversation(Wire):
    """What to begin anew from: the messages of the user, and one compaction item for all the rest. The SDK's own type
    knows no output that a user said."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class InputItemListParams(Wire):
    """Which of a response's input items to list."""

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ItemList(Wire):
    """A page of items, in OpenAI's list shape; the ids are null on an empty page."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


EventBatch = Sequence[ResponseStreamEvent | LoggedEvent]
"""Events of a stream that became ready together, new ones or lines of a log."""


class Session(ABC):
    """The responses of one connection: like those of `Responses.create`, but for what is remembered. One that the
    request does not want stored can be followed here, as long as the session has room for it, and nowhere else.
    What follows it in its own lane takes its place; a fork from another lane does not."""

    @abstractmethod
    def create(
        self, request: CreateResponse, *, stream_id: str = "", generate: bool = True
    ) -> AsyncGenerator[Sequence[ResponseStreamEvent]]:
        """As `Responses.create`, never in the background; several at a time. Without `generate` no model is asked:
        the response holds its input, for others to follow. Raises InvalidRequest also for a response that is to be
        stored and follows one that is not."""

    @abstractmethod
    def forget(self, response_id: str, *, stream_id: str = "") -> None:
        """Forget an unstored response of that lane; any other is left as it is."""

    @abstractmethod
    def close(self) -> None:
        """Forget all. Of a session that is done with, or it would be held in memory."""


class Responses(Provider, ABC):
    """Responses made by models and tools, kept for as long as the store's retention says.

    `tenant` owns what is made; another tenant's id is an unknown id, everywhere.
    """

    async def drain(self) -> None:
        """This process is about to end: begin nothing more, end the streams of background responses, which can be
        followed elsewhere, and return when none is made here any more. It may be cancelled."""

    @abstractmethod
    def create(
        self, request: CreateResponse, *, tenant: str, response_id: str | None = None
    ) -> AsyncGenerator[EventBatch]:
        """Make a response, under an id of its own or one that the caller has minted (`resp_` and 32 random hex digits),
        as batches of events that became ready together; the laws of the stream hold for all.
        Where the request does not say `stream`, nobody is told of the beginning: the events start with the first item.

        Raises InvalidRequest, NotFound or StoreUnavailable before the first event. After it, a failure is told twice:
        as the terminal `response.failed`, then by raising the StackError that caused it, so that whoever drains the
        stream cannot take it for an answer. A terminal event of a stored response is in the store before it is
        yielded. Closing the generator early stops the generation and stores what there is as `cancelled`.

        A `background` response goes on without the generator. With `stream` that is as `follow` from the first event
        on; without, its only event tells that the response is queued. Raises RateLimited where too many wait.
        """

    @abstractmethod
    def open_session(self, *, tenant: str) -> Session:
        """What a connection makes its responses by. It must be closed."""

    @abstractmethod
    def follow(self, response_id: str, starting_after: int, *, tenant: str) -> AsyncGenerator[EventBatch]:
        """The events of a background response after the one of that number (-1 for all), then those to come, until
        it is at its end, or cancelled or deleted; any process may be asked, any number of times. Batches may be
        empty.

        Raises NotFound; InvalidRequest where its events are not kept, not any more, or do not reach as far.
        """

    @abstractmethod
    async def get(self, response_id: str, *, tenant: str) -> Response:
        """The stored response, equal to what its terminal event carried; before that, as it began. Raises NotFound."""

    @abstractmethod
    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Forget a response. Later turns that build on it keep their history. Raises NotFound."""

    @abstractmethod
    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        """Stop a background response, whichever process makes it; one at its end is returned as it is. Raises NotFound;
        InvalidRequest for one that was not made in the background."""

    @abstractmethod
    async def list_input_items(self, response_id: str, params: InputItemListParams, *, tenant: str) -> ItemList:
        """One page of the items that the request itself gave, newest first by default. Raises NotFound."""

    @abstractmethod
    async def count_input_tokens(self, request: CreateResponse, *, tenant: str) -> int:
        """Tokens of the prompt this request would make, its history and tools included."""

    @abstractmethod
    async def compact(self, request: CompactConversation, *, tenant: str) -> CompactedConversation:
        """Let the model sum a conversation up. Nothing is stored: the output is the input of what follows. Raises as
        `create` does; cancelling it stops the generation."""

    @abstractmethod
    def conversations(self) -> Conversations:
        """The conversations that responses can be turns of."""
