"""Inference: a chat model behind one method. A request goes in whole, deltas come out as they are made."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, JsonValue

from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import Unsupported
from apis.provider import Provider
from apis.wire import Wire

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Phase = Literal["commentary", "final_answer"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Modality = Literal["image", "file"]
Native = Literal["browser", "python"]
OWN_SALT: Final = "tenant-"  # begins a `cache_salt` that no client asked for: who keeps no caches apart drops it


# --- messages: chat completions' own shape, plus the reasoning it lacks ----------------------------------------------


class TextPart(Wire):
    type: Literal["text"] = "text"
    text: str


class ImageUrl(Wire):
    url: str
    detail: Literal["low", "high", "auto", "original"] | None = None


class ImagePart(Wire):
    """`url` is https or a data URL."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


class FileData(Wire):
    """`file_data` is a data URL or base64."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Wire):
    type: Literal["file"] = "file"
    file: FileData


class RefusalPart(Wire):
    type: Literal["refusal"] = "refusal"
    refusal: str


Part = Annotated[TextPart | ImagePart | FilePart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Wire):
    """`arguments` is the text as the model wrote it: not always JSON."""

    name: str
    arguments: str


class FunctionCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(Wire):
    name: str
    input: str


class CustomCall(Wire):
    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustom


Call = Annotated[FunctionCall | CustomCall, Field(discriminator="type")]


class Message(Wire):
    """One message. `reasoning` (assistant only) is the thought that came before its content and calls; `phase` says
    whether an assistant text was a preamble or the answer. A `tool` message answers the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning: str | None = None
    phase: Phase | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


# --- what else a request may ask for ---------------------------------------------------------------------------------


class Function(Wire):
    """`namespace` groups functions for models that know groups; calls then come back named `namespace.name`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    namespace: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class FunctionTool(Wire):
    type: Literal["function"] = "function"
    function: Function

    @property
    def name(self) -> str:
        function = self.function
        return f"{function.namespace}.{function.name}" if function.namespace else function.name


class Grammar(Wire):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class TextFormatInput(Wire):
    type: Literal["text"] = "text"


class GrammarFormat(Wire):
    type: Literal["grammar"] = "grammar"
    grammar: Grammar


class Custom(Wire):
    """A tool whose input is free text, or text of a grammar."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    format: Annotated[TextFormatInput | GrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(Wire):
    type: Literal["custom"] = "custom"
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name


class NativeTool(Wire):
    """A tool as a model was trained on it. Its calls come back named `browser.search`, `browser.open` and
    `browser.find`, or `python`, whose input is raw code."""

    type: Native

    @property
    def name(self) -> str:
        return self.type


Tool = Annotated[FunctionTool | CustomTool | NativeTool, Field(discriminator="type")]


class ToolName(Wire):
    name: str


class NamedFunction(Wire):
    type: Literal["function"] = "function"
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Wire):
    type: Literal["custom"] = "custom"
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = Annotated[NamedFunction | NamedCustom, Field(discriminator="type")]


class AllowedToolSet(Wire):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Wire):
    """Only these of the request's tools may be called; the others stay in the prompt."""

    type: Literal["allowed_tools"] = "allowed_tools"
    allowed_tools: AllowedToolSet


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction | NamedCustom | AllowedTools, Field(discriminator="type")]
)


class TextFormat(Wire):
    type: Literal["text"] = "text"


class JsonObjectFormat(Wire):
    type: Literal["json_object"] = "json_object"


class JsonSchema(Wire):
    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, JsonValue] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"] = "json_schema"
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Wire):
    """What shapes the choice of tokens. None leaves it to the model's own generation config.
    `top_k`, `min_p`, `repetition_penalty` and `stop_token_ids` are not in OpenAI's API; the engines here have them."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: list[int] | None = Field(None, max_length=64)


class ChatRequest(Sampling):
    """A chat completion to make, in chat completions' own names. `max_completion_tokens` bounds all generated tokens,
    reasoning included; `all_reasoning` shows the model that of earlier turns too. `cache_salt` keeps the prefix caches
    of tenants apart, `priority` is lower-first, both where an engine has them."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    reasoning_effort: Effort | None = None
    all_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)


# --- what comes out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token: str
    logprob: float
    bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token of the answer's text, its natural-log probability and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: Sequence[int]
    top: Sequence[TopLogprob] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer. A change of `phase` begins a new message."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """More of a refusal."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `id` is unique in this chat. A `custom` call's input is raw text, a function's is JSON."""

    id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments, or of the input, of the call `id`, which has begun. Calls may interleave."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one chat. `output_tokens` counts reasoning too; the two details are parts of their totals."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end: exactly one, last. `tool_calls` means that the calls are whole and want answers."""

    reason: FinishReason
    usage: Usage


Delta = Text | Reasoning | Refusal | ToolCallStart | ToolArguments | Finish
Step = Sequence[Delta]
"""Deltas that became ready together: one read of an upstream's socket, one step of an engine."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served now. `modalities` are the inputs it takes beside text, None where not known;
    `native_tools` are those it takes as a NativeTool. A model of embeddings has `embedding_dimensions`, where known."""

    id: str
    owned_by: str
    created: int = 0
    context_tokens: int | None = None
    modalities: frozenset[Modality] | None = None
    native_tools: frozenset[Native] = frozenset()
    embedding_dimensions: int | None = None


class Inference(Provider, ABC):
    """Models by id, for chats and for embeddings. Messages and deltas are all that the layers above know of a model."""

    @abstractmethod
    async def models(self) -> Sequence[Model]:
        """What is served now, asked of whoever serves it. Raises UpstreamError when nobody answers."""

    @abstractmethod
    def chat(self, request: ChatRequest) -> AsyncGenerator[Step]:
        """Generate, as non-empty steps of deltas; the last delta of the last step is the one Finish.

        A stream that breaks off raises and never ends in a made-up Finish: UpstreamError, UpstreamTimeout,
        RateLimited, ContextLengthExceeded, ModelNotFound, InvalidRequest. What the provider cannot honour is an
        Unsupported naming the field, raised before the first step. Closing the generator stops the generation within
        a second: always iterate under `contextlib.aclosing`.
        """

    @abstractmethod
    async def count_tokens(self, request: ChatRequest) -> int:
        """The prompt's length in tokens as the model would see it. Raises Unsupported where that cannot be known."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """A vector for each input. Raises as `chat` does; as here where a model makes none."""
        raise Unsupported(f"The model '{request.model}' makes no embeddings.", param="model")
