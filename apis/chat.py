"""The messages, tools and options of one model call, in chat completions' own shape plus the reasoning it lacks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, Tag

from apis.errors import Unsupported
from apis.wire.base import Effort, JsonValue, Phase, Wire
from apis.wire.item_parts import AudioFormat, text_or_list
from apis.wire.text_format import Grammar, JsonObjectFormat, JsonSchema, TextFormat, TextFormatInput

NativeToolName = Literal["browser", "python"]
TENANT_SALT_PREFIX: Final = "tenant-"
"""Begins a `cache_salt` that the server adds by itself; a provider without separate caches ignores such a salt."""


def share_of_salt(cache_salt: str | None) -> str:
    """Return the part of a cache salt that is equal for all requests of a tenant, by which an engine takes turns. A
    client's own salt, which divides its tenant's cache, is not in it."""
    return (cache_salt or "").removeprefix(TENANT_SALT_PREFIX).partition(".")[0]


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


class AudioData(Wire):
    """`data` is base64, `format` the ending of such a file, as `wav`."""

    data: str = Field(min_length=1)
    format: AudioFormat


class AudioPart(Wire):
    type: Literal["input_audio"] = "input_audio"
    input_audio: AudioData


class RefusalPart(Wire):
    type: Literal["refusal"] = "refusal"
    refusal: str


ContentPart = Annotated[TextPart | ImagePart | FilePart | AudioPart | RefusalPart, Field(discriminator="type")]
ChatContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("list")],
    Discriminator(text_or_list),
]


class CalledFunction(Wire):
    """`arguments` is the text as the model wrote it: not always JSON."""

    name: str
    arguments: str


class FunctionCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustomTool(Wire):
    name: str
    input: str


class CustomCall(Wire):
    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustomTool


ChatToolCall = Annotated[FunctionCall | CustomCall, Field(discriminator="type")]


class Message(Wire):
    """One message. `reasoning` (assistant only) precedes its content and calls; `phase` says whether an assistant text
    is a preamble or the answer. A `tool` message holds the output of the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ChatContent | None = None
    name: str | None = None
    reasoning: str | None = None
    phase: Phase | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Wire):
    """A function. `namespace` groups functions for models that support it; their calls are named `namespace.name`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    namespace: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class ChatFunctionTool(Wire):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    @property
    def name(self) -> str:
        function = self.function
        return f"{function.namespace}.{function.name}" if function.namespace else function.name


class ChatGrammarFormat(Wire):
    type: Literal["grammar"] = "grammar"
    grammar: Grammar


class CustomToolDefinition(Wire):
    """A tool whose input is free text, or text of a grammar."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    format: Annotated[TextFormatInput | ChatGrammarFormat, Field(discriminator="type")] | None = None


class ChatCustomTool(Wire):
    type: Literal["custom"] = "custom"
    custom: CustomToolDefinition

    @property
    def name(self) -> str:
        return self.custom.name


class NativeTool(Wire):
    """A tool that the model was trained on. Its calls are named `browser.search`, `browser.open` and `browser.find`, or
    `python`, whose input is raw code."""

    type: NativeToolName

    @property
    def name(self) -> str:
        return self.type


ChatTool = Annotated[ChatFunctionTool | ChatCustomTool | NativeTool, Field(discriminator="type")]


class ChatToolName(Wire):
    name: str


class NamedFunction(Wire):
    type: Literal["function"] = "function"
    function: ChatToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Wire):
    type: Literal["custom"] = "custom"
    custom: ChatToolName

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = Annotated[NamedFunction | NamedCustomTool, Field(discriminator="type")]


class AllowedToolSet(Wire):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ChatAllowedTools(Wire):
    """Only these of the request's tools may be called; the others stay in the prompt."""

    type: Literal["allowed_tools"] = "allowed_tools"
    allowed_tools: AllowedToolSet


ChatToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction | NamedCustomTool | ChatAllowedTools, Field(discriminator="type")]
)


