"""The response object: the request's fields, echoed, and the state of the response."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from openai.types.responses import Response, ResponseError, ResponseOutputItem, ResponseUsage
from openai.types.responses.response import (
    IncompleteDetails,
    ToolUsage,
    ToolUsageImageGen,
    ToolUsageImageGenInputTokensDetails,
    ToolUsageWebSearch,
)
from openai.types.responses.response_text_config import ResponseTextConfig
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from openai.types.shared import Reasoning, ResponseFormatText
from pydantic import BaseModel, create_model

from apis.deltas import Usage
from apis.errors import StackError
from apis.responses import CreateResponse
from apis.wire.base import remember_json
from apis.wire.tool_choice import ChosenHostedTool
from providers.responses.events.unvalidated import add_extra, build_unvalidated, copy_with, unvalidated

_schema_lock: Final = threading.Lock()
_RANKED_TIERS: Final = {"flex": "flex", "fast": "priority", "priority": "priority", "ultrafast": "ultrafast"}
"""Name in a response of each tier that ranks it; `fast` and `priority` are one tier in OpenAI's API."""
_NO_IMAGES: Final = ToolUsageImageGen(
    input_tokens=0,
    input_tokens_details=ToolUsageImageGenInputTokensDetails(image_tokens=0, text_tokens=0),
    output_tokens=0,
    total_tokens=0,
)
_ECHOED_OBJECTS: Final = frozenset(
    (
        "access_programs",
        "background_options",
        "conversation",
        "image",
        "prompt",
        "prompt_cache_options",
        "reasoning",
        "text",
        "tools",
    )
)
"""Fields of a request whose echo is an object, which has to be validated."""
_ECHO_FIELDS: Final[dict[str, Any]] = {
    name: (field.annotation, field)
    for name, field in Response.model_fields.items()
    if name in _ECHOED_OBJECTS or name == "tool_choice"
}
_EchoedObjects: Final = create_model(
    "_EchoedObjects", __base__=cast("type[BaseModel]", Response.__base__), **_ECHO_FIELDS
)
"""The part of a response that has to be validated. A schema of the whole would be four times as large."""
_EchoedObjects.model_rebuild()  # else the first request would wait for it
_NO_REASONING: Final = remember_json(Reasoning(effort=None, summary=None))
_PLAIN_TEXT: Final = remember_json(ResponseTextConfig(format=ResponseFormatText(type="text"), verbosity="medium"))
_UNSET_FIELDS: Final[Mapping[str, Any]] = {name: field.default for name, field in Response.model_fields.items()}
_build_usage = unvalidated(ResponseUsage)
_build_input_details = unvalidated(InputTokensDetails)
_build_output_details = unvalidated(OutputTokensDetails)
NO_TOOL_USAGE: Final = remember_json(ToolUsage(image_gen=_NO_IMAGES, web_search=ToolUsageWebSearch(num_requests=0)))
IncompleteReason = Literal["max_output_tokens", "max_messages", "content_filter", "steered"]
"""Why a response is incomplete. `max_messages`: the model sent only invalid calls and never answered. `steered`: input
was sent to it, which the response after it reads."""
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


def begin_response(
    request: CreateResponse, response_id: str, created_at: int, status: ResponseStatus = "in_progress"
) -> Response:
    """Return a response without output, with every field set to its value or default."""
    fields: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "completed_at": None,
        "background": request.background is True,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "safety_identifier": request.safety_identifier,
        "service_tier": _RANKED_TIERS.get(request.service_tier or "", "default"),
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }
    extra = {  # which the SDK's class does not declare
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "store": request.store is not False,
    }
    if _ECHOED_OBJECTS.isdisjoint(request.model_fields_set) and isinstance(request.tool_choice, str | None):
        choice = request.tool_choice or "auto"
        fields |= {"reasoning": _NO_REASONING, "text": _PLAIN_TEXT, "tool_choice": choice, "tools": []}
    else:
        echo = _EchoedObjects.model_validate(_echo_objects(request))
        fields |= {name: getattr(echo, name) for name in echo.model_fields_set}
    response = build_unvalidated(Response, {**_UNSET_FIELDS, **fields}, {*fields})
    add_extra(response, extra)
    return response


