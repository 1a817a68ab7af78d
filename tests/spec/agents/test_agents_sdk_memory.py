"""The Agents SDK's ways to remember over a served stack: chains, items sent back, sessions and conversations."""

from pathlib import Path
from typing import Any

import pytest
from agents import (
    ApplyPatchTool,
    HostedMCPTool,
    LocalShellTool,
    ModelSettings,
    OpenAIConversationsSession,
    RunConfig,
    ShellTool,
    SQLiteSession,
    WebSearchTool,
)

from tests.support.sdk.agents_sdk import ENCRYPTED, RUNS, Run, add, adding, agent, outputs, roles_of
from tests.support.sdk.answer_shapes import Script, call
from tests.support.sdk.requests import messages
from tests.support.sdk.web_pages import browsing
from tests.support.servers.mcp_stack import stacked, tool_outputs
from tests.support.servers.serving import Served, scripted, serving

DONE: Script = [{"text": ["Do", "ne."]}]
both = pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])


@both
async def test_a_run_goes_on_from_the_last_response(run: Run) -> None:
    async with serving(scripted([adding(1, 2)], DONE)) as served:
        who = agent(served, tools=[add])
        first = await run(who, "one")
        await run(who, "two", previous_response_id=first.last_response_id)
        chat = messages(served)
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    assert chat[4]["content"] == "two"


@both
async def test_each_turn_may_go_on_from_the_one_before(run: Run) -> None:
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2, id="c1")], [adding(3, 4, id="c2")], DONE]
    async with serving(scripted(*turns)) as served:
        result = await run(agent(served, tools=[add]), auto_previous_response_id=True)
        chat = messages(served)
        answers = tool_outputs(served)
        last = await served.client.responses.retrieve(result.last_response_id or "")
    assert answers == {"c1": "3", "c2": "7"}
    assert chat[1]["reasoning"] == "hm"
    assert last.previous_response_id == result.raw_responses[-2].response_id


@both
@pytest.mark.parametrize("settings", [ModelSettings(), ENCRYPTED], ids=["stored", "encrypted"])
async def test_reasoning_goes_back_with_the_call_it_led_to(run: Run, settings: ModelSettings) -> None:
    turns: list[Script] = [[{"reasoning": ["h", "m"]}, adding(1, 2, id="c1")], [{"reasoning": "ah"}, *DONE], DONE]
    async with serving(scripted(*turns)) as served:
        who = agent(served, tools=[add], model_settings=settings)
        result = await run(who)
        assert messages(served)[1]["reasoning"] == "hm"
        await run(who, [*result.to_input_list(), {"role": "user", "content": "And?"}])
        chat = messages(served)
    assert outputs(result) == ["reasoning", "function_call", "reasoning", "message"]
    assert chat[1]["reasoning"] == "hm"
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]


@both
async def test_reasoning_may_go_back_without_ids(run: Run) -> None:
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2)], DONE]
    config = RunConfig(tracing_disabled=True, reasoning_item_id_policy="omit")
    async with serving(scripted(*turns)) as served:
        result = await run(agent(served, tools=[add], model_settings=ENCRYPTED), run_config=config)
        assert messages(served)[1]["reasoning"] == "hm"
    assert result.final_output == "Done."


@both
async def test_a_session_in_sqlite_keeps_what_was_said(run: Run, tmp_path: Path) -> None:
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2, id="c1")], DONE, [{"text": "Again."}]]
    session = SQLiteSession("s", tmp_path / "s.db")
    try:
        async with serving(scripted(*turns)) as served:
            who = agent(served, tools=[add])
            await run(who, "one", session=session)
            again = await run(who, "two", session=session)
            chat = messages(served)
    finally:
        session.close()
    assert again.final_output == "Again."
    assert [each.get("content") for each in chat if each["role"] == "user"] == ["one", "two"]
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]
    assert chat[1]["reasoning"] == "hm"


@both
async def test_a_session_in_a_conversation_keeps_what_was_said(run: Run) -> None:
    turns: list[Script] = [[{"reasoning": "hm"}, adding(1, 2, id="c1")], DONE, [{"text": "Again."}]]
    async with serving(scripted(*turns)) as served:
        session = OpenAIConversationsSession(openai_client=served.client)
        who = agent(served, tools=[add])
        await run(who, "one", session=session)
        again = await run(who, "two", session=session)
        chat = messages(served)
        session_items: list[Any] = [*await session.get_items()]
        newest: list[Any] = [*await session.get_items(limit=2)]
        popped: Any = await session.pop_item()
        assert len(await session.get_items()) == len(session_items) - 1
        await session.clear_session()
    assert again.final_output == "Again."
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]
    assert chat[1]["reasoning"] == "hm"
    assert [each["type"] for each in session_items] == [
        *["message", "reasoning", "function_call", "function_call_output", "message"],
        *["message", "message"],
    ]
    assert newest == session_items[-2:]
    assert popped == session_items[-1]


