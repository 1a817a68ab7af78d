"""Items that change what is asked for from there on: how much the model thinks, and the form of its text."""

from typing import Any

import pytest

from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import chat_requests, create, refusal, responses
from tests.support.servers.serving import scripted, serving

Json = dict[str, Any]
DONE: Script = [{"text": "Done."}]
USER: Json = {"role": "user", "content": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM: Json = {"type": "json_schema", "name": "form", "schema": SCHEMA, "strict": False}


def update(**fields: Any) -> Json:
    return {"type": "configuration_update", **fields}


async def test_the_last_one_holds_from_there_on_along_a_chain_too() -> None:
    effort = [update(reasoning={"effort": level}) for level in ("low", "high")]
    async with serving(scripted(*[DONE] * 4)) as served:
        first = await create(served, input=[USER, effort[0], USER, effort[1], USER], reasoning={"effort": "medium"})
        assert chat_requests(served)[-1].reasoning_effort == "high"
        assert first.reasoning.effort == "high"
        second = await create(served, input=[update(text={"format": FORM}), USER], previous_response_id=first.id)
        chat = chat_requests(served)[-1]
        assert (chat.reasoning_effort, chat.response_format is not None) == ("high", True)
        assert second.text.format.name == "form"
        plain = update(text={"format": {"type": "text"}}, reasoning={"effort": None})
        await create(served, input=[plain, USER], previous_response_id=second.id, text={"verbosity": "low"})
        chat = chat_requests(served)[-1]
        assert (chat.reasoning_effort, chat.response_format, chat.verbosity) == (None, None, "low")
        item = (await responses(served).input_items.list(first.id, order="asc")).data[1]
        assert (item.type, item.reasoning.effort, item.id[:3]) == ("configuration_update", "low", "cu_")
        assert [message.role for message in chat.messages] == ["user"] * 3 + ["assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {}}, "text.format"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_naming_the_place(fields: Json, place: str) -> None:
    async with serving(scripted(DONE)) as served:
        error = await refusal(served, input=[USER, update(**fields)])
    assert error["param"] == f"input[1].{place}"
