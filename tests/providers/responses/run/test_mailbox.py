"""The input that waits for a response: its bounds, and what a client owes before it is read."""

from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from apis.errors import SteeringRefused
from apis.responses import CreateResponse, SteerResponse
from providers.responses.events.ids import response_id_of
from providers.responses.events.response_object import begin_response
from providers.responses.run.mailbox import MAX_INPUT_BYTES, MAX_INPUTS, Mailbox, list_required_input

OUTPUT: Any = TypeAdapter(Response.__annotations__["output"])
CALLS: list[dict[str, Any]] = [
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "f", "arguments": "{}", "async": True},
    {"type": "custom_tool_call", "id": "ctc_3", "call_id": "c3", "name": "f", "input": "x"},
    {
        "type": "apply_patch_call",
        "id": "apc_4",
        "call_id": "c4",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "x"},
    },
    {
        "type": "tool_search_call",
        "id": "tsc_5",
        "call_id": "c5",
        "execution": "client",
        "arguments": {},
        "status": "completed",
    },
    {"type": "mcp_approval_request", "id": "mcpr_6", "name": "f", "arguments": "{}", "server_label": "s"},
    {"type": "web_search_call", "id": "ws_7", "status": "completed", "action": {"type": "search", "query": "x"}},
]
OWED: list[dict[str, Any]] = [
    {"type": "function_call_output", "call_id": "c1", "name": "f"},
    {"type": "custom_tool_call_output", "call_id": "c3"},
    {"type": "apply_patch_call_output", "call_id": "c4"},
    {"type": "tool_search_output", "call_id": "c5", "execution": "client"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_6"},
]


def request_of(text: str) -> SteerResponse:
    return SteerResponse(previous_response_id="resp_1", input=text)


def test_a_mailbox_takes_so_many_inputs_and_bytes() -> None:
    mailbox = Mailbox()
    steers = [mailbox.add(request_of(str(number))) for number in range(MAX_INPUTS)]
    assert {response_id_of(steer.id) for steer in steers} == {mailbox.successor_id}
    assert len({steer.id for steer in steers}) == MAX_INPUTS
    full = Mailbox()
    full.add(request_of("x" * (MAX_INPUT_BYTES // 2)))
    for refusing, text in ((mailbox, "x"), (full, "x" * (MAX_INPUT_BYTES // 2))):
        with pytest.raises(SteeringRefused) as refused:
            refusing.add(request_of(text))
        assert refused.value.code == "too_many_pending_steers"


def test_a_client_owes_the_outputs_of_its_calls_and_its_approvals() -> None:
    initial = begin_response(CreateResponse.model_validate({"model": "m", "input": "hi"}), "resp_1", 0)
    response = initial.model_copy(update={"status": "completed", "output": OUTPUT.validate_python(CALLS)})
    assert list_required_input(response) == OWED
    assert list_required_input(response, frozenset(("c1", "c3"))) == OWED[2:]
    assert list_required_input(response.model_copy(update={"status": "incomplete"})) == []
