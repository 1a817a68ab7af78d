"""Functions and custom tools with `async`: the model goes on, and the output comes with a later request."""

from itertools import pairwise
from typing import Any

import pytest

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, plain, refusal, stream
from tests.support.servers.serving import scripted, serving

Json = dict[str, Any]
SLOW: Json = function("research", **{"async": True})
NOW: Json = function("now")
CALLED: Script = [call("research", '{"topic": "cats"}', id="c1")]
GOES_ON: Script = [{"text": "Meanwhile: hello."}]
DONE: Script = [{"text": "Done."}]
LATE = "[The output of the call c1 of research, which ran meanwhile.]"


def output(call_id: str = "c1", text: Any = "Cats purr.") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


async def test_the_model_goes_on_after_an_async_call_in_the_same_response() -> None:
    async with serving(scripted(CALLED, GOES_ON)) as served:
        events = await stream(served, tools=[SLOW, NOW])
        sent_messages = messages(served)
    response = events[-1].response
    assert (response.status, kinds(response)) == ("completed", ["function_call", "message"])
    assert response.output[0].to_dict()["async"] is True
    assert response.output_text == "Meanwhile: hello."
    assert [message["role"] for message in sent_messages] == ["user", "assistant", "tool"]
    assert sent_messages[1]["tool_calls"][0]["id"] == sent_messages[2]["tool_call_id"] == "c1"
    assert "comes later" in sent_messages[2]["content"]


@pytest.mark.parametrize("how", ["chained", "sent back"])
async def test_the_output_comes_with_a_later_request(how: str) -> None:
    async with serving(scripted(CALLED, GOES_ON, DONE, DONE)) as served:
        first = await create(served, tools=[SLOW])
        ask: Json = {"role": "user", "content": "And?"}
        if how == "chained":
            second = await create(served, tools=[SLOW], input=[ask], previous_response_id=first.id)
            third = await create(served, tools=[SLOW], input=[output()], previous_response_id=second.id)
        else:
            earlier: list[Any] = [{"role": "user", "content": "hi"}, *first.output, ask]
            second = await create(served, tools=[SLOW], input=earlier)
            third = await create(served, tools=[SLOW], input=[*earlier, *second.output, output()])
        chats = [plain(chat.messages) for chat in chat_requests(served)]
    assert (second.output_text, third.output_text) == ("Done.", "Done.")
    assert [message["role"] for message in chats[-1]] == [
        *("user", "assistant", "tool", "assistant", "user", "assistant", "user"),
    ]
    assert chats[-1][-1]["content"] == f"{LATE}\nCats purr."
    for shorter, longer in pairwise(chats):
        assert longer[: len(shorter)] == shorter, "prompts grow at their end only"


async def test_an_output_that_comes_at_once_is_an_output_like_any_other() -> None:
    called: Json = {"type": "function_call", "call_id": "c1", "name": "research", "arguments": "{}", "async": True}
    async with serving(scripted(DONE)) as served:
        await create(served, tools=[SLOW], input=[{"role": "user", "content": "hi"}, called, output()])
        sent_messages = messages(served)
    assert [message["role"] for message in sent_messages] == ["user", "assistant", "tool"]
    assert sent_messages[-1]["content"] == "Cats purr."


async def test_a_call_that_is_not_async_ends_the_response_as_ever() -> None:
    both: Script = [{"calls": [call("research", "{}", id="c1"), call("now", "{}", id="c2")]}]
    async with serving(scripted(both, DONE, DONE)) as served:
        first = await create(served, tools=[SLOW, NOW])
        assert kinds(first) == ["function_call", "function_call"]
        assert [item.to_dict().get("async") for item in first.output] == [True, None]
        error = await refusal(served, tools=[SLOW, NOW], input="And?", previous_response_id=first.id)
        assert "c2" in error["message"]
        second = await create(served, tools=[SLOW, NOW], input=[output("c2", "noon")], previous_response_id=first.id)
        assert second.output_text == "Done."
        sent_messages = messages(served)
    assert {
        message["tool_call_id"]: message["content"][:8] for message in sent_messages if message["role"] == "tool"
    } == {
        "c1": "The call",
        "c2": "noon",
    }


async def test_a_second_output_and_one_without_a_call_are_refused() -> None:
    async with serving(scripted(CALLED, GOES_ON, DONE)) as served:
        first = await create(served, tools=[SLOW])
        second = await create(served, tools=[SLOW], input=[output()], previous_response_id=first.id)
        again = await refusal(served, tools=[SLOW], input=[output(text="Dogs bark.")], previous_response_id=second.id)
        assert "has an output already" in again["message"]
        unknown = await refusal(served, tools=[SLOW], input=[output("c9")], previous_response_id=first.id)
        assert "c9" in unknown["message"]


async def test_calls_that_never_end_are_bounded() -> None:
    async with serving(scripted(CALLED)) as served:
        response = await create(served, tools=[SLOW], max_tool_calls=3)
    assert kinds(response) == ["function_call"] * 3
    assert response.status == "completed"


async def test_a_custom_tool_may_be_async_and_its_output_may_hold_an_image() -> None:
    tool: Json = {"type": "custom", "name": "draw", "async": True}
    called: Script = [{**call("draw", "a cat", id="c1"), "custom": True}]
    picture = {"type": "input_text", "text": "a picture"}
    async with serving(scripted(called, GOES_ON, DONE)) as served:
        first = await create(served, tools=[tool])
        assert kinds(first) == ["custom_tool_call", "message"]
        late: Json = {"type": "custom_tool_call_output", "call_id": "c1", "output": [picture, picture]}
        await create(served, tools=[tool], input=[late], previous_response_id=first.id)
        sent_messages = messages(served)[-1]
    assert sent_messages["role"] == "user"
    assert [part["text"] for part in sent_messages["content"]] == [
        LATE.replace("research", "draw"),
        "a picture",
        "a picture",
    ]


async def test_a_required_call_is_made_by_an_async_one() -> None:
    async with serving(scripted(CALLED, GOES_ON)) as served:
        response = await create(served, tools=[SLOW], tool_choice="required")
    assert kinds(response) == ["function_call", "message"]


@pytest.mark.parametrize("how", ["chained", "sent back"])
async def test_the_output_of_a_call_that_was_compacted_away_is_a_message(how: str) -> None:
    summary: Script = [{"text": "They want to know about cats."}]
    async with serving(scripted(CALLED, GOES_ON, summary, DONE, DONE)) as served:
        first = await create(served, tools=[SLOW])
        history: list[Any] = [{"role": "user", "content": "hi"}, *first.output]
        compacted = await served.client.responses.compact(model="scripted", input=history)
        late = output()
        if how == "chained":
            trigger: Any = {"type": "compaction_trigger"}
            second = await create(served, tools=[SLOW], input=[trigger], previous_response_id=first.id)
            third = await create(served, tools=[SLOW], input=[late], previous_response_id=second.id)
            error = await refusal(served, tools=[SLOW], input=[output(text="?")], previous_response_id=third.id)
        else:
            kept = [bare(item) for item in compacted.output]
            third = await create(served, tools=[SLOW], input=[*kept, late])
            error = await refusal(served, tools=[SLOW], input=[*kept, late, output(text="?")])
        last = plain(chat_requests(served)[-1].messages)[-1]
    assert third.output_text == "Done."
    assert last["role"] == "user"
    assert last["content"].endswith(", which ran meanwhile.]\nCats purr.")
    assert last["content"].startswith("[The output of the call c1")
    assert "has an output already" in error["message"]
