"""Conversations that are compacted and have tools which go on with their earlier calls: each turn reads a conversation
from its newest compaction on, and the tools go on all the same."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.chat import ChatRequest
from tests.support.sdk.answer_shapes import Script, call, function
from tests.support.sdk.conversations import conversations
from tests.support.sdk.file_search_stack import filing, store_of
from tests.support.sdk.requests import bare, chat_requests, create
from tests.support.servers.normal_user import SHARED_PYTHON
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
LONG: Script = [{"text": " ".join(["word"] * 60)}]
SUMMARY: Script = [{"text": "They met."}]
DONE: Script = [{"text": "Yes."}]
SMALL: Json = {"context_management": [{"type": "compaction", "compact_threshold": 40}]}
TURNS = 8
"""Turns of a conversation that follow on its first one; each is compacted before the next."""


class Reading:
    """Notes the positions of the items of conversations that a stack reads."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.positions: set[int] = set()
        store = served.stack.kv_store
        scan = store.scan

        async def note(prefix: str, **bounds: Any) -> Any:
            rows = await scan(prefix, **bounds)
            self.positions.update(int(key[-10:]) for key, _ in rows if "/conversation_item/" in key)
            return rows

        monkeypatch.setattr(store, "scan", note)


async def list_items(served: Served, conversation_id: str) -> list[Any]:
    return [item async for item in conversations(served).items.list(conversation_id, order="asc")]


async def go_on(served: Served, conversation_id: str, reading: Reading, **fields: Any) -> Any:
    """One more response, which must have read the conversation from its newest compaction on."""
    types = [item.type for item in await list_items(served, conversation_id)]
    newest = max(at for at, item_type in enumerate(types) if item_type == "compaction")
    reading.positions.clear()
    response = await create(served, input="more", conversation=conversation_id, **fields)
    assert response.status == "completed"
    assert reading.positions == {*range(newest, len(types))}
    return response


def offered(request: ChatRequest) -> list[str]:
    return [tool.name for tool in request.tools or ()]


async def test_a_found_tool_is_offered_after_many_compactions(monkeypatch: pytest.MonkeyPatch) -> None:
    weather = function("get_weather", description="The forecast of a city.", defer_loading=True)
    orders = function("list_orders", description="Lists open orders.", defer_loading=True)
    fields: Json = {"tools": [{"type": "tool_search"}, weather, orders], **SMALL}
    search = [call("tool_search", '{"query": "weather forecast"}', id="c1")]
    async with serving(scripted(search, LONG, *[SUMMARY, LONG] * (TURNS + 1))) as served:
        reading, conversation = Reading(served, monkeypatch), await conversations(served).create()
        await create(served, input="one", conversation=conversation.id, **fields)
        await create(served, input="two", conversation=conversation.id, **fields)
        for _ in range(TURNS):
            await go_on(served, conversation.id, reading, **fields)
            assert offered(chat_requests(served)[-1]) == ["get_weather", "tool_search"]
        assert "list_orders" in str(chat_requests(served)[-1].tools)


async def test_a_found_tool_is_offered_after_a_compaction_that_the_client_keeps() -> None:
    weather = function("get_weather", description="The forecast of a city.", defer_loading=True)
    tools: list[Json] = [{"type": "tool_search"}, weather]
    search = [call("tool_search", '{"query": "weather forecast"}', id="c1")]
    async with serving(scripted(search, DONE, SUMMARY, DONE)) as served:
        first = await create(served, tools=tools)
        compacted = await served.client.responses.compact(model="scripted", previous_response_id=first.id)
        items = [bare(item) for item in compacted.output]
        await create(served, tools=tools, input=[*items, {"role": "user", "content": "more"}])
        assert offered(chat_requests(served)[-1]) == ["get_weather"]


