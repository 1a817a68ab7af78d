"""Models built without validation equal those of the SDK's constructors, field by field and in their JSON. Requests
without their unset fields read as before, in a third of the memory."""

import sys
from typing import Any

import pytest
from openai.types.responses import (
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from apis.chat import ChatRequest, Message
from apis.responses import CreateResponse
from apis.wire.base import sdk_model_to_json
from providers.responses.events.unvalidated import unvalidated, without_unset

TEXT: dict[str, Any] = {"type": "output_text", "text": "héllo", "annotations": [], "logprobs": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (ResponseOutputText, TEXT),
    (ResponseOutputMessage, {**MESSAGE, "content": [ResponseOutputText.model_validate(TEXT)]}),
    (
        ResponseOutputItemDoneEvent,
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": ResponseOutputMessage.model_validate({**MESSAGE, "content": []}),
            "sequence_number": 3,
        },
    ),
    (
        ResponseTextDoneEvent,
        {
            "type": "response.output_text.done",
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "text": "héllo",
            "logprobs": [],
            "sequence_number": 3,
        },
    ),
    (
        ResponseUsage,
        {
            "input_tokens": 1,
            "input_tokens_details": InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            "output_tokens": 2,
            "output_tokens_details": OutputTokensDetails(reasoning_tokens=1),
            "total_tokens": 3,
        },
    ),
]


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_model_equals_the_constructors(kind: Any, fields: dict[str, Any]) -> None:
    built, constructed = unvalidated(kind)(**fields), kind(**fields)
    assert built == constructed
    assert built.model_fields_set == constructed.model_fields_set
    assert sdk_model_to_json(built) == sdk_model_to_json(constructed)
    assert built.model_copy(update={"id": "x"}) == constructed.model_copy(update={"id": "x"})


def test_a_field_without_a_value_has_its_default_and_can_be_set() -> None:
    message = unvalidated(ResponseOutputMessage)(**MESSAGE, content=[])  # pyright: ignore[reportArgumentType]  # as the strings are literals
    assert message.phase is None
    assert b"phase" not in sdk_model_to_json(message)
    message.phase = "commentary"
    assert b'"phase":"commentary"' in sdk_model_to_json(message)


def test_every_field_of_a_request_without_its_unset_ones_reads_as_before() -> None:
    request = CreateResponse.model_validate({"model": "m", "input": "Hi", "temperature": 0.5, "user": None})
    sparse = without_unset(request)
    assert isinstance(sparse, CreateResponse)
    assert {name: getattr(sparse, name) for name in CreateResponse.model_fields} == dict(request)
    assert sparse.model_fields_set == request.model_fields_set
    assert sparse.model_dump_json(exclude_none=True) == request.model_dump_json(exclude_none=True)
    assert vars(sparse) == {"temperature": 0.5, "model": "m", "input": "Hi", "user": None}


def test_a_field_whose_default_is_made_for_each_request_is_kept() -> None:
    request = CreateResponse.model_validate({"prompt": {"id": "greeting"}})
    assert without_unset(request).model == request.model


def test_a_copy_can_set_a_field_and_leaves_the_original_alone() -> None:
    chat = without_unset(ChatRequest.model_validate({"model": "m", "messages": [Message(role="user", content="Hi")]}))
    changed = chat.model_copy(update={"tool_choice": "auto"})
    assert (changed.tool_choice, changed.seed, chat.tool_choice) == ("auto", None, None)
    assert "tool_choice" in changed.model_fields_set
    assert chat.model_fields_set == {"model", "messages"}


def test_the_fields_take_a_fraction_of_the_memory_and_their_names_are_shared() -> None:
    requests = [CreateResponse.model_validate({"model": "m", "input": text}) for text in ("one", "two")]
    first, second = map(without_unset, requests)
    assert sys.getsizeof(vars(first)) * 5 < sys.getsizeof(vars(requests[0]))
    assert first.model_fields_set is second.model_fields_set


def test_a_request_that_has_been_through_it_is_of_the_same_class() -> None:
    sparse = without_unset(CreateResponse.model_validate({"model": "m", "input": "Hi"}))
    again = without_unset(sparse.model_copy(update={"seed": 1}))
    assert type(again) is type(sparse)
    assert (again.seed, again.top_p, again.input) == (1, None, "Hi")
