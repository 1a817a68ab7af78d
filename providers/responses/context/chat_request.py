"""A Responses request -> the first ChatRequest that answers it: checks, configuration updates, tools and options."""

from typing import Any, Final

from apis.chat import ChatJsonSchemaFormat, ChatRequest, Message, ResponseFormat, Sampling, refuse_unsafe_engine_options
from apis.errors import InvalidRequest
from apis.responses import CreateResponse, ReasoningOptions, TextOptions
from apis.wire.items import ConfigurationUpdate
from apis.wire.text_format import JsonObjectFormat, JsonSchema
from providers.common.grammars.schemas import check_format, check_large_schemas
from providers.responses.events.unvalidated import build_sparse, without_unset
from providers.responses.item_index import ItemIndex
from providers.responses.tools.offered import OfferedTools

_SHARED_FIELDS: Final = frozenset(("model", "prompt_cache_key", "cache_salt", "priority", *Sampling.model_fields))
"""Fields of one name and meaning in both requests."""


def accept_request(request: CreateResponse) -> CreateResponse:
    """Return the request as it is kept while its response runs. Raises InvalidRequest, naming the field, for one that
    contradicts itself or endangers an engine."""
    refuse_unsafe_engine_options(request)
    if request.background and request.store is False:
        message = "A response with `background` is stored: leave `store` out, or set it to true."
        raise InvalidRequest(message, param="background", code="invalid_value")
    if request.background and request.is_prewarm:
        message = "A response that only prepares its input does not run in the background."
        raise InvalidRequest(message, param="prompt_cache_options.prewarm", code="invalid_value")
    if request.background_options is not None:
        _check_window(request)
    if request.conversation is not None and request.previous_response_id is not None:
        message = "Give either 'previous_response_id' or 'conversation': a response cannot follow both."
        raise InvalidRequest(message, param="conversation", code="mutually_exclusive_parameters")
    if request.input is None and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    return without_unset(request)


def _check_window(request: CreateResponse) -> None:
    """Raise InvalidRequest where a response with a completion window does not fit the rest of its request."""
    if not request.window_s:
        return
    if not request.background:
        needs = "'background': true"
    elif request.service_tier not in (None, "auto", "default"):
        needs = "the 'service_tier' default, or none"
    elif request.stream:
        needs = "'stream': false, or none"
    else:
        return
    message = f"A background response with the completion window '{request.completion_window}' needs {needs}."
    raise InvalidRequest(message, param="background_options.completion_window", code="invalid_value")


def apply_configuration_updates(request: CreateResponse, index: ItemIndex) -> CreateResponse:
    """Return the request with the newest reasoning effort and text format that items of its conversation set."""
    updates = index.of(ConfigurationUpdate)
    efforts = [item.reasoning.effort for item in updates if item.reasoning is not None]
    formats = [item.text.format for item in updates if item.text is not None]
    changes: dict[str, object] = {}
    if efforts:
        changes["reasoning"] = (request.reasoning or ReasoningOptions()).model_copy(update={"effort": efforts[-1]})
    if formats:
        changes["text"] = (request.text or TextOptions()).model_copy(update={"format": formats[-1]})
    return request.model_copy(update=changes) if changes else request


async def check_large_format(text: TextOptions) -> None:
    """Check the schema of the answer in a thread, if it is large; `build_chat`, which raises its errors, then knows the
    result."""
    if isinstance(text.format, JsonSchema):
        await check_large_schemas([(text.format.schema_, True)])


def build_chat(
    request: CreateResponse, messages: list[Message], toolbox: OfferedTools, cache_root: str = ""
) -> ChatRequest:
    """Return the chat of the first turn. Raises InvalidRequest for an empty input and for a wrong format or choice."""
    if not messages:
        raise InvalidRequest("The input holds nothing to tell a model.", param="input", code="invalid_value")
    tools = toolbox.offered_tools()
    wants_logprobs = "message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs)
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SHARED_FIELDS & request.model_fields_set}
    fields |= {
        "messages": messages,
        "cache_root": cache_root or None,
        "is_streamed": True if request.stream else None,
        "tools": tools or None,
        "tool_choice": toolbox.tool_choice(is_final=False),
        "parallel_tool_calls": toolbox.parallel_tool_calls if tools else None,
        "response_format": _build_response_format(request),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "all_reasoning": True if request.reasoning and request.reasoning.context == "all_turns" else None,
        "verbosity": request.text.verbosity if request.text else None,
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
    }
    names = frozenset([name for name, value in fields.items() if value is not None])
    return build_sparse(ChatRequest, fields, names)  # its parts are valid: those of a request, and our own


def _build_response_format(request: CreateResponse) -> ResponseFormat | None:
    text_format = request.text.format if request.text else None
    if isinstance(text_format, JsonSchema):
        check_format(text_format.schema_)
        schema = JsonSchema(
            name=text_format.name,
            schema=text_format.schema_,
            description=text_format.description,
            strict=text_format.strict,
        )
        return ChatJsonSchemaFormat(json_schema=schema)
    return JsonObjectFormat() if isinstance(text_format, JsonObjectFormat) else None
