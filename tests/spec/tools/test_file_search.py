"""The hosted file search through the official SDK: passages for the model, events for the client, and citations."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.file_search_stack import TEXTS, filing, store_of
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
INCLUDE = ["file_search_call.results"]
ANSWER: Script = [{"text": "Krill."}]


def search(*queries: str, **fields: Any) -> Json:
    return call("file_search", json.dumps({"queries": queries or ("what do blue whales eat?",)}), **fields)


def tool(*store_ids: str, **fields: Any) -> Json:
    return {"type": "file_search", "vector_store_ids": [*store_ids], **fields}


def result_text(served: Served) -> str:
    return messages(served)[-1]["content"]


async def test_the_search_is_run_and_its_item_comes_before_the_answer(tmp_path: Path) -> None:
    async with filing(tmp_path, [search("whales", "krill")], ANSWER) as served:
        store_id, _ = await store_of(served)
        response = await create(served, tools=[tool(store_id)])
    item, message = response.output
    assert (item.type, item.status, item.id[:3]) == ("file_search_call", "completed", "fs_")
    assert (item.queries, item.results) == (["whales", "krill"], None)
    assert message.content[0].text == "Krill."


async def test_the_model_gets_numbered_passages_with_the_files_names(tmp_path: Path) -> None:
    async with filing(tmp_path, [search(id="c1")], ANSWER) as served:
        store_id, _ = await store_of(served)
        await create(served, tools=[tool(store_id), function("get")])
        _, called, answer = messages(served)
        assert sorted(each.name for each in chat_requests(served)[-1].tools or ()) == ["file_search", "get"]
    assert called["tool_calls"][0]["function"]["name"] == "file_search"
    assert (answer["role"], answer["tool_call_id"]) == ("tool", "c1")
    assert answer["content"].startswith(f"[1] whales.md\n{TEXTS['whales.md']}\n\n[2] ")
    assert "[3] " in answer["content"]


async def test_events_go_through_the_stages_in_order(tmp_path: Path) -> None:
    async with filing(tmp_path, [search()], ANSWER) as served:
        store_id, _ = await store_of(served)
        events = await stream(served, tools=[tool(store_id)])
    assert [event.type.removeprefix("response.") for event in events][2:7] == [
        "output_item.added",
        "file_search_call.in_progress",
        "file_search_call.searching",
        "file_search_call.completed",
        "output_item.done",
    ]


async def test_results_are_in_the_item_only_where_they_are_asked_for(tmp_path: Path) -> None:
    async with filing(tmp_path, [search()], ANSWER) as served:
        store_id, ids = await store_of(served, whales={"sea": True})
        response = await create(served, tools=[tool(store_id)], include=INCLUDE)
        assert bare(await responses(served).retrieve(response.id, include=INCLUDE)) == bare(response)
    best = response.output[0].results[0]
    assert (best.file_id, best.filename, best.text) == (ids["whales.md"], "whales.md", TEXTS["whales.md"])
    assert best.attributes == {"sea": True}
    assert 0.5 < best.score <= 1
    assert len(response.output[0].results) == 3


async def test_what_the_declaration_sets_reaches_the_search(tmp_path: Path) -> None:
    sea = {"type": "eq", "key": "sea", "value": True}
    declared: list[Json] = [
        {"max_num_results": 1},
        {"filters": sea},
        {"ranking_options": {"score_threshold": 0.3}},
        {"ranking_options": {"ranker": "auto", "hybrid_search": {"embedding_weight": 0, "text_weight": 1}}},
    ]
    turns = [turn for _ in declared for turn in ([search("sourdough")], ANSWER)]
    async with filing(tmp_path, *turns) as served:
        store_id, _ = await store_of(served, whales={"sea": True}, ships={"sea": True})
        results = [
            {
                hit.filename
                for hit in (await create(served, tools=[tool(store_id, **each)], include=INCLUDE)).output[0].results
            }
            for each in declared
        ]
    assert results == [{"bread.md"}, {"whales.md", "ships.md"}, {"bread.md"}, {"bread.md"}]


async def test_several_stores_are_searched_as_one(tmp_path: Path) -> None:
    async with filing(tmp_path, [search("whales and sourdough")], ANSWER) as served:
        first, _ = await store_of(served, "whales.md")
        second, _ = await store_of(served, "bread.md")
        await create(served, tools=[tool(first, second)])
        assert "whales.md" in result_text(served)
        assert "bread.md" in result_text(served)


@pytest.mark.parametrize(
    "pieces",
    [
        ["They eat krill\u30101\u3011, all day\u30101\u2020source\u3011."],
        ["They eat krill\u3010", "1", "\u3011, all day\u30101\u2020so", "urce\u3011", "."],
        [*"They eat krill\u30101\u3011, all day\u30101\u2020source\u3011."],
    ],
    ids=["whole", "split", "by letters"],
)
async def test_marks_in_the_text_become_citations_of_files(tmp_path: Path, pieces: list[str]) -> None:
    async with filing(tmp_path, [search()], [{"text": pieces}]) as served:
        store_id, ids = await store_of(served)
        events = await stream(served, tools=[tool(store_id)])
    part = events[-1].response.output[1].content[0]
    assert part.text == "They eat krill, all day."
    cited = {"type": "file_citation", "file_id": ids["whales.md"], "filename": "whales.md"}
    assert [each.to_dict() for each in part.annotations] == [{**cited, "index": 14}, {**cited, "index": 23}]
    announced = [
        event.annotation.to_dict() for event in events if event.type == "response.output_text.annotation.added"
    ]
    assert announced == [each.to_dict() for each in part.annotations]


async def test_marks_at_the_beginning_twice_in_one_place_and_of_nothing(tmp_path: Path) -> None:
    text = "\u30101\u3011\u30101\u3011Krill\u30109\u3011\u30101\u3011\u30102\u3011"
    async with filing(tmp_path, [search()], [{"text": text}]) as served:
        store_id, ids = await store_of(served)
        part = (await stream(served, tools=[tool(store_id)]))[-1].response.output[1].content[0]
    assert part.text == "Krill\u30109\u3011"
    assert [each.index for each in part.annotations] == [0, 8, 8]
    assert [each.file_id for each in part.annotations[:2]] == [ids["whales.md"]] * 2


async def test_files_of_earlier_turns_can_still_be_cited_and_new_ones_are_numbered_on(tmp_path: Path) -> None:
    cites: Script = [{"text": "Both: \u30101\u3011 and \u30102\u3011."}]
    async with filing(tmp_path, [search()], ANSWER, [search("sourdough")], cites) as served:
        store_id, ids = await store_of(served)
        tools = [tool(store_id, max_num_results=1)]
        first = await create(served, tools=tools)
        second = await create(served, tools=tools, previous_response_id=first.id)
        assert result_text(served).startswith("[2] bread.md\n")
    part = second.output[1].content[0]
    assert part.text == "Both:  and ."
    assert [each.file_id for each in part.annotations] == [ids["whales.md"], ids["bread.md"]]


@pytest.mark.parametrize("how", ["chained", "sent back"])
async def test_a_later_turn_sends_the_model_the_search_and_its_result_again(tmp_path: Path, how: str) -> None:
    cites: Script = [{"text": "Krill\u30101\u3011."}]
    async with filing(tmp_path, [search(id="c1")], cites, [{"text": "Yes."}]) as served:
        store_id, _ = await store_of(served)
        first = await create(served, tools=[tool(store_id)])
        before = messages(served)
        if how == "chained":
            await create(served, input="Sure?", previous_response_id=first.id)
        else:
            user = {"role": "user", "content": "hi"}
            await create(served, input=[user, *first.output, {"role": "user", "content": "Sure?"}])
        assert messages(served)[: len(before)] == before
        assert messages(served)[len(before) :] == [
            {"role": "assistant", "content": "Krill."},
            {"role": "user", "content": "Sure?"},
        ]


async def test_a_search_that_finds_nothing_says_so(tmp_path: Path) -> None:
    async with filing(tmp_path, [search()], ANSWER) as served:
        store = await served.client.vector_stores.create()
        response = await create(served, tools=[tool(store.id)], include=INCLUDE)
        assert result_text(served) == "Nothing was found."
    assert (response.output[0].status, response.output[0].results) == ("completed", [])


async def test_a_missing_store_is_refused_by_its_field(tmp_path: Path) -> None:
    async with filing(tmp_path, [search()], ANSWER) as served:
        store_id, _ = await store_of(served)
        error = await refusal(served, 404, tools=[function("get"), tool(store_id, "vs_nowhere")])
        assert (error["param"], chat_requests(served)) == ("tools[1].vector_store_ids[1]", [])
        assert "vs_nowhere" in error["message"]
        counting: Any = {"model": "scripted", "input": "hi", "tools": [tool("vs_nowhere")]}
        with pytest.raises(NotFoundError):
            await served.client.responses.input_tokens.count(**counting)


async def test_a_store_gone_by_the_call_is_an_error_for_the_model_which_still_answers(tmp_path: Path) -> None:
    async with filing(tmp_path, [{"wait_s": 0.2}, search()], [{"text": "I could not look."}]) as served:
        store_id, _ = await store_of(served)
        events: list[Any] = []
        async for event in await create(served, stream=True, tools=[tool(store_id)], include=INCLUDE):
            events.append(event)
            if event.type == "response.in_progress":
                await served.client.vector_stores.delete(store_id)
        assert store_id in result_text(served)
    item, message = events[-1].response.output
    assert (item.status, item.queries, item.results) == ("failed", ["what do blue whales eat?"], None)
    assert message.content[0].text == "I could not look."
    assert "response.file_search_call.completed" not in [event.type for event in events]


async def test_a_store_of_another_tenant_is_not_there(tmp_path: Path) -> None:
    keys = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
    async with filing(tmp_path, [search()], ANSWER, server={"api_keys": keys}) as served:
        store_id, _ = await store_of(served)
        never = await refusal(served, 404, tools=[tool("vs_nowhere")])
        served.client.api_key = "key-b"
        other = await refusal(served, 404, tools=[tool(store_id)])
    assert other["message"].replace(store_id, "") == never["message"].replace("vs_nowhere", "")


async def test_a_failing_embedder_is_an_error_for_the_model(tmp_path: Path) -> None:
    async with filing(tmp_path, [search("unwell")], ANSWER) as served:
        store_id, _ = await store_of(served)
        response = await create(served, tools=[tool(store_id)])
        assert "not well" in result_text(served)
    assert (response.status, response.output[0].status) == ("completed", "failed")


@pytest.mark.parametrize(
    "arguments",
    ["{oops", "[]", "{}", '{"queries": []}', '{"queries": [" "]}', '{"queries": ["a", 5]}', '{"queries": {"a": 1}}']
    + [json.dumps({"queries": input_items}) for input_items in (["x"] * 17, ["x" * 4097])],
    ids=lambda text: text[:20],
)
async def test_arguments_that_no_search_can_have_are_an_error_for_the_model(
    tmp_path: Path, arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And to the client and the log, in the words that the model got."""
    caplog.set_level(logging.INFO)
    turns: list[Script] = [[{"call": "file_search", "arguments": arguments}], ANSWER]
    async with filing(tmp_path, *turns) as served:
        store_id = (await served.client.vector_stores.create()).id
        response = await create(served, tools=[tool(store_id)])
        assert "file_search" in result_text(served)
    assert (response.output[0].status, response.output[0].queries) == ("failed", [])
    assert response.output[0].error["message"].startswith(("The arguments of `file_search`", "`file_search` needs"))
    assert re.search(r"of the tool file_search in resp_\w+ took \d+\.\d{3} s: failed: ", caplog.text)


@pytest.mark.parametrize("arguments", ['{"query": "krill"}', '{"queries": "krill"}'])
async def test_one_query_may_stand_alone(tmp_path: Path, arguments: str) -> None:
    async with filing(tmp_path, [call("file_search", arguments)], ANSWER) as served:
        store_id, _ = await store_of(served)
        response = await create(served, tools=[tool(store_id)])
    assert (response.output[0].status, response.output[0].queries) == ("completed", ["krill"])


async def test_a_forced_search_is_forced_once(tmp_path: Path) -> None:
    async with filing(tmp_path, [search()], ANSWER) as served:
        store_id, _ = await store_of(served)
        response = await create(served, tools=[tool(store_id)], tool_choice={"type": "file_search"})
        first, second = (chat.tool_choice for chat in chat_requests(served))
    assert response.tool_choice.type == "file_search"
    assert first is not None
    assert not isinstance(first, str)
    assert first.model_dump() == {"type": "function", "function": {"name": "file_search"}}
    assert second == "auto"


async def test_without_vector_stores_the_tool_is_refused() -> None:
    async with serving() as served:
        error = await refusal(served, tools=[function("get"), tool("vs_1")])
    assert error["param"] == "tools[1].type"
    assert "vector_stores" in error["message"]
