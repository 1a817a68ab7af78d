"""A Responses request -> the chat that answers it: tools, choice, formats and sampling in chat completions' terms."""

from typing import Any, Final

from apis.chat import ChatJsonSchemaFormat, ChatRequest, Message, ResponseFormat, Sampling
from apis.errors import InvalidRequest, Unsupported
from apis.responses import UNSUPPORTED_REQUEST_FIELDS, CreateResponse
from apis.wire.text_format import JsonObjectFormat, JsonSchema
from providers.responses.tools.offered import OfferedTools
from providers.responses.tools.schemas import check_format

_SHARED_FIELDS: Final = ("model", "prompt_cache_key", "cache_salt", "priority", *Sampling.model_fields)
"""Fields that both requests have."""


def refuse_unsupported(request: CreateResponse) -> None:
    """Raise, naming the field, for what the API has and this stack does not offer."""
    for name in UNSUPPORTED_REQUEST_FIELDS:
        if getattr(request, name) is not None:
            raise Unsupported(f"'{name}' is not offered by this server.", param=name)
    if request.background and request.store is False:
        message = "A response with `background` is stored: leave `store` out, or set it to true."
        raise InvalidRequest(message, param="background", code="invalid_value")
    if request.conversation is not None and request.previous_response_id is not None:
        message = "Give either 'previous_response_id' or 'conversation': a response cannot follow both."
        raise InvalidRequest(message, param="conversation", code="mutually_exclusive_parameters")
    if request.input is None and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")


def build_chat(request: CreateResponse, messages: list[Message], toolbox: OfferedTools) -> ChatRequest:
    """The first turn's chat."""
    if not messages:
        raise InvalidRequest("The input holds nothing to tell a model.", param="input", code="invalid_value")
    tools = toolbox.offered_tools()
    wants_logprobs = "message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs)
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SHARED_FIELDS}
    fields |= {
        "messages": messages,
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
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def _build_response_format(request: CreateResponse) -> ResponseFormat | None:
    form = request.text.format if request.text else None
    if isinstance(form, JsonSchema):
        check_format(form.schema_)
        schema = JsonSchema(name=form.name, schema=form.schema_, description=form.description, strict=form.strict)
        return ChatJsonSchemaFormat(json_schema=schema)
    return JsonObjectFormat() if isinstance(form, JsonObjectFormat) else None
