"""Conversations that are compacted when their client says so: the way Codex asks for it."""

from typing import Any

import pytest
from openai import BadRequestError

from tests.spec.responses.test_compaction import ANSWER, SUMMED, TALK, said
from tests.support.sdk.answer_shapes import function
from tests.support.sdk.conversations import conversations
from tests.support.sdk.requests import bare, chat_requests, create, refusal, responses, stream
from tests.support.servers.serving import scripted, serving

Json = dict[str, Any]
TRIGGER: Json = {"type": "compaction_trigger"}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_trigger_at_the_end_compacts_instead_of_an_answer(streamed: bool) -> None:
    async with serving(scripted(SUMMED, ANSWER)) as served:
        fields: Json = {"input": [*TALK, TRIGGER], "tools": [function("get")], "store": False}
        events = await stream(served, **fields) if streamed else []
        response = events[-1].response if streamed else await create(served, **fields)
        assert response.status == "completed"
        (item,) = response.output
        assert (item.type, item.id[:4]) == ("compaction", "cmp_")
        assert response.usage.output_tokens == 3
        assert chat_requests(served)[-1].tools is None
        client_keeps = [each for each in TALK if each.get("role") in ("developer", "user")]
        await create(served, input=[*client_keeps, bare(item), {"role": "user", "content": "Why?"}])
        sent_messages = said(served)
    assert sent_messages == [
        ("developer", "Be brief."),
        ("user", "Who is that?"),
        ("user", "And where?"),
        ("user", "They met Ada in Rome."),
        ("user", "Why?"),
    ]
    if streamed:
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[2:] == ["output_item.added", "compaction.compacting", "output_item.done", "completed"]


async def test_a_chain_and_a_conversation_go_on_after_a_triggered_compaction() -> None:
    async with serving(scripted(ANSWER, SUMMED, ANSWER, SUMMED, ANSWER)) as served:
        first = await create(served, input="one")
        second = await create(served, input=[TRIGGER], previous_response_id=first.id)
        await create(served, input="two", previous_response_id=second.id)
        expected = [("user", "one"), ("user", "They met Ada in Rome."), ("user", "two")]
        assert said(served) == expected
        assert (await responses(served).input_items.list(second.id)).data == [], "the trigger is no item of it"
        conversation = await conversations(served).create(items=[{"role": "user", "content": "one"}])
        await create(served, input=[TRIGGER], conversation=conversation.id)
        await create(served, input="two", conversation=conversation.id)
        assert said(served) == expected


async def test_a_trigger_is_the_last_item_of_a_response_and_has_something_to_compact() -> None:
    async with serving(scripted(ANSWER)) as served:
        for wrong in ([TRIGGER, *TALK], [*TALK, TRIGGER, TRIGGER]):
            error = await refusal(served, input=wrong)
            assert (error["param"], "final input item" in error["message"]) == (
                f"input[{wrong.index(TRIGGER)}]",
                True,
            )
        assert (await refusal(served, input=[TRIGGER]))["param"] == "input"
        with pytest.raises(BadRequestError, match="final input item"):
            await conversations(served).create(items=[TRIGGER])
