"""Convert a ChatRequest into the JSON body of POST /chat/completions, in the dialect of the server."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import orjson

from apis.chat import (
    ENGINE_OPTIONS,
    TENANT_SALT_PREFIX,
    AudioPart,
    ChatAllowedTools,
    ChatCustomTool,
    ChatFunctionTool,
    ChatRequest,
    ContentPart,
    CustomCall,
    FilePart,
    FunctionCall,
    ImagePart,
    Message,
    NamedFunction,
    RefusalPart,
    ResponseFormat,
    TextPart,
    refuse_engine_options,
)
from apis.errors import InvalidRequest, Unsupported
from apis.wire.base import value_to_kept_json
from providers.inference.chat_completions.arguments import to_object
from providers.inference.chat_completions.custom_tools import (
    custom_call_to_function_call,
    custom_to_function,
    require_plain_tools,
)
from providers.inference.chat_completions.text_repair import repair_surrogates

UpstreamEngine = Literal["vllm", "openai"]

GUIDED_FIELDS: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Names that vLLM no longer knows -> the keys of `structured_outputs` that replace them."""
ENGINE_FIELDS: Final = (
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "cache_salt", "priority"),
    *(name for name in ENGINE_OPTIONS if name not in GUIDED_FIELDS),
)
"""Request fields that OpenAI's API does not have."""

COPIED_FIELDS: Final = frozenset(
    (
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"),
        *("max_completion_tokens", "reasoning_effort", "verbosity", "logprobs", "top_logprobs", "prompt_cache_key"),
        *ENGINE_FIELDS,
    )
)
OTHER_NAMES: Final[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}
"""Fields that a server may know by an older name only."""
OMITTABLE_FIELDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "stream_options": lambda _: True,
    "max_completion_tokens": lambda _: True,
    "parallel_tool_calls": lambda _: True,  # the reader of the answer takes one call where one is allowed
    "tool_choice": lambda value: value in ("auto", "none"),
    "prompt_cache_key": lambda _: True,
    "priority": lambda _: True,
    "cache_salt": lambda value: value.startswith(TENANT_SALT_PREFIX),
    "reasoning_effort": lambda value: value == "medium",
    "verbosity": lambda value: value == "medium",
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "logit_bias": lambda value: not value,
    "stop": lambda value: not value,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "top_p": lambda value: value == 1,
    "min_p": lambda value: value == 0,
}
"""Fields of which a server may know nothing -> whether it may go without this value: the answer stays the same."""
INNER_FIELDS: Final[Mapping[str, Callable[[ChatRequest], bool]]] = {
    "strict": lambda request: bool(request.tools) or request.response_format is not None,
    "name": lambda request: any(message.name for message in request.messages),
    "reasoning": lambda request: any(message.reasoning for message in request.messages),
    "reasoning_content": lambda request: any(message.reasoning for message in request.messages),
    "detail": lambda request: any(isinstance(message.content, list) for message in request.messages),
}
"""Fields of messages, tools and formats of which a server may know nothing -> whether a request may have them. What is
strict is checked in the answer, and the name of a message becomes the beginning of its text."""
VERBOSITY: Final[Mapping[str | None, str]] = {
    "low": "Keep the answer short: say what was asked for and no more.",
    "high": "Make the answer detailed: explain it, with examples where they help.",
}
"""Line of instructions by the request's `verbosity`. The default adds none, so that the prompt stays unchanged."""

SPLIT_CONTROL: Final = "<\u200b|".encode()


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """Differences between servers. `reasoning_field` names the field for an assistant's earlier reasoning.

    `neutralize_control_tokens` breaks up every `<|` in the prompt's texts, so that no text can forge the model's
    control tokens; None does so for gpt-oss models. `extra_body` is merged over the body. `lists_all_models` says that
    a model that is not in the server's list does not exist. `affinity_headers` are presets and names of headers that
    carry the request's affinity key. `null_content` says that a message of calls alone has a content of null, not of
    an empty text. `omitted` names fields of the body, and of what is in it, that the server refuses.
    """

    engine: UpstreamEngine = "vllm"
    developer_role: Literal["system", "developer"] = "system"
    reasoning_field: Literal["reasoning", "reasoning_content", "none"] = "reasoning"
    neutralize_control_tokens: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lists_all_models: bool = False
    affinity_headers: tuple[str, ...] = ()
    null_content: bool = True
    omitted: frozenset[str] = frozenset()


def request_to_body(request: ChatRequest, dialect: ChatDialect, *, is_streamed: bool = True) -> bytes:
    """Return the body of a chat. Raises Unsupported for a field that the server does not have."""
    if dialect.engine == "openai":
        refuse_engine_options(request)
    body = _build_prompt(request, dialect)
    set_fields = request.model_fields_set
    for name, value in vars(request).items():
        if name not in COPIED_FIELDS or name not in set_fields or value is None:
            continue
        if name in ENGINE_FIELDS and dialect.engine == "openai":
            if name == "cache_salt" and value.startswith(TENANT_SALT_PREFIX):
                continue
            raise Unsupported(f"'{name}' is not supported by this model's server.", param=name)
        body[name] = value
    body |= _build_tool_options(request) | _build_guidance(request)
    if request.response_format is not None and request.response_format.type != "text":
        body["response_format"] = _build_format(request.response_format, dialect)
    if is_streamed:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    for name in dialect.omitted & body.keys():
        _omit(body, name)
    return body_to_json({**body, **dialect.extra_body})


