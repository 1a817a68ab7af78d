"""Files that the code interpreter made, named in the answer: each mention is an annotation that leads to the file."""

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import bare, create, responses, stream
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Json = dict[str, Any]
TOOL: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
WRITES: Script = [
    call("python", json.dumps({"code": "open('a.txt', 'w').write('one'); open('b c.txt', 'w').write('')"}))
]
LINK = "sandbox:/mnt/data/a.txt"
ANSWER: Script = [
    {
        "text": [
            "Hé: [a](sand",
            "box:/mnt/da",
            "ta/a.txt), again ",
            f"{LINK}. Not {LINK}.bak",
            ", [b](",
            "sandbox:/mnt/data/b%20c.txt)",
        ]
    }
]
TEXT = f"Hé: [a]({LINK}), again {LINK}. Not {LINK}.bak, [b](sandbox:/mnt/data/b%20c.txt)"


@asynccontextmanager
async def interpreting(*turns: Script) -> AsyncGenerator[Served]:
    inference = {"provider": "scripted", "turns": [*turns]}
    async with serving(inference, tool_runtime={"provider": "python", "timeout_s": 5}) as served:
        yield served


async def test_each_mention_is_cited_with_its_place_and_leads_to_the_file() -> None:
    async with interpreting(WRITES, ANSWER) as served:
        response = await create(served, tools=[TOOL])
        item, message = response.output
        first, second, third = message.content[0].annotations
        files = served.client.containers.files
        content = await files.content.retrieve(first.file_id, container_id=first.container_id)
        assert content.content == b"one"
        assert bare(await responses(served).retrieve(response.id)) == bare(response)
    assert message.content[0].text == TEXT
    assert {each.type for each in (first, second, third)} == {"container_file_citation"}
    assert {each.container_id for each in (first, second, third)} == {item.container_id}
    assert [each.filename for each in (first, second, third)] == ["a.txt", "a.txt", "b c.txt"]
    assert (first.file_id, TEXT[first.start_index : first.end_index]) == (second.file_id, LINK)
    assert TEXT[second.start_index : second.end_index] == LINK
    assert second.start_index == TEXT.index(LINK, first.end_index)
    assert TEXT[third.start_index : third.end_index] == "sandbox:/mnt/data/b%20c.txt"


async def test_an_annotation_follows_its_text_at_once() -> None:
    async with interpreting(WRITES, ANSWER) as served:
        events = await stream(served, tools=[TOOL])
    text = ""
    numbers: list[int] = []
    for event in events:
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.output_text.annotation.added":
            annotation = bare(event)["annotation"]
            assert annotation["end_index"] == len(text)
            numbers.append(event.annotation_index)
    assert (text, numbers) == (TEXT, [0, 1, 2])
    (done,) = (event for event in events if event.type == "response.content_part.done")
    assert len(done.part.annotations) == 3


@pytest.mark.parametrize("how", ["chained", "sent back, nothing stored"])
async def test_a_file_of_an_earlier_turn_is_cited_too(how: str) -> None:
    answer: Script = [{"text": f"It is still at {LINK}."}]
    async with interpreting(WRITES, [{"text": "Done."}], answer) as served:
        first = await create(served, tools=[TOOL], store=how == "chained")
        if how == "chained":
            second = await create(served, tools=[TOOL], previous_response_id=first.id)
        else:
            input_items = [*map(bare, first.output), {"role": "user", "content": "Where?"}]
            second = await create(served, tools=[TOOL], input=input_items, store=False)
    (annotation,) = second.output[0].content[0].annotations
    assert (annotation.type, annotation.filename) == ("container_file_citation", "a.txt")
    assert annotation.container_id == first.output[0].container_id


async def test_what_was_cited_may_come_back_as_input() -> None:
    async with interpreting(WRITES, ANSWER, [{"text": "Yes."}]) as served:
        first = await create(served, tools=[TOOL])
        input_items = [*map(bare, first.output), {"role": "user", "content": "Sure?"}]
        assert (await create(served, input=input_items)).output_text == "Yes."


async def test_without_a_file_a_link_is_only_text() -> None:
    async with interpreting(ANSWER) as served:
        response = await create(served, tools=[TOOL])
    assert (response.output[0].content[0].text, response.output[0].content[0].annotations) == (TEXT, [])
