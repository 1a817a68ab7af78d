"""The hosted web search, over a local server that speaks Exa's wire format."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.requests import bare, chat_requests, create, messages, refusal, responses, stream
from tests.support.servers.fake_exa import KEY, FakeExa, page
from tests.support.servers.serving import MEMORY, Served, scripted, serving

Json = dict[str, Any]
TOOL: Json = {"type": "web_search"}
LINKS = {n: f"([Title {n}](https://site{n}.example.com/page))" for n in range(1, 9)}


def search(query: str = "rome", **fields: Any) -> Json:
    return call("web_search", f'{{"query": "{query}"}}', **fields)


@asynccontextmanager
async def searching(*turns: Script, **sections: Any) -> AsyncGenerator[tuple[Served, FakeExa]]:
    """A stack whose model plays `turns`, and the search service it may ask."""
    async with FakeExa() as exa:
        tools = {"provider": "exa", "api_key": KEY, "base_url": exa.url}
        async with serving(scripted(*turns), tool_runtime=tools, **sections) as served:
            yield served, exa


async def answered(*turns: Script, **fields: Any) -> Any:
    """The response of a model that plays `turns` and may search."""
    async with searching(*turns) as (served, _):
        return await create(served, **{"tools": [TOOL], **fields})


async def test_the_search_is_run_and_its_item_comes_before_the_answer() -> None:
    response = await answered([search()], [{"text": "Sunny."}])
    item, message = response.output
    assert (item.type, item.status, item.id[:3]) == ("web_search_call", "completed", "ws_")
    assert (item.action.type, item.action.query, item.action.queries) == ("search", "rome", ["rome"])
    assert message.content[0].text == response.output_text == "Sunny."


async def test_the_content_types_of_a_search_are_echoed() -> None:
    """G24, the row web_search_preview.search_content_types: searches return text, and the echo is as it was sent."""
    response = await answered([{"text": "Hi."}], tools=[{**TOOL, "search_content_types": ["text", "image"]}])
    assert bare(response.tools[0])["search_content_types"] == ["text", "image"]


async def test_the_model_gets_the_results_of_the_search() -> None:
    async with searching([search(id="c1")], [{"text": "Sunny."}]) as (served, exa):
        await create(served, tools=[TOOL])
        _, called, sent_result = messages(served)
    assert exa.requests[0][1]["query"] == "rome"
    assert called["tool_calls"][0]["function"] == {"name": "web_search", "arguments": '{"query": "rome"}'}
    assert (sent_result["role"], sent_result["tool_call_id"]) == ("tool", "c1")
    assert sent_result["content"].startswith("[1] Title 1\nhttps://site1.example.com/page\nFirst passage of 1.")
    assert "[3] Title 3" in sent_result["content"]


async def test_the_search_may_be_chosen_by_each_of_its_names() -> None:
    for name in ("web_search", "web_search_preview", "web_search_2025_08_26", "browser_search"):
        for choice in ({"type": name}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": name}]}):
            async with searching([search()], [{"text": "Sunny."}]) as (served, _):
                response = await create(served, tools=[{"type": "browser_search"}], tool_choice=choice)
                sent_choice: Any = chat_requests(served)[0].tool_choice
            assert response.output_text == "Sunny."
            named = sent_choice if sent_choice.type == "function" else sent_choice.allowed_tools.tools[0]
            assert named.function.name == "web_search"


@pytest.mark.parametrize("tools", [[], [function()]])
async def test_a_search_that_is_left_out_silently_takes_its_choice_along(tools: list[Json]) -> None:
    offline = [{**TOOL, "external_web_access": False}, *tools]
    chosen = {"type": "web_search_preview"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [chosen]}
    async with serving(scripted([{"text": "No need."}])) as served:
        for choice, expected in ((chosen, None), (allowed, "none" if tools else None)):
            response = await create(served, tools=offline, tool_choice=choice)
            assert response.output_text == "No need."
            assert chat_requests(served)[-1].tool_choice == expected


async def test_of_two_searches_neither_wins_silently() -> None:
    limited = {**TOOL, "filters": {"allowed_domains": ["site2.example.com"]}}
    async with searching([{"text": "No need."}]) as (served, _):
        for other in (TOOL, {"type": "web_search_preview"}):
            error = await refusal(served, tools=[limited, other])
            assert (error["param"], error["code"]) == ("tools[1].type", "invalid_value")
        await create(served, tools=[limited, {**limited, "type": "web_search_preview"}])
        assert [tool.name for tool in chat_requests(served)[-1].tools or ()] == ["web_search"]


async def test_the_model_is_offered_the_search_as_a_function() -> None:
    async with searching([{"text": "No need."}]) as (served, _):
        await create(served, tools=[TOOL, function("get")])
        names = [tool.model_dump()["function"]["name"] for tool in chat_requests(served)[-1].tools or ()]
    assert sorted(names) == ["get", "web_search"]


async def test_events_go_through_the_stages_in_order() -> None:
    async with searching([search()], [{"text": "Sunny."}]) as (served, _):
        events = await stream(served, tools=[TOOL])
    assert [event.type.removeprefix("response.") for event in events][2:7] == [
        "output_item.added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "output_item.done",
    ]


async def test_events_are_sent_while_the_search_runs_and_leaving_stops_it() -> None:
    async with searching([search("hang")]) as (served, exa):
        events = await create(served, tools=[TOOL], stream=True)
        async with asyncio.timeout(5):
            async for event in events:
                if event.type == "response.web_search_call.searching":
                    break
            await exa.reached.wait()
            assert not exa.dropped.is_set()
            await events.close()
            await exa.dropped.wait()


@pytest.mark.parametrize(
    "pieces",
    [
        ["See \u30101\u3011 and \u30102\u2020Title\u3011."],
        ["See \u3010", "1", "\u3011 and \u30102", "\u2020Ti", "tle\u3011", "."],
        [*"See \u30101\u3011 and \u30102\u2020Title\u3011."],
    ],
    ids=["whole", "split", "by letters"],
)
async def test_marks_in_the_text_become_links_with_annotations(pieces: list[str]) -> None:
    async with searching([search()], [{"text": pieces}]) as (served, _):
        events = await stream(served, tools=[TOOL])
    part = events[-1].response.output[1].content[0]
    assert part.text == f"See {LINKS[1]} and {LINKS[2]}."
    citations = [(one.type, one.url, one.title, part.text[one.start_index : one.end_index]) for one in part.annotations]
    assert citations == [("url_citation", f"https://site{n}.example.com/page", f"Title {n}", LINKS[n]) for n in (1, 2)]
    added = [event for event in events if event.type == "response.output_text.annotation.added"]
    assert [event.annotation_index for event in added] == [0, 1]


@pytest.mark.parametrize("text", ["\u30109\u3011", "\u3010x\u3011", "\u30101", "\u3010", "\u3011", "[1]"])
async def test_text_that_only_looks_like_a_mark_is_unchanged(text: str) -> None:
    response = await answered([search()], [{"text": [*f"See {text}"]}])
    assert response.output_text == f"See {text}"
    assert response.output[1].content[0].annotations == []


async def test_text_before_any_search_is_left_alone() -> None:
    response = await answered([{"text": "See \u30101\u3011."}])
    assert response.output_text == "See \u30101\u3011."


async def test_sources_and_results_are_shown_to_those_who_ask() -> None:
    include = ["web_search_call.action.sources", "web_search_call.results"]
    response = await answered([search()], [{"text": "Sunny."}], include=include)
    item = response.output[0]
    assert [source.url for source in item.action.sources] == [f"https://site{n}.example.com/page" for n in (1, 2, 3)]
    assert [result["title"] for result in item.results] == ["Title 1", "Title 2", "Title 3"]
    assert item.results[0]["text"].startswith("First passage of 1.")


async def test_sources_and_results_are_not_shown_otherwise() -> None:
    item = (await answered([search()], [{"text": "Sunny."}])).output[0]
    assert item.action.sources is None
    assert "results" not in item.model_dump()


async def test_a_model_may_search_again_and_again() -> None:
    turns = [[search("one")], [{"reasoning": "More."}, search("two")], [{"text": "Done \u30104\u3011."}]]
    async with searching(*turns) as (served, exa):
        response = await create(served, tools=[TOOL])
    assert [request["query"] for _, request in exa.requests] == ["one", "two"]
    assert [item.type for item in response.output] == ["web_search_call", "reasoning", "web_search_call", "message"]
    assert response.output_text == f"Done {LINKS[1]}."


async def test_several_searches_of_one_turn_are_all_run() -> None:
    turns: list[Script] = [[{"calls": [search("one"), search("two")]}], [{"text": "Done."}]]
    async with searching(*turns) as (served, exa):
        response = await create(served, tools=[TOOL])
        roles = [message["role"] for message in messages(served)]
    assert sorted(request["query"] for _, request in exa.requests) == ["one", "two"]
    assert [item.type for item in response.output] == ["web_search_call", "web_search_call", "message"]
    assert len({item.id for item in response.output}) == 3
    assert roles == ["user", "assistant", "tool", "tool"]


async def test_calls_over_the_limit_are_not_run_and_the_model_answers_with_what_it_has() -> None:
    async with searching([search("one")], [search("two")], [{"text": "Done."}]) as (served, exa):
        response = await create(served, tools=[TOOL, function("get")], max_tool_calls=1)
        offers = [
            [tool.model_dump()["function"]["name"] for tool in chat.tools or ()] for chat in chat_requests(served)
        ]
        sent_text = messages(served)[-1]["content"]
    assert [request["query"] for _, request in exa.requests] == ["one"]
    assert [(item.type, item.status) for item in response.output] == [
        ("web_search_call", "completed"),
        ("message", "completed"),
    ]
    assert "no more tool calls" in sent_text
    assert offers[1:] == [["get"], ["get"]]


async def test_a_model_that_repeats_itself_is_no_longer_offered_the_search() -> None:
    async with searching(*[[search()]] * 5, [{"text": "Enough."}]) as (served, exa):
        response = await create(served, tools=[TOOL])
        assert chat_requests(served)[-1].tools is None
    assert response.output_text == "Enough."
    assert len(exa.requests) == 5


@pytest.mark.parametrize("failure", ["status 500", "status 401", "html", "cut off"])
async def test_a_search_that_fails_is_an_error_for_the_model_which_still_answers(failure: str) -> None:
    async with searching([search(failure)], [{"text": "I could not look."}]) as (served, _):
        events = await stream(served, tools=[TOOL])
        sent_text = messages(served)[-1]["content"]
    response = events[-1].response
    assert (response.status, response.output[0].status) == ("completed", "failed")
    assert response.output_text == "I could not look."
    assert "search service" in sent_text
    assert KEY not in str([event.to_json() for event in events]) + sent_text
    assert "response.web_search_call.completed" not in [event.type for event in events]


@pytest.mark.parametrize("arguments", ["{oops", "[]", "{}", '{"query": ""}', '{"query": 5}', ""])
async def test_arguments_that_no_search_can_have_are_an_error_for_the_model(arguments: str) -> None:
    turns: list[Script] = [[{"call": "web_search", "arguments": arguments}], [{"text": "Sorry."}]]
    async with searching(*turns) as (served, exa):
        response = await create(served, tools=[TOOL])
        assert "search" in messages(served)[-1]["content"]
    assert response.output[0].status == "failed"
    assert exa.requests == []


async def test_without_a_search_provider_the_tool_is_refused() -> None:
    async with serving() as served:
        error = await refusal(served, tools=[function("get"), TOOL])
    assert error["param"] == "tools[1].type"
    assert "tool_runtime" in error["message"]


async def test_without_a_search_provider_one_that_may_not_go_out_is_left_out() -> None:
    async with serving() as served:
        await create(served, tools=[{**TOOL, "external_web_access": False}])
        assert chat_requests(served)[-1].tools is None


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "browser_search"],
)
async def test_the_search_has_many_names(kind: str) -> None:
    response = await answered([search()], [{"text": "Sunny."}], tools=[{"type": kind}])
    assert response.output[0].status == "completed"
    assert response.tools[0].type == {"browser_search": "web_search"}.get(kind, kind)


async def test_what_the_declaration_sets_reaches_the_search() -> None:
    declared = {
        **TOOL,
        "filters": {"allowed_domains": ["site2.example.com"]},
        "search_context_size": "low",
        "user_location": {"type": "approximate", "country": "it"},
        "external_web_access": False,
    }
    include = ["web_search_call.action.sources"]
    async with searching([search()], [{"text": "Sunny."}]) as (served, exa):
        response = await create(served, tools=[declared], include=include)
    body = exa.requests[0][1]
    assert body["includeDomains"] == ["site2.example.com"]
    assert body["userLocation"] == "IT"
    assert body["contents"]["maxAgeHours"] == -1
    assert [source.url for source in response.output[0].action.sources] == ["https://site2.example.com/page"]


@pytest.mark.parametrize("kind", ["web_search", "web_search_2025_08_26", "web_search_preview"])
async def test_a_forced_search_is_forced_once(kind: str) -> None:
    async with searching([search()], [{"text": "Sunny."}]) as (served, _):
        response = await create(served, tools=[TOOL], tool_choice={"type": kind})
        assert response.tool_choice.type == "web_search_preview"
        assert (await responses(served).retrieve(response.id)).tool_choice.type == "web_search_preview"
        first, second = (chat.tool_choice for chat in chat_requests(served))
    assert not isinstance(first, str)
    assert first is not None
    assert first.model_dump() == {"type": "function", "function": {"name": "web_search"}}
    assert second == "auto"


async def test_a_function_may_not_take_the_name_of_the_search() -> None:
    async with searching([]) as (served, _):
        assert (await refusal(served, tools=[TOOL, function("web_search")]))["param"] == "tools[1].name"


async def test_searches_and_functions_of_one_turn_both_have_their_way() -> None:
    turns: list[Script] = [[{"calls": [search(id="c1"), call("get", "{}", id="c2")]}], [{"text": "Done."}]]
    async with searching(*turns) as (served, _):
        first = await create(served, tools=[TOOL, function("get")])
        assert [(item.type, item.status) for item in first.output] == [
            ("function_call", "completed"),
            ("web_search_call", "completed"),
        ]
        output = {"type": "function_call_output", "call_id": "c2", "output": "42"}
        second = await create(served, input=[output], tools=[TOOL], previous_response_id=first.id)
        sent_messages = messages(served)
    assert second.output_text == "Done."
    assert {call["id"] for call in sent_messages[1]["tool_calls"]} == {"c1", "c2"}
    answers = {message["tool_call_id"]: message["content"] for message in sent_messages[2:]}
    assert answers["c1"].startswith("[1] Title 1")
    assert answers["c2"] == "42"


@pytest.mark.parametrize("how", ["chained", "sent back", "referred to"])
async def test_a_later_turn_sends_the_model_the_search_and_its_result_again(how: str) -> None:
    async with searching([search(id="c1")], [{"text": "Sunny."}], [{"text": "Yes."}]) as (served, exa):
        first = await create(served, tools=[TOOL])
        before = messages(served)
        match how:
            case "chained":
                await create(served, input="Sure?", previous_response_id=first.id)
            case "sent back":
                await create(
                    served,
                    input=[{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "Sure?"}],
                )
            case _:
                items = [{"type": "item_reference", "id": item.id} for item in first.output]
                await create(
                    served, input=[{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "Sure?"}]
                )
        after = messages(served)
    assert after[: len(before)] == before
    assert after[len(before) :] == [
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Sure?"},
    ]
    assert len(exa.requests) == 1


async def test_pages_of_earlier_turns_can_still_be_cited_and_new_ones_are_numbered_on() -> None:
    turns: list[Script] = [
        [search("one")],
        [{"text": "First."}],
        [search("two")],
        [{"text": "\u30101\u3011 and \u30104\u3011."}],
    ]
    async with searching(*turns) as (served, exa):
        first = await create(served, tools=[TOOL])
        exa.results = [page(8)]
        second = await create(served, tools=[TOOL], previous_response_id=first.id)
        sent_text = messages(served)[-1]["content"]
    assert sent_text.startswith("[4] Title 8")
    assert second.output_text == f"{LINKS[1]} and {LINKS[8]}."


async def test_usage_is_the_sum_of_all_turns() -> None:
    usage = {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 1}
    turns: list[Script] = [
        [search(), {"finish": "tool_calls", "usage": usage}],
        [{"text": "Sunny."}, {"finish": "stop", "usage": usage}],
    ]
    total = (await answered(*turns)).usage
    assert (total.input_tokens, total.output_tokens, total.total_tokens) == (20, 10, 30)
    assert total.input_tokens_details.cached_tokens == 4
    assert total.output_tokens_details.reasoning_tokens == 2


async def test_the_token_limit_is_one_budget_for_all_turns() -> None:
    turns: list[Script] = [[{"reasoning": ["hm"] * 10}, search()], [{"text": ["a "] * 40}]]
    async with searching(*turns) as (served, _):
        response = await create(served, tools=[TOOL], max_output_tokens=20)
        assert [chat.max_completion_tokens for chat in chat_requests(served)] == [20, 8]
    assert response.status == "incomplete"
    assert response.usage.output_tokens == 20


@pytest.mark.parametrize(
    "script",
    [[search()], [{"calls": [search("one"), search("two")]}], [search(), {"text": "And"}]],
    ids=["one", "two", "before a text"],
)
async def test_a_search_the_model_was_cut_off_in_is_not_run(script: Script) -> None:
    async with searching([*script, {"finish": "length"}]) as (served, exa):
        response = (await stream(served, tools=[TOOL]))[-1].response
    assert response.status == "incomplete"
    assert "completed" not in [item.status for item in response.output]
    assert exa.requests == []


async def test_a_response_with_searches_is_stored_as_it_was_sent() -> None:
    include = ["web_search_call.action.sources", "web_search_call.results"]
    async with searching([search()], [{"text": "See \u30101\u3011."}], kv_store=MEMORY) as (served, _):
        async with responses(served).stream(model="scripted", input="hi", tools=[TOOL], include=include) as events:
            final = await events.get_final_response()
        assert bare(await responses(served).retrieve(final.id, include=include)) == bare(final)
