"""Sessions through the official SDK: their turns, events and items, and the functions that their clients run."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.beta.agents import AgentTurnResultError
from pydantic import BaseModel

from tests.support.sdk.client import sdk_client
from tests.support.sdk.requests import messages
from tests.support.sdk.sessions import (
    CALL,
    CANCEL,
    FUNCTION,
    NONE,
    create_session,
    kinds,
    list_items,
    list_turns,
    message,
    read_log,
    rest,
    run_session,
    send,
    tool_result,
)
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
FIRST_TURN = [
    *("created", "turn.created", "turn.item.added", "in_progress", "turn.in_progress"),
    *("turn.item.added", "turn.content_part.added", "turn.output_text.delta", "turn.output_text.done"),
    *("turn.content_part.done", "turn.item.done", "turn.completed", "idle"),
]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(scripted([{"text": "hi"}])) as served:
        yield served


def said(served: Served) -> list[Any]:
    return [(each["role"], each.get("content")) for each in messages(served)]


async def test_deltas_of_one_text_that_come_together_are_one_event() -> None:
    words = [f"{number} " for number in range(200)]
    async with serving(scripted([{"text": words}])) as served:
        agent: Any = {"model": "scripted"}
        events = await served.client.beta.agents.sessions.create(agent=agent, environment=NONE, input="hi", stream=True)
        deltas = [event.delta async for event in events if event.type == "agent.session.turn.output_text.delta"]
    assert "".join(deltas) == "".join(words)
    assert len(deltas) < 100


async def test_messages_that_come_together_are_read_together() -> None:
    async with serving(scripted([{"text": "hi"}])) as served:
        session = await run_session(served.client)
        await send(served.client, session.id, message("one"), message("two"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert said(served)[-2:] == [("user", "one"), ("user", "two")]
        assert len(await list_turns(served.client, session.id)) == 2


async def test_a_session_streams_its_first_turn_and_ends_idle(served: Served) -> None:
    sessions = served.client.beta.agents.sessions
    agent: Any = {"model": "scripted", "instructions": "Be brief."}
    stream = await sessions.create(agent=agent, environment=NONE, input="hello", stream=True, metadata={"a": "b"})
    assert stream.response.status_code == 201
    events: list[Any] = [event async for event in stream]
    assert kinds(events) == FIRST_TURN
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert len({event.event_id for event in events}) == len(events)
    assert (events[1].turn.status, events[4].turn.status, events[-2].turn.status) == (
        "queued",
        "in_progress",
        "completed",
    )
    assert (events[2].output_index, events[5].output_index) == (None, 0)
    assert events[-2].usage.total_tokens > 0
    assert said(served) == [("developer", "Be brief."), ("user", "hello")]
    session = await sessions.retrieve(events[0].session.id)
    assert session.to_dict() == events[-1].session.to_dict()
    assert (session.status, session.metadata, session.vault_ids, session.error) == ("idle", {"a": "b"}, [], None)
    assert session.agent.instructions == "Be brief."
    user, answer = await list_items(served.client, session.id)
    assert (user.role, user.content[0].text, answer.output_text, answer.status) == ("user", "hello", "hi", "completed")
    [turn] = await list_turns(served.client, session.id)
    assert turn == await sessions.turns.retrieve(turn.id, session_id=session.id)
    assert (turn.status, turn.agent_id, turn.usage) == ("completed", session.agent.id, session.usage)
    page = await served.client.get(
        f"/agents/sessions/{session.id}/turns/{turn.id}/items",
        cast_to=dict[str, Any],
        options={"headers": {"OpenAI-Beta": "agents=v1"}},
    )
    assert [item["id"] for item in page["data"]] == [answer.id, user.id]


async def test_a_session_takes_a_stored_agent_and_fields_in_its_place(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(model="scripted", name="A", instructions="One.", tools=[{"type": "tool_search"}])
    session = await agents.sessions.create(
        agent_id=agent.id,
        agent={"instructions": "Two."},
        environment=NONE,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    )
    assert (session.agent.id, session.agent.name, session.agent.instructions) == (agent.id, "A", "Two.")
    assert session.agent.tools == []
    assert (await rest(served.client, session.id)).status == "idle"
    assert said(served) == [("developer", "Two."), ("user", "x")]
    await agents.delete(agent.id)
    await send(served.client, session.id, message("again"))
    assert (await rest(served.client, session.id)).status == "idle"
    assert said(served)[1:] == [("user", "x"), ("assistant", "hi"), ("user", "again")]


async def test_the_helper_of_the_sdk_follows_a_turn_and_reads_its_result() -> None:
    class Answer(BaseModel):
        city: str

    async with serving(scripted([{"text": "hi"}], [{"text": '{"city": "Bonn"}'}])) as served:
        session = await run_session(served.client)
        async with served.client.beta.agents.sessions.stream(session.id, input="q", output_type=Answer) as stream:
            result = await stream.get_final_result()
        assert result.output_parsed == Answer(city="Bonn")
        stream = await served.client.beta.agents.sessions.create(
            agent={"model": "scripted"}, environment=NONE, input="x", stream=True
        )
        assert (await stream.get_final_result()).output_text == "hi"


async def test_the_helper_of_the_sdk_runs_functions() -> None:
    turns = scripted([{"text": "hi"}], [{"call": "get", "arguments": '{"a": 1}', "id": "call_1"}], [{"text": "done"}])
    async with serving(turns) as served:
        session = await run_session(served.client, tools=[FUNCTION])

        async def get(arguments: Json) -> str:
            return f"result of {arguments['a']}"

        stream = served.client.beta.agents.sessions.stream(session.id, input="q", tool_handlers={"get": get})
        async with stream as events:
            result = await events.get_final_result()
        assert result.output_text == "done"
        assert said(served)[-1] == ("tool", "result of 1")
        items = await list_items(served.client, session.id)
        assert kinds(items) == ["message", "message", "message", "function_call", "function_call_output", "message"]
        assert items[3].arguments == {"a": 1}
        assert (await rest(served.client, session.id)).status == "idle"


async def test_a_turn_waits_for_all_results_of_its_calls() -> None:
    calls = [CALL, {"call": "get", "arguments": "{}", "id": "call_2"}]
    async with serving(scripted([{"calls": calls}], [{"text": "done"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        assert session.status == "requires_action"
        actions: Any = session.required_actions
        first, second = actions
        assert (first.type, first.name, first.arguments) == ("function_call", "get", {"a": 1})
        [turn] = await list_turns(served.client, session.id)
        assert (turn.status, turn.id) == ("waiting", first.turn_id)
        await send(served.client, session.id, tool_result(second, "two"))
        session = await rest(served.client, session.id)
        actions = session.required_actions
        assert [action.call_id for action in actions] == ["call_1"]
        await send(served.client, session.id, tool_result(first, None, success=False, error="broken"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert said(served)[-2:] == [("tool", "two"), ("tool", "broken")]
        outputs = [item for item in await list_items(served.client, session.id) if item.type == "function_call_output"]
        assert [(item.status, item.output, item.error) for item in outputs] == [
            ("completed", "two", None),
            ("failed", None, "broken"),
        ]
        assert len(await list_turns(served.client, session.id)) == 1


async def test_a_result_that_nothing_waits_for_is_refused_in_the_words_that_the_sdk_reads() -> None:
    async with serving(scripted([CALL], [{"text": "done"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        [action] = session.required_actions
        wrong = [
            {**tool_result(action), "call_id": "call_9"},
            {**tool_result(action), "turn_id": "turn_9"},
        ]
        for result in wrong:
            with pytest.raises(openai.BadRequestError) as raised:
                await send(served.client, session.id, message("in vain"), result)
            body: Any = raised.value.body
            assert body["code"] == body["type"] == "invalid_request_error"
            assert body["message"] == f"Unknown pending tool call: {result['call_id']}"
        approval = {"type": "mcp_tool_call", "decision": "approve"}
        result = {"type": "agent.session.input.mcp_approval_request_result", "request_id": "r", "response": approval}
        with pytest.raises(openai.BadRequestError, match="Unknown pending approval request: r"):
            await send(served.client, session.id, result)
        assert len(await list_items(served.client, session.id)) == 2


async def test_a_function_is_answered_after_a_restart_of_the_server(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with serving(scripted([CALL]), kv_store=store) as served:
        session = await run_session(served.client, tools=[FUNCTION])
    async with serving(scripted([{"text": "done"}]), kv_store=store) as served:
        await send(served.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(served.client, session.id)).status == "idle"
        assert said(served)[-1] == ("tool", "42")
        assert (await list_items(served.client, session.id))[-1].output_text == "done"


async def test_a_message_to_a_running_turn_is_read_by_the_turn() -> None:
    async with serving(scripted([{"text": "one "}, {"wait_s": 0.3}, {"text": "two"}], [{"text": "three"}])) as served:
        session = await create_session(served.client)
        await read_log(served.client, session.id, 6)
        await send(served.client, session.id, message("and more"))
        assert (await rest(served.client, session.id)).status == "idle"
        [turn] = await list_turns(served.client, session.id)
        assert said(served)[-1] == ("user", "and more")
        items = await list_items(served.client, session.id)
        assert {item.turn_id for item in items} == {turn.id}
        assert items[-1].output_text == "three"


@pytest.mark.parametrize("text", ["one", ""])
async def test_a_running_turn_is_cancelled(text: str) -> None:
    async with serving(scripted([{"text": text}, {"wait_s": 30}], [{"text": "next"}])) as served:
        session = await create_session(served.client)
        await read_log(served.client, session.id, 7 if text else 4)
        await send(served.client, session.id, CANCEL)
        session = await rest(served.client, session.id)
        [turn] = await list_turns(served.client, session.id)
        assert (session.status, turn.status, session.error) == ("idle", "cancelled", None)
        await send(served.client, session.id, message("go on"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert [content for role, content in said(served) if role == "user"] == ["hello", "go on"]


async def test_a_waiting_turn_is_cancelled_and_its_calls_have_no_result() -> None:
    async with serving(scripted([CALL], [{"text": "next"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        await send(served.client, session.id, CANCEL)
        session = await rest(served.client, session.id)
        assert (session.status, session.required_actions) == ("idle", [])
        await send(served.client, session.id, CANCEL)
        await send(served.client, session.id, message("go on"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert said(served)[-2:] == [
            ("tool", "The call was cancelled before it had a result."),
            ("user", "go on"),
        ]
        assert [turn.status for turn in await list_turns(served.client, session.id)] == ["cancelled", "completed"]


async def test_a_message_after_a_cancellation_begins_the_next_turn() -> None:
    async with serving(scripted([{"text": "one"}, {"wait_s": 30}], [{"text": "next"}])) as served:
        session = await create_session(served.client)
        await read_log(served.client, session.id, 7)
        await send(served.client, session.id, CANCEL, message("instead"))
        assert (await rest(served.client, session.id)).status == "idle"
        assert [turn.status for turn in await list_turns(served.client, session.id)] == ["cancelled", "completed"]


async def test_a_turn_goes_on_after_a_failure_of_its_upstream() -> None:
    async with serving(scripted([{"text": "be"}, {"fail": "lost"}], [{"text": "better"}])) as served:
        session = await run_session(served.client)
        assert session.status == "idle"
        [turn] = await list_turns(served.client, session.id)
        assert turn.status == "completed"
        assert [content for role, content in said(served) if role == "user"] == ["hello"]
        items = await list_items(served.client, session.id)
        assert [(item.output_text, item.status) for item in items[1:]] == [
            ("be", "incomplete"),
            ("better", "completed"),
        ]


async def test_a_failed_session_starts_again_with_new_input() -> None:
    lost: list[Json] = [{"fail": "lost"}]
    async with serving(scripted(lost, lost, lost, [{"text": "better"}])) as served:
        session = await run_session(served.client)
        [turn] = await list_turns(served.client, session.id)
        assert (session.status, turn.status, turn.error.code) == ("failed", "failed", "server_error")
        assert session.error == turn.error.message
        events = await read_log(served.client, session.id, 6)
        assert kinds(events[-2:]) == ["turn.failed", "failed"]
        await send(served.client, session.id, message("again"))
        session = await rest(served.client, session.id)
        assert (session.status, session.error) == ("idle", None)
        assert [content for role, content in said(served) if role == "user"] == ["hello", "again"]


async def test_an_input_that_no_model_takes_fails_its_turn_alone() -> None:
    async with serving(scripted([{"text": "hi"}])) as served:
        image: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        session = await served.client.beta.agents.sessions.create(
            agent={"model": "scripted"}, environment=NONE, input=[{"role": "user", "content": [image]}]
        )
        session = await rest(served.client, session.id)
        [turn] = await list_turns(served.client, session.id)
        if turn.status == "failed":
            assert turn.error.code == "invalid_request"
        await send(served.client, session.id, message("text"))
        assert (await rest(served.client, session.id)).status == "idle"


async def test_a_long_conversation_is_compacted_by_itself() -> None:
    model = scripted([{"text": "word " * 60}], [{"text": "A summary."}], [{"text": "two"}], [{"text": "three"}])
    described = {**model, "provider": "tests.support.models.described_model:Described", "context_tokens": 75}
    async with serving(described) as served:
        session = await run_session(served.client)
        for text in ("go on", "and on"):
            await send(served.client, session.id, message(text))
            assert (await rest(served.client, session.id)).status == "idle"
        contents = [str(content) for _, content in said(served)]
        assert any("A summary." in content for content in contents)
        assert not any("word word" in content for content in contents)
        items = await list_items(served.client, session.id)
    assert [item.role for item in items] == ["user", "assistant"] * 3


async def test_a_session_that_rests_was_active_when_its_turn_ended(served: Served) -> None:
    session = await run_session(served.client)
    [turn] = await list_turns(served.client, session.id)
    assert session.last_active_at == turn.completed_at


async def test_the_result_of_a_failed_turn_raises() -> None:
    lost: list[Json] = [{"fail": "lost"}]
    async with serving(scripted([{"text": "hi"}], lost, lost, lost)) as served:
        session = await run_session(served.client)
        with pytest.raises(AgentTurnResultError):
            async with served.client.beta.agents.sessions.stream(session.id, input="q") as stream:
                await stream.get_final_result()


async def test_tenants_have_their_own_sessions() -> None:
    keys = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
    async with serving(server={"api_keys": keys}) as served, sdk_client(served.url, "key-b") as other:
        session = await run_session(served.client)
        [turn] = await list_turns(served.client, session.id)
        theirs = other.beta.agents.sessions
        assert (await theirs.list()).data == []
        for call in (
            theirs.retrieve(session.id),
            theirs.update(session.id, metadata={}),
            theirs.delete(session.id),
            theirs.events.create(session.id, events=[CANCEL]),
            theirs.events.stream(session.id),
            theirs.items.list(session.id),
            theirs.turns.list(session.id),
            theirs.turns.retrieve(turn.id, session_id=session.id),
            theirs.turns.items.list(turn.id, session_id=session.id),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                await call
            assert raised.value.code == "not_found_error"
