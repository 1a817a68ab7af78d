"""Requests without their unset fields: they read as before, in a third of the memory."""

import sys

from apis.chat import ChatRequest, Message
from apis.responses import CreateResponse
from providers.responses.context.sparse_request import without_unset


def test_every_field_reads_as_before() -> None:
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
