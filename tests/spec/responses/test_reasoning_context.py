"""Which turns' reasoning a model is shown again: `reasoning.context`."""

from typing import Any

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import chat_requests, create, messages, refusal, stream
from tests.support.servers.engine_answers import doors
from tests.support.servers.serving import scripted, serving
from tests.support.servers.upstream_server import stream as upstream_stream
from tests.support.servers.upstream_server import text_chunks

TURNS: list[Script] = [[{"reasoning": "one"}, {"text": "a"}], [{"reasoning": "two"}, call("get", id="c1")]]
DONE: Script = [{"text": "Done."}]


async def ask(**reasoning: Any) -> tuple[list[str | None], Any]:
    """The thoughts that the model was shown in the middle of its second turn, and that response."""
    fields: dict[str, Any] = {"tools": [function()], "reasoning": reasoning}
    async with serving(scripted(*TURNS, DONE)) as served:
        first = await create(served, input="one", **fields)
        second = await create(served, input="two", previous_response_id=first.id, **fields)
        output = [{"type": "function_call_output", "call_id": "c1", "output": "It rains."}]
        events = await stream(served, input=output, previous_response_id=second.id, **fields)
        return [each.get("reasoning") for each in messages(served) if each["role"] == "assistant"], events[-1].response


async def test_a_model_is_shown_what_it_was_made_for() -> None:
    for reasoning in ({}, {"context": "auto"}):
        thoughts, response = await ask(**reasoning)
        assert thoughts == ["one", "two"]
        assert response.reasoning.context == reasoning.get("context")


async def test_earlier_turns_reasoning_can_be_left_out() -> None:
    thoughts, response = await ask(context="current_turn")
    assert thoughts == [None, "two"]
    assert response.reasoning.context == "current_turn"
    assert response.input_transformations is None


async def test_the_response_says_which_reasoning_was_left_out() -> None:
    said: list[Any] = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "one"}]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
    ]
    async with serving(scripted(DONE)) as served:
        response = await create(served, input=said, reasoning={"context": "current_turn"})
        assert [each.get("reasoning") for each in messages(served)] == [None] * 3
    assert [each.model_dump() for each in response.input_transformations] == [
        {"id": "rs_1", "action": "removed", "reason": "turn_boundary", "type": "reasoning"}
    ]


async def test_all_turns_reasoning_is_asked_for_of_the_model() -> None:
    thoughts, response = await ask(context="all_turns")
    assert thoughts == ["one", "two"]
    assert response.reasoning.context == "all_turns"
    async with serving() as served:
        await create(served, reasoning={"context": "all_turns"})
        assert chat_requests(served)[-1].all_reasoning is True


async def test_no_other_context_is_known() -> None:
    async with serving() as served:
        assert (await refusal(served, reasoning={"context": "some"}))["param"] == "reasoning.context"


async def test_a_chat_server_is_asked_for_all_turns_as_well_as_it_can_be() -> None:
    """The messages hold all reasoning, and the echo says what is certain: its template shows the current turn."""
    said: list[Any] = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "thought"}]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
    ]
    async with doors() as stack:
        stack.answer = upstream_stream(text_chunks("Done."))
        create: Any = stack.client.responses.create
        for streamed in (False, True):
            response = await create(
                model="fake-model", input=said, reasoning={"context": "all_turns"}, stream=streamed, store=False
            )
            if streamed:
                response = [event async for event in response][-1].response
            assert response.status == "completed"
            assert response.reasoning.context == "current_turn"
            assert stack.upstream.chats[-1].json["messages"][1]["reasoning"] == "thought"
