"""The browser that gpt-oss was trained on: its cursors, its links, and marks that cite lines."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sdk.answer_shapes import call
from tests.support.sdk.requests import chat_requests, create, messages, stream
from tests.support.sdk.web_pages import TOOL, browsing, model, web
from tests.support.servers.serving import serving

SAY = {"text": "Done."}
SEARCH = call("browser.search", '{"query": "rome", "topn": 10, "source": "news"}')


def opening(arguments: str) -> dict[str, Any]:
    return call("browser.open", arguments)


def page_texts(served: Any) -> list[str]:
    """Return the results of the conversation's calls as the model gets them."""
    return [message["content"] for message in messages(served) if message["role"] == "tool"]


async def test_a_model_with_a_browser_of_its_own_is_given_it() -> None:
    async with browsing([SAY], native=True) as (served, _):
        await create(served, tools=[TOOL])
        assert [tool.type for tool in chat_requests(served)[-1].tools or ()] == ["browser"]


async def test_without_pages_it_is_given_the_search_as_a_function() -> None:
    async with browsing([SAY], native=True) as (served, _):
        await create(served, tools=[{**TOOL, "external_web_access": False}])
        assert [tool.name for tool in chat_requests(served)[-1].tools or ()] == ["web_search"]


async def test_everything_shown_has_a_cursor_and_links_are_clicked_by_id() -> None:
    turns = [
        [SEARCH],
        [opening('{"id": 1}')],
        [opening('{"id": 0, "cursor": 1, "num_lines": 2}')],
        [opening('{"loc": 300.0, "num_lines": 1}')],
        [opening('{"cursor": 1}')],
        [SAY],
    ]
    async with browsing(*turns, native=True) as (served, there):
        response = await create(served, tools=[TOOL])
        results, oslo, rome, further, again = page_texts(served)
    url = there.site.url
    assert results == (
        "[0] rome\n**viewing lines [0 - 5] of 5**\n\nL0: # Search Results\nL1: \n"
        "L2:   * 【0†Title 1†127.0.0.2】\nL3: First passage of 1. … Second passage of 1.\n"
        "L4:   * 【1†Title 2†127.0.0.2】\nL5: First passage of 2. … Second passage of 2."
    )
    assert oslo == f"[1] Oslo ({url}/oslo)\n**viewing lines [0 - 0] of 0**\n\nL0: Not Rome【0†127.0.0.2】."
    assert rome == (
        f"[2] Rome ({url}/rome)\n**viewing lines [0 - 1] of 398**\n\n"
        "L0: Paragraph 0 tells of number 0【0†127.0.0.2】.\nL1: "
    )
    assert further.startswith(f"[3] Rome ({url}/rome)\n**viewing lines [300 - 300] of 398**\n\nL300: Paragraph 150 ")
    assert again == oslo.replace("[1]", "[4]")
    actions = [(item.action.type, getattr(item.action, "url", None)) for item in response.output[:-1]]
    assert actions == [
        ("search", None),
        ("open_page", f"{url}/oslo"),
        ("open_page", f"{url}/rome"),
        ("open_page", f"{url}/rome"),
        ("open_page", f"{url}/oslo"),
    ]
    assert len(there.site.requests) == 2


async def test_matches_are_a_page_whose_links_lead_to_the_lines() -> None:
    turns = [
        [SEARCH],
        [opening('{"id": 0}')],
        [call("browser.find", '{"pattern": "Number 90"}')],
        [opening('{"id": 0, "num_lines": 5}')],
        [call("browser.find", '{"pattern": "nowhere", "cursor": 2}')],
        [SAY],
    ]
    async with browsing(*turns, native=True) as (served, there):
        response = await create(served, tools=[TOOL])
        _, _, matches, there_it_is, nothing = page_texts(served)
    url = f"{there.site.url}/rome"
    assert matches == (
        f"[2] Find results for text: `Number 90` in `Rome` ({url})\n**viewing lines [0 - 4] of 4**\n\n"
        "L0: # 【0†match at L180】\nL1: Paragraph 90 tells of number 90.\nL2: \n"
        "L3: Paragraph 91 tells of number 91.\nL4: "
    )
    assert there_it_is.startswith(f"[3] Rome ({url})\n**viewing lines [176 - 180] of 398**\n\nL176: Paragraph 88")
    assert nothing.endswith("L0: No `find` results for pattern: `nowhere`")
    assert response.output[2].action.to_dict() == {"type": "find_in_page", "pattern": "Number 90", "url": url}
    assert len(there.site.requests) == 1


