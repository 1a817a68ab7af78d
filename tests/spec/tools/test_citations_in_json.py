"""Citations in answers of a given form: with any title of a page, the answer stays JSON of that form."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.spec.tools.test_web_search import TOOL, search, searching
from tests.support.sdk.answer_shapes import Script
from tests.support.sdk.requests import create, responses, stream
from tests.support.servers.fake_exa import page
from tests.support.servers.mcp_stack import kinds

TITLES = [
    "Plain",
    'The "Eternal" City',
    'x","admin":true,"y":"',
    "ends in a backslash\\",
    "two\nlines\t\x00\u2028",
    "A](https://evil.example) [b",
]
ANSWER: Script = [{"text": ['{"city": "Rome【', "1】【1†L0-L2】", '", "why": "【2】"', "}【1】"]}]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str
    why: str


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_page_is_called_does_not_get_into_the_json(title: str, streamed: bool) -> None:
    async with searching([search()], ANSWER, [{"text": "Plain【1】."}]) as (served, exa):
        exa.results = [page(1, title=title), page(2)]
        fields: Any = {"model": "scripted", "input": "hi", "tools": [TOOL], "text_format": City}
        if streamed:
            async with responses(served).stream(**fields) as events:
                deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
                response = await events.get_final_response()
            assert "".join(deltas) == response.output_text
        else:
            response = await responses(served).parse(**fields)
        plain = await create(served, previous_response_id=response.id, input="And?")
    assert response.output_parsed == City(city="Rome", why="")
    part = response.output[-1].content[0]
    citations = [(each.title, each.url, each.start_index) for each in part.annotations]
    assert [(url, at) for _, url, at in citations] == [
        ("https://site1.example.com/page", 14),
        ("https://site2.example.com/page", 25),
        ("https://site1.example.com/page", 27),
    ]
    assert all(each.start_index == each.end_index <= len(part.text) for each in part.annotations)
    assert plain.output_text.endswith("](https://site1.example.com/page)).")


async def test_json_at_all_keeps_its_keys() -> None:
    async with searching([search()], [{"text": '{"answer": "Rome【1】"}'}]) as (served, exa):
        exa.results = [page(1, title=TITLES[2])]
        events = await stream(served, tools=[TOOL], text={"format": {"type": "json_object"}})
    assert kinds(events[-1].response) == ["web_search_call", "message"]
    assert events[-1].response.output_text == '{"answer": "Rome"}'
    added = [event.annotation for event in events if event.type == "response.output_text.annotation.added"]
    assert [(each.start_index, each.end_index) for each in added] == [(16, 16)]


async def test_pages_of_earlier_turns_are_cited_so_too() -> None:
    async with searching([search()], [{"text": "It is."}], ANSWER) as (served, exa):
        exa.results = [page(1, title=TITLES[1]), page(2)]
        first = await create(served, tools=[TOOL])
        second = await responses(served).parse(
            model="scripted", input="And?", previous_response_id=first.id, text_format=City
        )
    assert second.output_parsed == City(city="Rome", why="")