def _echo_objects(request: CreateResponse) -> dict[str, Any]:
    """Return the fields of the response that are objects, for validation."""
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    reasoning = request.reasoning
    return {
        **({"conversation": {"id": request.conversation_id}} if request.conversation_id else {}),
        **_echo_options(request),
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
            **({"context": reasoning.context} if reasoning and reasoning.context else {}),
            **({"mode": reasoning.mode} if reasoning and reasoning.mode else {}),
        },
        "text": {"format": _echo_format(text.get("format")), "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": _echo_choice(request),
        "tools": [tool.echo() for tool in request.tools or ()],
    }


def end_response(
    response: Response,
    status: ResponseStatus,
    output: Sequence[ResponseOutputItem],
    usage: Usage,
    *,
    reason: IncompleteReason | None = None,
    error: ResponseError | None = None,
    tool_usage: ToolUsage = NO_TOOL_USAGE,
) -> Response:
    """Return the response in its final state; it has its usage in every state."""
    return copy_with(
        response,
        {
            "status": status,
            "output": [*output],
            "usage": usage_to_wire(usage),
            "tool_usage": tool_usage,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": IncompleteDetails(reason=reason) if reason else None,
            "error": error,
        },
    )


def response_from_json(fields: Mapping[str, Any]) -> Response:
    """Return a response from its own JSON. Raises pydantic's ValidationError. Its error is not validated: the API sends
    codes that the SDK's type does not list."""
    error = fields.get("error")
    if not Response.__pydantic_complete__:
        with _schema_lock:  # another thread may build it, too
            Response.model_rebuild()
    response = Response.model_validate({**fields, "error": None})
    return response if error is None else response.model_copy(update={"error": ResponseError.model_construct(**error)})


def usage_to_wire(usage: Usage) -> ResponseUsage:
    """Return usage in the API's form."""
    return _build_usage(
        input_tokens=usage.input_tokens,
        input_tokens_details=_build_input_details(cached_tokens=usage.cached_tokens, cache_write_tokens=0),
        output_tokens=usage.output_tokens,
        output_tokens_details=_build_output_details(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.input_tokens + usage.output_tokens,
    )


def _echo_options(request: CreateResponse) -> dict[str, Any]:
    """Return the options that the response has only where the request has them."""
    options: dict[str, Any] = {}
    if request.prompt is not None:
        options["prompt"] = request.prompt.model_dump(exclude_none=True)
    cache, programs, image = request.prompt_cache_options, request.access_programs, request.image
    if cache is not None:
        options["prompt_cache_options"] = {"mode": cache.mode or "implicit", "ttl": cache.ttl or "30m"}
        if cache.comparison_response_id is not None:
            options["prompt_cache_options"]["comparison_response_id"] = cache.comparison_response_id
    if programs is not None and programs.cyber is not None:
        options["access_programs"] = {"cyber": programs.cyber}
    if request.background and request.background_options is not None:
        options["background_options"] = {"completion_window": request.completion_window}
    if image is not None:
        options["image"] = {"context_compression": "disabled"}
    return options


def _echo_format(text_format: dict[str, Any] | None) -> dict[str, Any]:
    if text_format is None:
        return {"type": "text"}
    if text_format["type"] != "json_schema":
        return text_format
    # always present, for clients that validate the echo against a schema
    return {"description": None, **text_format, "strict": bool(text_format.get("strict"))}


def _echo_choice(request: CreateResponse) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return choice.echo() if isinstance(choice, ChosenHostedTool) else choice.model_dump(exclude_none=True)


def error_to_failure(error: StackError) -> ResponseError:
    """Return the `error` of a failed response; its code is one of `FailureCode`.

    A stream has no Retry-After header: agents parse the seconds from this exact text.
    """
    wait = "" if error.retry_after_s is None else f" Please try again in {error.retry_after_s:g}s."
    return ResponseError.model_construct(code=error.failure_code, message=f"{error.message[:1024]}{wait}")
