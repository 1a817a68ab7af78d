"""The response object: complete from the first event on, an echo of the request, and right about its end."""

from typing import Any

import pytest
from openai.types.responses import ResponseError

from apis.deltas import Usage
from apis.errors import RateLimited
from apis.responses import CreateResponse
from providers.responses.events.response_object import (
    ResponseStatus,
    begin_response,
    end_response,
    error_to_failure,
)

DEFAULTS: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 5,
    "status": "in_progress",
    "completed_at": None,
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
}


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {"type": "custom", "name": "c", "format": {"type": "text"}}


def begun(**fields: Any) -> dict[str, Any]:
    request = CreateResponse.model_validate({"model": "m", "input": "hi", **fields})
    return begin_response(request, "resp_1", created_at=5).model_dump(exclude_unset=True, by_alias=True)


def test_every_field_is_there_from_the_beginning() -> None:
    assert begun() == DEFAULTS


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "Be brief.", "metadata": {"a": "b"}, "previous_response_id": "resp_0", "user": "u"},
        {"temperature": 0.0, "top_p": 0.0, "presence_penalty": -1.5, "frequency_penalty": 1.5, "top_logprobs": 3},
        {"max_output_tokens": 16, "max_tool_calls": 2, "store": False, "parallel_tool_calls": False},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "truncation": "disabled"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"text": {"format": {"type": "json_object"}, "verbosity": "high"}},
        {"tool_choice": "none"},
        {
            "tools": [
                {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
            ]
        },
        {
            "tools": [{"type": "custom", "name": "c", "format": {"type": "text"}}],
            "tool_choice": {"type": "custom", "name": "c"},
        },
        {"tools": [{"type": "web_search", "search_context_size": "low", "filters": {"allowed_domains": ["a.org"]}}]},
    ],
)
def test_the_request_is_echoed(fields: dict[str, Any]) -> None:
    assert begun(**fields) == {**DEFAULTS, **fields}


def test_an_echoed_function_has_all_its_fields() -> None:
    [tool] = begun(tools=[{"type": "function", "name": "f"}])["tools"]
    assert tool == {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}


def test_a_schema_is_echoed_under_its_own_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    echoed = begun(text={"format": form})["text"]["format"]
    assert {key: value for key, value in echoed.items() if value is not None} == form


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        ("completed", None, None),
        ("incomplete", "max_output_tokens", None),
        ("incomplete", "content_filter", None),
        ("failed", None, ResponseError(code="server_error", message="x")),
        ("cancelled", None, None),
    ],
)
def test_a_final_response_has_its_reason_and_usage(
    status: ResponseStatus, reason: Any, error: ResponseError | None
) -> None:
    first = begin_response(CreateResponse.model_validate({"model": "m", "input": "hi"}), "resp_1", created_at=5)
    ended = end_response(first, status, [], Usage(10, 5, 4, 3), reason=reason, error=error)
    fields = ended.model_dump(exclude_unset=True)
    assert fields["status"] == status
    assert fields["error"] == (error.model_dump(exclude_unset=True) if error else None)
    assert fields["incomplete_details"] == ({"reason": reason} if reason else None)
    assert (fields["completed_at"] is not None) == (status == "completed")
    assert fields["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }
    assert first.status == "in_progress"


def test_usage_is_the_sum_of_all_turns() -> None:
    assert Usage(1, 2, 3, 4).plus(Usage(10, 20, 30, 40)) == Usage(11, 22, 33, 44)


def test_a_temporary_failure_says_when_to_try_again() -> None:
    failure = error_to_failure(RateLimited("The inference server is at its limit.", retry_after_s=2.5))
    assert failure.code == "rate_limit_exceeded"
    assert failure.message == "The inference server is at its limit. Please try again in 2.5s."