class ChatJsonSchemaFormat(Wire):
    type: Literal["json_schema"] = "json_schema"
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | ChatJsonSchemaFormat, Field(discriminator="type")]


class EngineOptions(Wire):
    """Options that OpenAI's API does not have, in vLLM's names. A provider passes each on to its engine or refuses it
    by name. The `guided_` ones are older names of `structured_outputs`. For those in `REFUSED_ENGINE_OPTIONS` there is
    no place in a response, or they concern the server's other users."""

    chat_template_kwargs: dict[str, JsonValue] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    guided_json: dict[str, JsonValue] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1, max_length=10_000)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    thinking_token_budget: int | None = Field(None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    bad_words: list[str] | None = Field(None, max_length=1000)
    allowed_token_ids: list[int] | None = Field(None, max_length=500_000)
    length_penalty: float | None = Field(None, ge=-10, le=10)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    documents: list[dict[str, JsonValue]] | None = None
    mm_processor_kwargs: dict[str, JsonValue] | None = None
    vllm_xargs: dict[str, JsonValue] | None = None

    best_of: JsonValue = None
    use_beam_search: JsonValue = None
    echo: JsonValue = None
    prompt_logprobs: JsonValue = None
    chat_template: JsonValue = None
    add_generation_prompt: JsonValue = None
    continue_final_message: JsonValue = None
    add_special_tokens: JsonValue = None
    return_token_ids: JsonValue = None
    return_tokens_as_token_ids: JsonValue = None
    guided_decoding_backend: JsonValue = None
    logits_processors: JsonValue = None
    kv_transfer_params: JsonValue = None


REFUSED_ENGINE_OPTIONS: Final[Mapping[str, Sequence[JsonValue]]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "prompt_logprobs": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "guided_decoding_backend": ("auto",),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
}
"""Engine options that no provider passes on, with the values that ask for nothing."""
ENGINE_OPTIONS: Final = tuple(name for name in EngineOptions.model_fields if name not in REFUSED_ENGINE_OPTIONS)


def refuse_engine_options(options: EngineOptions, supported: Collection[str] = ()) -> None:
    """Raise Unsupported naming the first engine option of a request that its provider does not support."""
    for name in ENGINE_OPTIONS:
        if name not in supported and getattr(options, name) is not None:
            raise Unsupported(f"'{name}' is not supported by this model's server.", param=name)


def refuse_unsafe_engine_options(options: EngineOptions, supported: Collection[str] = ()) -> None:
    """Raise Unsupported naming the first engine option that no provider passes on, unless its value asks for nothing
    or it is one of `supported`."""
    if REFUSED_ENGINE_OPTIONS.keys().isdisjoint(options.model_fields_set):
        return
    for name, neutral_values in REFUSED_ENGINE_OPTIONS.items():
        value = getattr(options, name)
        if value is not None and value not in neutral_values and name not in supported:
            raise Unsupported(f"'{name}' is not offered by this server.", param=name)


class Sampling(EngineOptions):
    """The sampling options. None stands for the value in the model's generation config. `top_k`, `min_p`,
    `repetition_penalty` and `stop_token_ids` are not in OpenAI's API; the engines here support them."""

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
    """A request for a chat completion, in that API's own names. `max_completion_tokens` bounds all generated tokens,
    reasoning included; `all_reasoning` also shows the model the reasoning of earlier turns. `cache_salt` separates the
    prefix caches of tenants, and a lower `priority` runs first, both in engines that support them. A client cannot set
    the last two fields: `cache_root` is an opaque id that all chats of one chain of responses share, and the text of an
    answer that is not `is_streamed` may be kept until its end."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[Message] = Field(min_length=1)
    tools: list[ChatTool] | None = Field(None, max_length=128)
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    reasoning_effort: Effort | None = None
    all_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prompt_cache_key: str | None = None
    cache_root: str | None = None
    is_streamed: bool | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