def can_omit(request: ChatRequest, name: str) -> bool:
    """Return true for a field of the body whose loss does not change the answer."""
    if name in INNER_FIELDS:
        return INNER_FIELDS[name](request)
    value = {"stream_options": True, **vars(request), **_build_tool_options(request)}.get(name)
    return value is not None and name in OMITTABLE_FIELDS and OMITTABLE_FIELDS[name](value)


def _omit(body: dict[str, Any], name: str) -> None:
    if not OMITTABLE_FIELDS[name](body[name]):
        return
    value = body.pop(name)
    if name in OTHER_NAMES:
        body[OTHER_NAMES[name]] = value
    elif name == "tool_choice" and value == "none":
        body.pop("tools", None)


def request_to_tokenize_body(request: ChatRequest, dialect: ChatDialect) -> bytes:
    """Return the body of vLLM's POST /tokenize for the same prompt."""
    body = _build_prompt(request, dialect)
    if request.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    if "chat_template_kwargs" in dialect.extra_body:
        body["chat_template_kwargs"] = dialect.extra_body["chat_template_kwargs"]
    return body_to_json(body)


def _build_prompt(request: ChatRequest, dialect: ChatDialect) -> dict[str, Any]:
    body: dict[str, Any] = {"model": request.model}
    texts: dict[str, Any] = {"messages": _build_messages(request.messages, dialect)}
    if request.tools and (tools := _build_tools(request, dialect)):
        texts["tools"] = tools
    neutralize = dialect.neutralize_control_tokens
    if neutralize is None:
        neutralize = request.model.rsplit("/", 1)[-1].lower().startswith("gpt-oss")
    if neutralize:
        _split_tokens_across_parts(texts["messages"])
    for name, value in texts.items():
        body[name] = orjson.Fragment(body_to_json(value).replace(b"<|", SPLIT_CONTROL)) if neutralize else value
    return body


# --- messages --------------------------------------------------------------------------------------------------------


def _build_messages(messages: Sequence[Message], dialect: ChatDialect) -> list[dict[str, Any]]:
    """Build the messages. The leading instructions are joined, because many chat templates demand one system message
    first."""
    leading = 0
    while leading < len(messages) and is_instruction(messages[leading]):
        leading += 1
    out = [_build_message(message, index, dialect) for index, message in _join_reasoning(messages)]
    if leading < 2:
        return out
    texts = [join_text_parts(message) for message in messages[:leading]]
    return [{"role": out[0]["role"], "content": "\n\n".join(text for text in texts if text)}, *out[leading:]]


def _join_reasoning(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Yield the messages with their indexes, reasoning that stands alone joined to the assistant's next message: a
    template has one text for it."""
    pending: list[str] = []
    for index, message in enumerate(messages):
        reasoning = message.reasoning if message.role == "assistant" else None
        following = messages[index + 1] if index + 1 < len(messages) else None
        if reasoning and _has_only_reasoning(message) and following is not None and following.role == "assistant":
            pending.append(reasoning)
            continue
        if pending:
            joined = "\n".join([*pending, reasoning] if reasoning else pending)
            message, pending = message.model_copy(update={"reasoning": joined}), []  # noqa: PLW2901 - the message that takes it up
        yield index, message


def _has_only_reasoning(message: Message) -> bool:
    return not (message.content or message.refusal or message.tool_calls)


def is_instruction(message: Message) -> bool:
    """Return true for a message of the developer's."""
    return message.role in ("system", "developer")


def join_text_parts(message: Message) -> str:
    """Return the text of a message without its other parts."""
    if not isinstance(message.content, list):
        return message.content or ""
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))


def _build_message(message: Message, index: int, dialect: ChatDialect) -> dict[str, Any]:
    role = dialect.developer_role if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": _build_content(message, index, dialect)}
    if message.name is not None:
        out |= _put_name_first(out["content"], message.name) if "name" in dialect.omitted else {"name": message.name}
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.role != "assistant":
        return out
    is_refused = not dialect.omitted.isdisjoint(("reasoning", "reasoning_content"))
    if message.reasoning and dialect.reasoning_field != "none" and not is_refused:
        out[dialect.reasoning_field] = message.reasoning
    if message.tool_calls:
        calls = (custom_call_to_function_call(c) if isinstance(c, CustomCall) else c for c in message.tool_calls)
        out["tool_calls"] = [_build_call(call) for call in calls]
        out["content"] = out["content"] or (None if dialect.null_content else "")
    return out