async def test_marks_cite_pages_by_cursor_and_results_by_their_lines() -> None:
    said = "A【1†L0-L2】 b【0†L3】 c【0†L4-L5】 d【0†L0】 e【0】 f【7†L1】 g【1†L999†Rome】."
    async with browsing([SEARCH], [opening('{"id": 0}')], [{"text": [*said]}], native=True) as (served, there):
        events = await stream(served, tools=[TOOL])
    part = events[-1].response.output[-1].content[0]
    rome, oslo = f"{there.site.url}/rome", f"{there.site.url}/oslo"
    assert part.text == (
        f"A([Rome]({rome})) b([Title 1]({rome})) c([Title 2]({oslo})) d【0†L0】 e【0】 f【7†L1】 g([Rome]({rome}))."
    )
    assert [(each.url, part.text[each.start_index : each.end_index]) for each in part.annotations] == [
        (rome, f"([Rome]({rome}))"),
        (rome, f"([Title 1]({rome}))"),
        (oslo, f"([Title 2]({oslo}))"),
        (rome, f"([Rome]({rome}))"),
    ]


async def test_what_is_cited_of_matches_is_the_page_that_they_were_found_in() -> None:
    again = [opening('{"cursor": 2}')]
    answer = [{"text": "It is【2†L1】【3†L1】."}]
    turns = [[SEARCH], [opening('{"id": 0}')], [call("browser.find", '{"pattern": "number 90"}')], again, answer]
    async with browsing(*turns, native=True) as (served, there):
        response = await create(served, tools=[TOOL])
        assert "Find results" in page_texts(served)[-1]
    cited = [(each.title, each.url) for each in response.output[-1].content[0].annotations]
    assert cited == [("Rome", f"{there.site.url}/rome")] * 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("browser.open", '{"cursor": 1, "loc": 50}'),
        ("browser.open", '{"cursor": 0, "id": 0}'),
        ("browser.open", '{"cursor": 2}'),
        ("browser.open", '{"cursor": 0}'),
        ("browser.find", '{"cursor": 1, "pattern": "number 90"}'),
        ("browser.find", '{"cursor": 2, "pattern": "number 90"}'),
    ],
)
async def test_domains_hold_for_what_earlier_turns_were_shown(name: str, arguments: str) -> None:
    finding = [call("browser.find", '{"pattern": "number 90"}')]
    turns = [[SEARCH], [opening('{"id": 0}')], finding, [SAY], [call(name, arguments)], [SAY]]
    for filters in ({"allowed_domains": ["other.example"]}, {"blocked_domains": ["127.0.0.2.example"]}):
        async with browsing(*turns, native=True) as (served, _):
            first = await create(served, tools=[TOOL])
            limited = {**TOOL, "filters": filters}
            second = await create(served, tools=[limited], input="And?", previous_response_id=first.id)
            last = page_texts(served)[-1]
            has_page = "Paragraph" in last or "passage" in last
            refused = "allowed_domains" in filters or arguments == '{"cursor": 0}'
            assert has_page != refused, last
        assert second.output[0].status == ("failed" if refused else "completed")


