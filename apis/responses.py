"""The Responses API and its requests. Its results are the openai SDK's own types."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from openai.types.responses import Response, ResponseUsage
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from apis.accounts.accounts import Caller
from apis.accounts.charges import Charge
from apis.batches.spare_capacity import SpareCapacity
from apis.chat import Sampling
from apis.conversations import Conversations, ItemInclude, contains_text
from apis.errors import StackError, Unsupported
from apis.events import EventBatch, ResponseEvent, ResponseEventBatch, ResponseStreamEvent
from apis.observation.background import Observation
from apis.observation.details import DeliverySummary, ResponseTreeParams
from apis.provider import Provider
from apis.sink import Sink
from apis.steering import Steer
from apis.storage.pages import Page
from apis.wire.base import Effort, Includable, ListParams, Metadata, Wire
from apis.wire.completion_window import SOONEST, window_to_seconds
from apis.wire.item_parts import text_or_list
from apis.wire.items import Item
from apis.wire.prompt import PromptReference
from apis.wire.request_options import (
    AccessPrograms,
    BackgroundOptions,
    ImageOptions,
    ModerationOptions,
    PromptCacheOptions,
)
from apis.wire.text_format import TextFormatOption
from apis.wire.tool_choice import ToolChoice
from apis.wire.tools import Tool, VaultIds


class TextOptions(Wire):
    format: TextFormatOption | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ContextManagement(Wire):
    """Compact the conversation when the prompt is longer than `compact_threshold` tokens; the default is four fifths of
    the model's context."""

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
    """The id of a conversation, as an object."""

    id: ConversationId


def _conversation_tag(value: Any) -> str:
    return "id" if isinstance(value, str) else "object"


ConversationChoice = Annotated[
    Annotated[ConversationId, Tag("id")] | Annotated[ConversationRef, Tag("object")], Discriminator(_conversation_tag)
]


class _AbsentModel(str):
    """An empty string that differs from the empty string that a client may send."""

    __slots__ = ()


_ABSENT_MODEL: Final = _AbsentModel()


class CreateResponse(Sampling):
    """A request for a response. Null means unset; unknown fields are dropped, except those that `FIELD_ROWS` refuses.
    `model` may be absent, and is then empty, in a request with a `prompt`, whose template may name one.

    In addition to OpenAI's fields it has those of `Sampling`, `cache_salt` and `priority`, which the engines here
    support, and `vault_ids`, the vaults with credentials for its tools. Its schema is built at once: else the first
    request would wait for it.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=False)

    prompt: PromptReference | None = None
    model: str = Field(
        default_factory=lambda: _ABSENT_MODEL,
        validate_default=True,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00-\x20\x7f]+$",
    )
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
    context_management: list[ContextManagement] | None = Field(None, max_length=1)
    access_programs: AccessPrograms | None = None
    background_options: BackgroundOptions | None = None
    image: ImageOptions | None = None
    moderation: ModerationOptions | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    vault_ids: VaultIds | None = None

    @field_validator("model", mode="wrap")
    @classmethod
    def _require_model_or_prompt(
        cls, value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> str | None:
        if not value and info.data.get("prompt") is not None:
            return ""
        if value is _ABSENT_MODEL:
            raise PydanticCustomError("missing", "Field required")
        return validate(value)

    @property
    def is_prewarm(self) -> bool:
        """True for a request that only prepares its input, without calling a model."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm is True

    @property
    def completion_window(self) -> str:
        """The time in which the response is to begin if it runs in the background; `soonest` for no deadline."""
        return (self.background_options and self.background_options.completion_window) or SOONEST

    @property
    def window_s(self) -> int:
        """The length of the completion window in seconds, 0 for no deadline."""
        return window_to_seconds(self.completion_window)

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the response is a turn of, if any."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class SteerResponse(Wire):
    """Steering input for a response that runs: messages of the user, and outputs of functions that the model did not
    wait for."""

    previous_response_id: str = Field(min_length=1, max_length=256)
    input: Input


class CompactConversation(Wire):
    """A request to compact a conversation: that of the previous response, then `input`. Only the model that writes the
    summary sees `instructions`."""

    model: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$")
    prompt: PromptReference | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    prompt_cache_key: str | None = Field(None, max_length=256)
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default", "fast", "flex", "priority"] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)


class CompactedConversation(Wire):
    """The input that replaces a conversation: the messages of the user, and one compaction item for all else. The
    SDK's own type has no messages of users in its output."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


@dataclass(frozen=True, slots=True)
class InputTokenCount:
    """The length of a prompt in tokens. An estimate is derived from the text and the usage of earlier turns."""

    tokens: int
    is_estimate: bool = False


class InputItemListParams(ListParams, ItemInclude):
    """Query of a listing of a response's input items."""

    after: str | None = None