async def test_sources_have_numbers_that_go_on_after_many_compactions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    search: Script = [call("file_search", '{"queries": ["the largest animal"]}', id="c1")]
    cited: Script = [{"text": "Blue whales 【1】 and 【2】."}]
    rounds = [search, LONG, *[SUMMARY, search, LONG] * 3, SUMMARY, cited]
    async with filing(tmp_path, *rounds) as served:
        store_id, _ = await store_of(served)
        fields: Json = {
            "tools": [{"type": "file_search", "vector_store_ids": [store_id], "max_num_results": 1}],
            **SMALL,
        }
        reading, conversation = Reading(served, monkeypatch), await conversations(served).create()
        await create(served, input="one", conversation=conversation.id, **fields)
        await create(served, input="two", conversation=conversation.id, **fields)
        for number in (3, 4):
            await go_on(served, conversation.id, reading, **fields)
            assert f"[{number}] whales.md" in str(chat_requests(served)[-1].messages)
        last = await go_on(served, conversation.id, reading, **fields)
    annotations = [each.filename for each in last.output[-1].content[0].annotations]
    assert annotations == ["whales.md", "whales.md"], "those of sources that only a compaction knows"


@asynccontextmanager
async def programs(tmp_path: Path, *turns: Script) -> AsyncGenerator[Served]:
    runtime = {"provider": "python", "timeout_s": 20, **SHARED_PYTHON}
    async with serving(scripted(*turns), tool_runtime=runtime, more={"files": {"provider": "kv"}}) as served:
        yield served


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("tool", ["code_interpreter", "shell"])
async def test_programs_go_on_in_their_container_after_many_compactions(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if tool == "shell":
        declared: Json = {"type": "shell", "environment": {"type": "container_auto"}}
        begin, more = (call("shell", f'{{"commands": ["{text}"]}}', id="c1") for text in ("echo kept > f", "cat f"))
    else:
        declared = {"type": "code_interpreter", "container": {"type": "auto"}}
        begin, more = (call("python", f'{{"code": "{text}"}}', id="c1") for text in ("x = 'kept'", "print(x)"))
    async with programs(tmp_path, [begin], LONG, *[SUMMARY, LONG] * 3, SUMMARY, [more], LONG) as served:
        uploaded = await served.client.files.create(file=("a.txt", b"of a message"), purpose="user_data")
        file = {"type": "input_file", "file_id": uploaded.id}
        message = {"role": "user", "content": [{"type": "input_text", "text": "one"}, file]}
        fields: Json = {"tools": [declared], **SMALL}
        reading, conversation = Reading(served, monkeypatch), await conversations(served).create()
        await create(served, input=[message], conversation=conversation.id, **fields)
        await create(served, input="two", conversation=conversation.id, **fields)
        for _ in range(3):
            await go_on(served, conversation.id, reading, **fields)
        calls = [item for item in await list_items(served, conversation.id) if item.type == f"{tool}_call"]
        ids = {item.environment.container_id if tool == "shell" else item.container_id for item in calls}
        assert (len(calls), len(ids)) == (2, 1)
        results = [each.content for each in chat_requests(served)[-1].messages if each.role == "tool"]
        assert "kept" in str(results[-1])
        assert "files of the messages" not in str(results[-1]), "it was copied once"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_conversation_with_a_file_that_is_in_no_store_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    message = {"role": "user", "content": [{"type": "input_text", "text": "one"}, file]}
    fields: Json = {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}], **SMALL}
    async with programs(
        tmp_path,
        LONG,
        SUMMARY,
        LONG,
        SUMMARY,
        [call("python", '{"code": "print(open(\'a.txt\').read())"}', id="c")],
        DONE,
    ) as served:
        reading, conversation = Reading(served, monkeypatch), await conversations(served).create()
        await create(served, input=[message], conversation=conversation.id, **fields)
        await create(served, input="two", conversation=conversation.id, **fields)
        reading.positions.clear()
        await create(served, input="three", conversation=conversation.id, **fields)
        assert 0 in reading.positions
        assert "hi" in str(chat_requests(served)[-1].messages[-1].content)