async def test_cursors_of_an_earlier_turn_still_work_after_a_restart(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "responses.db")}
    async with web() as there:
        turns = [[SEARCH], [opening('{"id": 0}')], [opening('{"loc": 60}')], [SAY]]
        inference = model(*turns, native=True)
        async with serving(inference, more=there.sections, kv_store=store) as served:
            first = await create(served, tools=[TOOL])
        del there.site.pages["/rome"]
        turns = [
            [opening('{"loc": 390, "num_lines": 1}')],
            [call("browser.find", '{"pattern": "number 42", "cursor": 1}')],
            [opening('{"id": 1, "cursor": 0}')],
            [{"text": "Old【0†L3】【2†L60】, new【5†L0】."}],
        ]
        inference = model(*turns, native=True)
        async with serving(inference, more=there.sections, kv_store=store) as served:
            second = await create(served, tools=[TOOL], input="And?", previous_response_id=first.id)
            *_, scrolled, found_text, oslo = page_texts(served)
    rome = f"{there.site.url}/rome"
    assert scrolled.startswith(f"[3] Rome ({rome})\n**viewing lines [390 - 390] of 398**")
    assert "【0†match at L84】" in found_text
    assert oslo.startswith("[5] Oslo (")
    assert [request[1] for request in there.site.requests] == ["/rome", "/oslo"]
    assert second.output_text == (f"Old([Title 1]({rome}))([Rome]({rome})), new([Oslo]({there.site.url}/oslo)).")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("browser.open", '{"cursor": 5}', "no page with the cursor `5`. The last one is `0`"),
        ("browser.open", '{"id": 2}', "Invalid link id `2`"),
        ("browser.open", '{"id": ""}', "needs `id`"),
        ("browser.open", '{"loc": 6}', "Cannot exceed page maximum of 5"),
        ("browser.open", '{"loc": "here"}', "whole number"),
        ("browser.open", '{"id": "http://127.0.0.1/"}', "not open to fetching"),
        ("browser.open", '{"id": [1]}', "text"),
        ("browser.find", '{"pattern": "x"}', "not on search results"),
        ("browser.find", "{}", "needs `pattern`"),
        ("browser.search", "{}", "needs `query`"),
        ("browser.open", '{"id": 0', "not JSON"),
    ],
)
async def test_calls_that_cannot_be_done_are_errors_and_use_up_no_cursor(name: str, arguments: str, words: str) -> None:
    turns = [[SEARCH], [call(name, arguments)], [opening('{"id": 1}')], [SAY]]
    async with browsing(*turns, native=True) as (served, _):
        response = await create(served, tools=[TOOL])
        _, failed, opened = page_texts(served)
    assert words in failed
    assert opened.startswith("[1] Oslo")
    assert [item.status for item in response.output] == ["completed", "failed", "completed", "completed"]


async def test_nothing_can_be_opened_before_anything_was_found() -> None:
    async with browsing([opening("{}")], [SAY], native=True) as (served, _):
        await create(served, tools=[TOOL])
        assert page_texts(served) == ["No pages to access!"]


async def test_a_chain_may_change_to_a_model_without_a_browser_and_back(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "responses.db")}
    native = [[SEARCH], [opening('{"id": 0}')], [SAY]]
    plain = [[call("open_page", '{"page": "1", "from_line": 398}')], [call("web_search", '{"query": "x"}')], [SAY]]
    again = [
        [opening('{"num_lines": 1}')],
        [call("browser.search", '{"query": "y"}')],
        [{"text": "【1】【2】【5†L3】"}],
    ]
    heads: list[list[str]] = []
    previous: str | None = None
    async with web() as there:
        for turns, browser in ((native, True), (plain, False), (again, True)):
            inference = model(*turns, native=browser)
            async with serving(inference, more=there.sections, kv_store=store) as served:
                response = await create(served, tools=[TOOL], previous_response_id=previous)
                heads.append([text.splitlines()[0] for text in page_texts(served)[-2:]])
                previous = response.id
    url = there.site.url
    page = f"Rome ({url}/rome)"
    assert heads == [["[0] rome", f"[1] {page}"], [f"[1] {page}", "[2] Title 1"], [f"[4] {page}", "[5] y"]]
    assert response.output_text == f"([Rome]({url}/rome))([Title 1]({url}/rome))([Title 1]({url}/rome))"
    assert len(there.site.requests) == 1


async def test_harmony_browses_in_its_own_words_and_cites_what_it_saw() -> None:
    section = {"provider": "next_token", "function": "tests.support.sdk.web_pages:browses", "model": "mine"}
    async with web() as there, serving(section, more=there.sections) as served:
        first = await create(served, model="mine", input="Who is told of?", tools=[TOOL])
        second = await create(served, model="mine", input="And?", tools=[TOOL], previous_response_id=first.id)
    rome = f"{there.site.url}/rome"
    assert [item.type for item in first.output] == ["reasoning", *["web_search_call"] * 4, "message"]
    assert [item.action.type for item in first.output[1:5]] == ["search", "open_page", "find_in_page", "open_page"]
    assert [item.status for item in first.output[1:]] == ["completed"] * 5
    assert first.output_text == f"It is told([Rome]({rome})), and found([Title 1]({rome})), but not【9†L1】."
    assert second.output[0].action.url == rome
    assert second.output_text == f"Again([Rome]({rome}))."
    assert len(there.site.requests) == 1
