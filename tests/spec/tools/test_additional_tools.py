"""Tools that come in the input, as agents send them that keep one list of tools through a conversation."""

from typing import Any

import pytest

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.conversations import conversations
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
DONE: Script = [{"text": "Done."}]
USER: Json = {"role": "user", "content": "hi"}
EXEC: Json = {"type": "custom", "name": "exec", "description": "Run JavaScript."}
REGISTRY: list[Json] = [
    {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC, function("wait")]},
    {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [function("list")]},
    {"type": "namespace", "name": "empty", "tools": []},
]


def added(*tools: Json, **fields: Any) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools], **fields}


def offered(served: Served) -> list[str]:
    """The names of the tools that the model was offered last."""
    return [tool.name for tool in chat_requests(served)[-1].tools or ()]


@pytest.mark.parametrize("streamed", [True, False])
async def test_they_are_called_by_their_own_names(streamed: bool) -> None:
    turns: list[Script] = [[call("exec", "text(1)", id="c1", custom=True)], [call("agents__list", "{}", id="c2")], DONE]
    async with serving(scripted(*turns)) as served:
        fields: Json = {"input": [added(*REGISTRY, id="at_1"), USER], "tools": [], "store": False}
        first = (await stream(served, **fields))[-1].response if streamed else await create(served, **fields)
        (run,) = first.output
        assert (run.type, run.name, run.namespace, run.input) == ("custom_tool_call", "exec", "functions", "text(1)")
        assert offered(served) == ["exec", "wait", "agents__list"]
        output: Json = {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"}
        second = await create(served, **{**fields, "input": [*fields["input"], bare(run), output]})
        (listed,) = second.output
        assert (listed.type, listed.name, listed.namespace) == ("function_call", "list", "agents")
        (sent_call,) = messages(served)[1]["tool_calls"]
        assert sent_call["custom"]["name"] == "exec", "the call is told under the name that is offered"


async def test_they_stay_along_a_chain_and_in_a_conversation_and_are_listed_as_they_came() -> None:
    async with serving(scripted(*[DONE] * 5)) as served:
        first = await create(served, input=[added(*REGISTRY), USER])
        assert first.tools == [], "the response tells of its own tools"
        second = await create(served, input="And?", previous_response_id=first.id)
        assert offered(served) == ["exec", "wait", "agents__list"]
        await create(served, input="And?", previous_response_id=second.id, tools=[function("wait"), function("more")])
        assert sorted(offered(served)) == ["agents__list", "exec", "more", "wait"]
        item = (await responses(served).input_items.list(first.id, order="asc")).data[0]
        assert (item.type, item.role, item.id[:3]) == ("additional_tools", "developer", "at_")
        assert [tool.name for tool in item.tools] == ["functions", "agents", "empty"]
        conversation = await conversations(served).create(items=[added(function("kept"))])
        await create(served, input="hi", conversation=conversation.id)
        assert offered(served) == ["kept"]
        await create(served, input=[added({**function("kept"), "description": "New."})], conversation=conversation.id)
        assert [tool.model_dump()["function"]["description"] for tool in chat_requests(served)[-1].tools or ()] == [
            "New."
        ]


async def test_a_choice_may_name_one() -> None:
    async with serving(scripted([call("wait", "{}")])) as served:
        choice = {"type": "function", "name": "wait"}
        response = await create(served, input=[added(*REGISTRY), USER], tool_choice=choice)
        assert response.output[0].name == "wait"
        assert chat_requests(served)[-1].model_dump()["tool_choice"]["function"] == {"name": "wait"}
        choice["name"] = "gone"
        assert (await refusal(served, input=[added(*REGISTRY), USER], tool_choice=choice))["param"] == "tool_choice"


REFUSED: dict[str, tuple[Json, str]] = {
    "what the server does not have": (added({"type": "web_search"}), "input"),
    "what nobody has": (added({"type": "teleport"}), "input[0].tools[0].type"),
    "no tools": ({"type": "additional_tools", "role": "developer"}, "input[0].tools"),
    "another role": (added(role="user"), "input[0].role"),
    "a schema that is none": (added({**function("f"), "parameters": {"type": "nothing"}}), "input.parameters"),
}


@pytest.mark.parametrize("item", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_offered_is_refused_naming_the_place(item: tuple[Json, str]) -> None:
    async with serving(scripted(DONE)) as served:
        error = await refusal(served, input=[item[0], USER])
    assert (error["type"], error["param"]) == ("invalid_request_error", item[1])