async def test_a_session_takes_many_items_in_their_order() -> None:
    async with serving(scripted(DONE)) as served:
        session = OpenAIConversationsSession(openai_client=served.client)
        many: list[Any] = [{"role": "user", "content": f"{number}"} for number in range(45)]
        await session.add_items(many)
        session_items: list[Any] = [*await session.get_items()]
        await session.clear_session()
    assert [each["content"][0]["text"] for each in session_items] == [f"{number}" for number in range(45)]


@both
async def test_a_run_is_a_turn_of_a_conversation(run: Run) -> None:
    async with serving(scripted([{"reasoning": "hm"}, adding(1, 2, id="c1")], DONE, [{"text": "Again."}])) as served:
        conversation = await served.client.conversations.create()
        who = agent(served, tools=[add])
        await run(who, "one", conversation_id=conversation.id)
        await run(who, "two", conversation_id=conversation.id)
        chat = messages(served)
        items = [item.type async for item in served.client.conversations.items.list(conversation.id, order="asc")]
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]
    assert items == [
        *["message", "reasoning", "function_call", "function_call_output", "message"],
        *["message", "message"],
    ]


class Editor:
    """Says that it did what it did not."""

    def create_file(self, operation: Any) -> str:
        return f"Did {operation.path}."

    update_file = delete_file = create_file


KINDS = {
    "shell": ('{"commands": ["ls"]}', ["shell_call", "shell_call_output"]),
    "apply_patch": ('{"type": "delete_file", "path": "a"}', ["apply_patch_call", "apply_patch_call_output"]),
    "local_shell": ('{"command": ["ls"]}', ["local_shell_call", "local_shell_call_output"]),
    "web_search": ('{"query": "rome"}', ["web_search_call"]),
}


@both
@pytest.mark.parametrize("how", ["sqlite", "session", "conversation"])
@pytest.mark.parametrize("kind", KINDS)
async def test_items_of_every_kind_are_kept(run: Run, how: str, kind: str) -> None:
    arguments, items = KINDS[kind]
    tools = [ShellTool(_say), ApplyPatchTool(Editor()), LocalShellTool(_say), WebSearchTool()]
    async with browsing([{"reasoning": "hm"}, call(kind, arguments)], DONE, DONE) as (served, _):
        session_items = await twice(served, run, how, tools)
        chat = messages(served)
    assert session_items == ["message", "reasoning", *items, "message", "message", "message"]
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]
    assert chat[1]["reasoning"] == "hm"


@both
@pytest.mark.parametrize("how", ["sqlite", "session", "conversation"])
async def test_leave_and_what_came_of_it_are_kept(run: Run, how: str) -> None:
    async with stacked([{"reasoning": "hm"}, call("real__note", '{"text": "a"}')], DONE, DONE) as (served, real):
        tool = HostedMCPTool(
            {"type": "mcp", "server_label": "real", "server_url": real.url, "require_approval": "always"},
            on_approval_request=_allow,
        )
        session_items = await twice(served, run, how, [tool])
        chat = messages(served)
    assert session_items == [
        *["message", "mcp_list_tools", "reasoning", "mcp_approval_request", "mcp_approval_response", "mcp_call"],
        *["message", "message", "message"],
    ]
    assert real.notes == ["a"]
    assert roles_of(chat) == ["user", "assistant", "tool", "assistant", "user"]


def _say(_: Any) -> str:
    return "a b"


def _allow(_: Any) -> Any:
    return {"approve": True}


async def twice(served: Served, run: Run, how: str, tools: list[Any]) -> list[str]:
    """Run an agent twice, the first run remembered by the second, and give the types of all that is remembered."""
    who = agent(served, tools=tools)
    if how == "conversation":
        conversation = await served.client.conversations.create()
        for said in ("one", "two"):
            await run(who, said, conversation_id=conversation.id)
        return [item.type async for item in served.client.conversations.items.list(conversation.id, order="asc")]
    session = SQLiteSession("s") if how == "sqlite" else OpenAIConversationsSession(openai_client=served.client)
    try:
        for said in ("one", "two"):
            await run(who, said, session=session)
        return [str(item.get("type", "message")) for item in await session.get_items()]
    finally:
        if isinstance(session, SQLiteSession):
            session.close()