def _put_name_first(content: str | list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the content of a message with the name of its author before it."""
    title = f"{name}: "
    return {"content": title + content if isinstance(content, str) else [{"type": "text", "text": title}, *content]}


def _build_call(call: FunctionCall) -> dict[str, Any]:
    """Build a call of the history. Servers parse the arguments of each, and refuse the whole chat for those that are no
    object."""
    fields = call.model_dump()
    fields["function"]["arguments"] = to_object(call.function.arguments)
    return fields


def _build_content(message: Message, index: int, dialect: ChatDialect) -> str | list[dict[str, Any]] | None:
    content = message.content
    if not content:
        # An assistant message that holds only reasoning still needs a content; a refusal becomes the text.
        return message.refusal or ""
    if isinstance(content, str):
        return content
    return [_build_part(part, f"messages[{index}].content[{at}]", dialect) for at, part in enumerate(content)]


def _build_part(part: ContentPart, path: str, dialect: ChatDialect) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
        case ImagePart():
            image = part.image_url.model_dump(exclude_none=True)
            if "detail" in dialect.omitted:
                image.pop("detail", None)
            elif image.get("detail") == "original":
                image["detail"] = "high"
            return {"type": "image_url", "image_url": image}
        case AudioPart():
            return {"type": "input_audio", "input_audio": part.input_audio.model_dump()}
        case FilePart():
            if dialect.engine == "vllm":
                raise Unsupported("File inputs are not supported by this model's server.", param=path)
            return part.model_dump(exclude_none=True)


def _split_tokens_across_parts(messages: Sequence[dict[str, Any]]) -> None:
    """Break up control tokens that begin in one content part and continue in the next."""
    for message in messages:
        before = ""
        parts = cast(list[dict[str, Any]], message["content"] if isinstance(message["content"], list) else [])
        for part in parts:
            if before.endswith("<") and part.get("text", "").startswith("|"):
                part["text"] = "\u200b" + part["text"]
            before = part.get("text", before)


# --- tools -----------------------------------------------------------------------------------------------------------


def _build_tools(request: ChatRequest, dialect: ChatDialect) -> list[dict[str, Any]]:
    """Build the tools as functions. Where one of the `allowed_tools` is required, only those, because servers do not
    know that choice; else all, so that the beginning of the prompt stays the same: the caller refuses other calls.

    vLLM enforces the schema of a forced call only for strict functions, so `strict` is set where the request leaves it
    open.
    """
    tools = require_plain_tools(request.tools)
    choice = request.tool_choice
    if isinstance(choice, ChatAllowedTools) and choice.allowed_tools.mode == "required":
        allowed = {tool.name for tool in choice.allowed_tools.tools}
        tools = [tool for tool in tools if tool.name in allowed]
    mode = choice.allowed_tools.mode if isinstance(choice, ChatAllowedTools) else choice
    forced = mode == "required" or isinstance(mode, NamedFunction)
    strict = forced and dialect.engine == "vllm"
    built = [
        custom_to_function(tool.custom) if isinstance(tool, ChatCustomTool) else _build_function(tool, strict=strict)
        for tool in tools
    ]
    if "strict" in dialect.omitted:
        for tool in built:
            tool["function"].pop("strict", None)
    return built


def _build_function(tool: ChatFunctionTool, *, strict: bool) -> dict[str, Any]:
    fields = tool.model_dump(exclude_none=True)
    if strict and tool.function.strict is None and tool.function.parameters is not None:
        fields["function"]["strict"] = True
    return fields


def _build_format(response_format: ResponseFormat, dialect: ChatDialect) -> dict[str, Any]:
    fields = response_format.model_dump(by_alias=True, exclude_none=True)
    if "strict" in dialect.omitted and "json_schema" in fields:
        fields["json_schema"].pop("strict", None)
    return fields


def _build_tool_options(request: ChatRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if not request.tools and choice in (None, "auto", "none"):
        return {}
    options: dict[str, Any] = {}
    if isinstance(choice, ChatAllowedTools):
        options["tool_choice"] = choice.allowed_tools.mode
    elif isinstance(choice, str):
        options["tool_choice"] = choice
    elif choice is not None:
        options["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if request.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = request.parallel_tool_calls
    return options


def _build_guidance(request: ChatRequest) -> dict[str, Any]:
    """Return `structured_outputs` for the older names. Raises InvalidRequest where both are there."""
    if GUIDED_FIELDS.keys().isdisjoint(request.model_fields_set):
        return {}
    names = [name for name in GUIDED_FIELDS if getattr(request, name) is not None]
    if not names:
        return {}
    if request.structured_outputs is not None:
        message = f"Give either 'structured_outputs' or '{names[0]}', which is its older name."
        raise InvalidRequest(message, param=names[0], code="mutually_exclusive_parameters")
    return {"structured_outputs": {GUIDED_FIELDS[name]: getattr(request, name) for name in names}}


def body_to_json(value: Any) -> bytes:
    """Return a request value as JSON; its texts may contain anything."""
    try:
        return value_to_kept_json(value)
    except orjson.JSONEncodeError:
        # Lone surrogates and integers of more than 64 bits are legal in a request, but orjson refuses them.
        text = json.dumps(value, ensure_ascii=False, default=lambda fragment: json.loads(orjson.dumps(fragment)))
        return repair_surrogates(text).encode()