class ResponseListParams(ListParams):
    """Query of a listing of stored responses, an extension of OpenAI's API."""

    after: str | None = Field(None, max_length=128)
    status: Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"] | None = None
    model: str | None = None
    background: Literal["true", "false"] | None = None
    conversation: str | None = None
    search: str | None = Field(None, max_length=256)

    def accepts(self, response: Mapping[str, Any], texts: Iterable[str] = ()) -> bool:
        """Return True if the response, by its fields and the beginnings of its question and its text, is one of those
        that are listed. `search` matches a part of the id, of these texts or of the metadata, in any case."""
        conversation: Mapping[str, Any] = response.get("conversation") or {}
        metadata: Mapping[str, str] = response.get("metadata") or {}
        return (
            self.status in (None, response.get("status"))
            and self.model in (None, response.get("model"))
            and self.background in (None, "true" if response.get("background") else "false")
            and self.conversation in (None, conversation.get("id"))
            and contains_text(self.search, (response["id"], *texts, *metadata, *metadata.values()))
        )


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool of OpenAI's API that a server may run: its `type`, and the `reason` why this one does not, which names the
    part of the run config that brings it. `servers` are the labels of MCP servers that need no URL."""

    type: str
    reason: str | None
    servers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Successor:
    """A response that is to follow a steered one by itself, on its stream: its id and request. `posted` is the input
    that it reads, each with its id; an event of its failure has the number `next_number`."""

    response_id: str
    previous_response_id: str
    request: CreateResponse
    posted: Sequence[tuple[str, Any]]
    next_number: int


class Session(ABC):
    """The responses of one connection. Unlike `Responses.respond`, it lets a request continue an unstored response, in
    this session only and as long as the session's memory lasts. A response that continues another on the same stream
    replaces it; one on another stream is a fork and does not."""

    @abstractmethod
    async def respond(
        self,
        request: CreateResponse,
        sink: Sink[ResponseStreamEvent],
        *,
        stream_id: str = "",
        generate: bool = True,
        charge: Charge | None = None,
        caller: Caller | None = None,
        successor_id: str | None = None,
    ) -> None:
        """Create a response as `Responses.respond` does, never in the background; several may run at a time. Without
        `generate` no model is called: the response holds its input for later responses to continue. With
        `successor_id` it is a Successor. Raises InvalidRequest also for a stored response that continues an unstored
        one."""

    @abstractmethod
    async def steer(self, request: SteerResponse) -> bool:
        """Steer a response that runs in this session: the events of the response say whether the input is accepted.
        Return False, and do nothing, for any other response. Raises SteeringRefused for one that has ended here."""

    @abstractmethod
    def take_successor(self, *, stream_id: str = "") -> Successor | None:
        """Return the response that is to follow the one that has just ended on that stream, once."""

    @abstractmethod
    async def fail_successor(self, successor: Successor, error: StackError) -> EventBatch:
        """Drop the input of a successor that could not be created; return the events that give it back."""

    @abstractmethod
    def forget(self, response_id: str, *, stream_id: str = "") -> None:
        """Drop an unstored response of that stream from memory; do nothing for any other."""

    @abstractmethod
    def close(self) -> None:
        """Drop all responses from memory. The connection must call it at its end."""


class Responses(Provider, ABC):
    """Creates responses with models and tools, and stores them for the retention time of the config.

    A response belongs to its `tenant`: every method treats another tenant's id as unknown.
    """

    hides_reasoning: bool = False
    """The text of reasoning is hidden from clients."""

    @abstractmethod
    def execute_deferred_with(self, capacity: SpareCapacity) -> None:
        """Execute background responses that have a completion window in this process from now on, as `capacity` admits
        them, until it drains or closes."""

    async def drain(self, *, at_once: bool = False) -> None:
        """Prepare for the end of this process: start nothing more, end the streams of background responses, which other
        processes can continue, and return when nothing runs here any more. It may be cancelled. With `at_once` and no
        other process, background responses wait for the next start, or fail where they could not go on then."""

    def count_running(self) -> int:
        """Return the number of background responses that this process executes."""
        return 0

    def end_running(self) -> None:
        """Prepare for the cancellation of the streams that still run, because the process ends now: from here on a
        stream whose task is cancelled ends with `response.failed`, and its response is stored as `failed` with
        `server_error`; one that is closed early is stored like that, too, instead of as `cancelled`."""

    def resolve_prompt(self, request: CreateResponse) -> CreateResponse:
        """Return the request with the fields of the prompt that it refers to, for permissions and limits; `respond`
        takes the request as it was sent. Raises InvalidRequest for an unknown prompt and for wrong variables."""
        return request

    @abstractmethod
    async def respond(
        self,
        request: CreateResponse,
        sink: Sink[ResponseEvent],
        *,
        tenant: str,
        response_id: str | None = None,
        charge: Charge | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Create a response, under a new id or one from the caller (`apis.storage.keys.new_response_id`), and put its
        events into `sink` in batches that became ready together; the laws of the stream hold for all. Without `stream`
        in the request the only event is the terminal one. A background response that waits fails with KeyRevoked if the
        key of the `caller` is not valid any more when it is its turn.

        Raises InvalidRequest, NotFound or StoreUnavailable before the first event. Later a failure appears twice: as
        the terminal `response.failed`, then as the StackError that caused it, so that no caller that drains the stream
        can mistake it for an answer. The terminal event of a stored response is in the store before it is put.
        A caller that is cancelled stops the generation, and the output so far is stored as `cancelled`. A stored
        response ends the `charge` in the step that stores it; a background response takes the charge along. Raises
        PermissionDenied if the `caller` may not use a tool or a model of the response as it is built, with the tools of
        its prompt, its chain and its conversation.

        A `background` response continues without its caller. With `stream` the events are those of `follow` from the
        first one; without, it is `response.queued`. Raises RateLimited if too many responses wait.
        """

    async def find_window(self, model: str) -> int | None:
        """Return the tokens that prompt and answer of a model may have together, under any of its names; None where
        that is not known, which is the default. Raises nothing."""
        return None

    @abstractmethod
    def open_session(self, *, tenant: str) -> Session:
        """Return the session of one connection, which must close it."""

    @abstractmethod
    def follow(
        self, response_id: str, starting_after: int, *, include: Sequence[str] = (), tenant: str
    ) -> AsyncGenerator[ResponseEventBatch]:
        """Yield the events of a background response after that sequence number (-1 for all), live ones included, until
        the response ends or is cancelled or deleted. Any process can serve it, any number of times. Batches may be
        empty. `include` decides as in `get`.

        Raises NotFound; InvalidRequest if the events were never stored, have expired, or end before that number.
        """

    @abstractmethod
    async def get(self, response_id: str, *, include: Sequence[str] = (), tenant: str) -> Response:
        """Return the stored response: the one in its terminal event, or its initial state before. Its items have the
        parts that `include` names, whichever the request that created it named. Raises NotFound."""

    @abstractmethod
    async def delete(self, response_id: str, *, tenant: str) -> None:
        """Delete a response. Later turns that continue it still have their history. Raises NotFound."""

    @abstractmethod
    async def cancel(self, response_id: str, *, tenant: str) -> Response:
        """Stop a background response in any process and return it; one that has ended is returned unchanged. Raises
        NotFound, and InvalidRequest for a response that did not run in the background."""

    async def steer(self, request: SteerResponse, *, tenant: str) -> Steer:
        """Send input to a response that runs or waits, in any process, and return once it is stored. The response ends
        after its present turn and the calls of that turn: as `completed` where the turn was its last, else as
        `incomplete` with the reason `steered`. In the step that stores this end, a background response with the id
        `successor_id` is queued: it has the same settings, continues the response, and reads all that was sent, in
        order. Where the client owes outputs of calls, nothing is queued: the next request that continues the response
        has what was sent before its own input. A response that fails or is cancelled takes what was sent along.

        Raises SteeringRefused.
        """
        raise Unsupported("This server cannot steer responses.", code="not_configured")

    async def end_after_turn(self, response_id: str, *, tenant: str) -> None:
        """Let a background response end as a steered one does, with none that follows; by default it goes on."""

    async def list_responses(self, params: ResponseListParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Return a page of the tenant's responses without their items, newest first by default, each with `preview` and
        `question`, the first words of its text and of the last user message before it. Those that have not ended come
        first on the first page. A page may hold fewer than `limit` where few match; `last_id` is then the last one that
        was looked at."""
        raise Unsupported("This server cannot list responses.", code="not_configured")

    async def list_tree(self, response_id: str, params: ResponseTreeParams, *, tenant: str) -> Page[dict[str, Any]]:
        """Return the responses of the tree that the response is in, each as in `list_responses`, parents first. The
        parent of each is its `previous_response_id`. A deleted one that others continue has only its id and
        `deleted`. Raises NotFound."""
        raise Unsupported("This server cannot list the branches of a chain.", code="not_configured")

    async def list_webhook_deliveries(self, response_id: str, *, tenant: str) -> Sequence[DeliverySummary]:
        """Return the deliveries of the response's end to the tenant's webhooks, with the latest attempts of each.
        Raises NotFound."""
        raise Unsupported("This server has no webhooks.", code="not_configured")

    @abstractmethod
    async def list_input_items(
        self, response_id: str, params: InputItemListParams, *, tenant: str
    ) -> Page[dict[str, Any]]:
        """Return one page of the request's own input items, newest first by default. Raises NotFound."""

    @abstractmethod
    async def count_input_tokens(
        self, request: CreateResponse, *, tenant: str, caller: Caller | None = None
    ) -> InputTokenCount:
        """Return the tokens of the prompt of this request, its history and tools included; an estimate where the
        model's server cannot count."""

    @abstractmethod
    async def compact(
        self, request: CompactConversation, *, tenant: str, caller: Caller | None = None
    ) -> CompactedConversation:
        """Have the model summarise a conversation. Nothing is stored: the output is the input of later requests. Raises
        as `create`; cancelling it stops the generation."""

    def describe_tools(self, *, tenant: str) -> Sequence[HostedTool]:
        """Return the tools that the server may run itself, those that it lacks included."""
        return ()

    def observation(self) -> Observation:
        """Return the reads of background responses as they are now, for operators."""
        raise Unsupported("This server cannot show its background responses.", code="not_configured")

    @abstractmethod
    def conversations(self) -> Conversations:
        """Return the conversations that responses can be turns of."""
