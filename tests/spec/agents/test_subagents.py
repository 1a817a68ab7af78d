"""Subagents through the official SDK: their work, their reports, and what an agent may do with them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from apis.storage.records import encode_record
from providers.agents.records import SessionRef
from providers.common.jobs import JobRecord
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.client import sdk_client
from tests.support.sdk.input_model import MODEL, play
from tests.support.sdk.requests import chat_requests
from tests.support.sdk.sessions import (
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
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
AGENTS = {"provider": "kv", "poll_s": 0.05, "retry_s": 0.05}
ENABLED: Any = {"enabled": True}
GET = [call("get", "{}", id="g")]
"""A turn that waits until the client has answered its call."""
WAIT = [call("wait_for_subagents", "{}", id="w")]
COMPLETED = "turn.completed"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serving(MODEL, server={"api_keys": KEYS}, more={"agents": AGENTS}) as served:
        yield served


def create(*turns: Any, **more: Any) -> Any:
    """The call that creates a subagent with these turns."""
    return call("create_subagent", json.dumps({"task": play(*turns), **more}), id=f"create_{json.dumps(more)}")


def order(name: str, **arguments: Any) -> list[Any]:
    """A turn that calls a function about the first subagent."""
    return [call(name, json.dumps({"subagent_id": "$0", **arguments}), id=name)]


async def read_events(served: Served, session_id: str) -> list[Any]:
    """The events of a session that rests, after the first one; their numbers have no gap."""
    [entry] = await served.stack.kv_store.get_many([SessionRef("a", session_id).state_key])
    assert entry is not None
    return await read_log(served.client, session_id, json.loads(entry.value)["events"] - 1)


def outputs(served: Served) -> list[Any]:
    """The results of functions in the last request of a model."""
    return [each.content for each in chat_requests(served)[-1].messages if each.role == "tool"]


async def test_an_agent_reads_the_reports_of_its_subagents(served: Served) -> None:
    before = len(chat_requests(served))
    delegate = [create([{"text": "one"}], name="first"), create([{"text": "two"}], reasoning_effort="low")]
    agent: Any = {"model": "scripted", "instructions": "Lead.", "multi_agent": ENABLED}
    stream = await served.client.beta.agents.sessions.create(
        agent=agent, environment=NONE, input=play(delegate, WAIT), stream=True
    )
    result = await stream.get_final_result()
    assert result.output_text == "Done."
    session = await served.client.beta.agents.sessions.retrieve(result.session_id)
    assert (session.status, session.agent.multi_agent.max_concurrent_subagents) == ("idle", 6)
    first, second = [
        each async for each in served.client.beta.agents.sessions.subagents.list(session.id, order="asc", limit=1)
    ]
    assert (first.name, first.status, first.parent_agent_id, first.closed_at) == (
        "first",
        "active",
        session.agent.id,
        None,
    )
    assert first == await served.client.beta.agents.sessions.subagents.retrieve(first.id, session_id=session.id)
    items = await list_items(served.client, session.id)
    assert [item.type for item in items] == [
        *("message", "create_subagent_call", "create_subagent_call", "wait_for_subagents_call"),
        *("agent_message", "agent_message", "message"),
    ]
    assert [item.reasoning_effort for item in items[1:3]] == [None, "low"]
    assert [item.subagent_id for item in items[1:3]] == [first.id, second.id]
    assert items[3].recipient_agent_ids == [first.id, second.id]
    assert {item.status for item in items[1:4]} == {"completed"}
    reports = [(item.sender_agent_id, item.recipient_agent_id, item.content[0].text) for item in items[4:6]]
    assert reports == [(first.id, session.agent.id, "one"), (second.id, session.agent.id, "two")]
    requests = chat_requests(served)[before:]
    assert len(requests) == 5
    offered = [len(request.tools or ()) for request in requests]
    assert sorted(offered) == [0, 0, 7, 7, 7]
    is_subagent = ["You are a subagent" in str(request.messages[0].content) for request in requests]
    assert is_subagent == [not count for count in offered]
    assert [report["message"] for report in json.loads(outputs(served)[-1])["subagents"]] == ["one", "two"]


async def test_the_events_of_subagents_are_among_those_of_their_session(served: Served) -> None:
    session = await run_session(served.client, play([create([{"text": "one"}])], WAIT), multi_agent=ENABLED)
    events = await read_events(served, session.id)
    [subagent] = (await served.client.beta.agents.sessions.subagents.list(session.id)).data
    turns = [event.turn for event in events if event.type == "agent.session.turn.created"]
    assert [turn.subagent_id for turn in turns] == [None, subagent.id]
    of_subagent = [event for event in events if getattr(event, "turn_id", None) == turns[1].id]
    assert kinds(of_subagent) == [
        *("turn.created", "turn.item.added", "turn.in_progress", "turn.item.added", "turn.content_part.added"),
        *("turn.output_text.delta", "turn.output_text.done", "turn.content_part.done", "turn.item.done", COMPLETED),
    ]
    assert kinds(events).count("subagent.created") == kinds(events).count("idle") == 1
    assert kinds(events)[-1] == "idle"
    assert all(event.subagent == subagent for event in events if event.type == "agent.session.subagent.created")
    api = served.client.beta.agents.sessions.subagents
    [turn] = (await api.turns.list(subagent.id, session_id=session.id)).data
    assert turn == await api.turns.retrieve(turns[1].id, session_id=session.id, subagent_id=subagent.id)
    assert (turn.status, turn.subagent_id, turn.agent_id) == ("completed", subagent.id, session.agent.id)
    items = [each async for each in api.items.list(subagent.id, session_id=session.id, order="asc")]
    assert [item.to_dict() for item in items] == [
        item.to_dict()
        async for item in api.turns.items.list(turn.id, session_id=session.id, subagent_id=subagent.id, order="asc")
    ]
    assert [item.type for item in items] == ["agent_message", "message"]
    [root] = await list_turns(served.client, session.id)
    assert session.usage is not None
    assert root.usage is not None
    assert turn.usage is not None
    assert session.usage.total_tokens == root.usage.total_tokens + turn.usage.total_tokens


async def test_a_client_runs_the_functions_of_subagents(served: Served) -> None:
    stream = await served.client.beta.agents.sessions.create(
        agent={"model": "scripted", "tools": [FUNCTION], "multi_agent": ENABLED},
        environment=NONE,
        input=play([create(GET)], WAIT),
        stream=True,
        tool_handlers={"get": lambda _: "42"},
    )
    assert (await stream.get_final_result()).output_text == "Done."


async def test_an_agent_waits_for_its_subagents_without_a_worker(served: Served) -> None:
    text = play([create(GET)], WAIT)
    session = await run_session(served.client, text, tools=[FUNCTION], multi_agent=ENABLED)
    [action] = list[Any](session.required_actions)
    [subagent] = (await served.client.beta.agents.sessions.subagents.list(session.id)).data
    [turn] = await list_turns(served.client, session.id)
    assert (session.status, turn.status) == ("requires_action", "waiting")
    assert action.turn_id != turn.id
    assert served.stack.responses.count_running() == 0
    assert await served.stack.kv_store.scan("/agent_turn/a/") == []
    with pytest.raises(openai.ConflictError):
        await served.client.beta.agents.sessions.delete(session.id)
    with pytest.raises(openai.BadRequestError, match="Unknown pending tool call"):
        await send(served.client, session.id, {**tool_result(action), "turn_id": turn.id})
    await send(served.client, session.id, tool_result(action))
    session = await rest(served.client, session.id)
    assert (session.status, session.required_actions) == ("idle", [])
    items = [each async for each in served.client.beta.agents.sessions.subagents.items.list(
        subagent.id, session_id=session.id, order="asc"
    )]  # fmt: skip
    assert [item.type for item in items] == ["agent_message", "function_call", "function_call_output", "message"]


async def test_a_message_of_the_user_ends_a_wait(served: Served) -> None:
    text = play([create(GET)], WAIT, [{"text": "Heard."}])
    session = await run_session(served.client, text, tools=[FUNCTION], multi_agent=ENABLED)
    await send(served.client, session.id, message(play()))

    async def has_ended() -> bool:
        return (await list_turns(served.client, session.id))[0].status == "completed"

    await until(has_ended)
    assert json.loads(outputs(served)[-1])["subagents"][0]["status"] == "working"
    session = await rest(served.client, session.id)
    assert (session.status, len(session.required_actions)) == ("requires_action", 1)  # the subagent goes on
    await send(served.client, session.id, tool_result(session.required_actions[0]))
    assert (await rest(served.client, session.id)).status == "idle"


async def test_the_cancellation_of_a_session_ends_its_subagents(served: Served) -> None:
    slow = [{"text": "a"}, {"wait_s": 60}, {"text": "b"}]
    text = play([create(GET), create(slow, name="slow")], WAIT)
    session = await create_session(served.client, text, tools=[FUNCTION], multi_agent=ENABLED)
    api = served.client.beta.agents.sessions

    async def works() -> bool:
        subagents = (await api.subagents.list(session.id)).data
        pages = [await api.subagents.items.list(each.id, session_id=session.id) for each in subagents]
        return len(pages) == 2 and all(len(page.data) == 2 for page in pages)

    await until(works)
    await send(served.client, session.id, CANCEL)
    assert (await rest(served.client, session.id)).status == "idle"
    turns = [
        turn
        for each in (await api.subagents.list(session.id)).data
        for turn in (await api.subagents.turns.list(each.id, session_id=session.id)).data
    ]
    assert [turn.status for turn in turns] == ["cancelled", "cancelled"]
    [wait] = [item for item in await list_items(served.client, session.id) if item.type == "wait_for_subagents_call"]
    assert wait.status == "incomplete"
    before = await served.stack.kv_store.scan("a/conversation/")
    await api.delete(session.id)
    stored_keys = [key for key, _ in await served.stack.kv_store.scan("a/agent_", limit=10_000) if session.id in key]
    assert stored_keys == [SessionRef("a", session.id).end_key]
    assert len(await served.stack.kv_store.scan("a/conversation/")) == len(before) - 3


async def test_an_agent_directs_a_subagent(served: Served) -> None:
    text = play(
        [create(GET)],
        order("interrupt_subagent"),
        WAIT,
        order("send_subagent_input", message=play([{"text": "again"}])),
        order("wait_for_subagents", subagent_ids=["$0"], return_when="any"),
        order("close_subagent"),
        order("send_subagent_input", message="more"),
        order("resume_subagent"),
        [call("list_subagents", "{}", id="l")],
    )
    session = await run_session(served.client, text, tools=[FUNCTION], multi_agent=ENABLED)
    assert (session.status, session.error) == ("idle", None)
    results = outputs(served)
    assert json.loads(results[2])["subagents"][0]["status"] == "cancelled"
    assert json.loads(results[4])["subagents"][0]["message"] == "again"
    assert results[6] == "Error: The subagent is closed: resume it first."
    assert [each["status"] for each in json.loads(results[8])["subagents"]] == ["completed"]
    calls = {item.type: item.status for item in await list_items(served.client, session.id) if "call" in item.type}
    assert calls == {
        **dict.fromkeys(("create_subagent_call", "interrupt_subagent_call", "close_subagent_call"), "completed"),
        **dict.fromkeys(("resume_subagent_call", "wait_for_subagents_call"), "completed"),
        "send_subagent_input_call": "failed",
    }
    events = kinds(await read_events(served, session.id))
    assert [each for each in events if each.startswith("subagent.")] == [
        *("subagent.created", "subagent.closed", "subagent.active")
    ]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call("create_subagent", "{}"), "Error: task: Field required"),
        (call("create_subagent", '{"task": 1}'), "Error: task: Input should be a valid string"),
        (call("create_subagent", json.dumps({"task": "x" * 300_000})), "Error: task: String should have at most"),
        (call("close_subagent", '{"subagent_id": "subagent_0"}'), "Error: No subagent of this session has this id."),
        (call("wait_for_subagents", '{"subagent_ids": ["x"]}'), "Error: No subagent of this session has this id."),
        (call("wait_for_subagents", "{}"), "Error: No subagent works, and all reports were read."),
    ],
)
async def test_a_call_that_cannot_be_answered_says_why(served: Served, wrong: Any, error: str) -> None:
    session = await run_session(served.client, play([wrong]), multi_agent=ENABLED)
    assert (session.status, session.error) == ("idle", None)
    assert outputs(served)[-1].startswith(error)
    items = await list_items(served.client, session.id)
    assert items[1].status == "failed"
    assert (await served.client.beta.agents.sessions.subagents.list(session.id)).data == []


async def test_no_more_subagents_work_at_once_than_the_agent_allows(served: Served) -> None:
    text = play([create(GET, name=str(number)) for number in range(3)], WAIT)
    limited = {"enabled": True, "max_concurrent_subagents": 2}
    session = await run_session(served.client, text, tools=[FUNCTION], multi_agent=limited)
    while session.status == "requires_action":
        for action in session.required_actions:
            await send(served.client, session.id, tool_result(action))
        session = await rest(served.client, session.id)
    assert (session.status, session.error) == ("idle", None)
    assert outputs(served)[2] == "Error: 2 subagents work already: wait for one, or interrupt one."
    statuses = [item.status for item in await list_items(served.client, session.id) if "create" in item.type]
    assert statuses == ["completed", "completed", "failed"]


async def test_a_function_of_the_agent_replaces_one_of_the_same_name(served: Served) -> None:
    own: Any = {**FUNCTION, "name": "create_subagent"}
    session = await run_session(served.client, play([create()]), tools=[own], multi_agent=ENABLED)
    [action] = list[Any](session.required_actions)
    assert (session.status, action.name) == ("requires_action", "create_subagent")
    await send(served.client, session.id, CANCEL)


async def test_nothing_else_has_subagents(served: Served) -> None:
    session = await run_session(served.client, play([create()], [{"text": "x"}]))
    assert session.status == "idle"
    api = served.client.beta.agents.sessions.subagents
    assert (await api.list(session.id)).data == []
    for subagent_id in ("subagent_0", "a/b", "x" * 300):
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(subagent_id, session_id=session.id)
        with pytest.raises(openai.NotFoundError):
            await api.items.list(subagent_id, session_id=session.id)
    with pytest.raises(openai.BadRequestError):
        await api.list(session.id, limit=101)
    with pytest.raises(openai.BadRequestError):
        await api.list(session.id, after="subagent_0")


async def test_tenants_have_their_own_subagents(served: Served) -> None:
    session = await run_session(served.client, play([create([{"text": "one"}])], WAIT), multi_agent=ENABLED)
    [subagent] = (await served.client.beta.agents.sessions.subagents.list(session.id)).data
    async with sdk_client(served.url, "key-b") as other:
        api = other.beta.agents.sessions.subagents
        with pytest.raises(openai.NotFoundError):
            await api.list(session.id)
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(subagent.id, session_id=session.id)
        with pytest.raises(openai.NotFoundError):
            await api.turns.list(subagent.id, session_id=session.id)


@pytest.mark.parametrize("kind", ["session_key", "state_key"])
async def test_a_damaged_subagent_does_not_stop_its_agent(served: Served, kind: str) -> None:
    text = play([create(GET, name="damaged"), create([{"text": "one"}])], WAIT)
    session = await create_session(served.client, text, tools=[FUNCTION], multi_agent=ENABLED)
    api = served.client.beta.agents.sessions

    async def has_one_left() -> bool:
        turns = [await api.subagents.turns.list(each.id, session_id=session.id) for each in subagents]
        return [turn.data[0].status for turn in turns] == ["waiting", "completed"]

    await until(lambda: is_waiting(served, session.id))
    subagents = (await api.subagents.list(session.id, order="asc")).data
    await until(has_one_left)
    ref = SessionRef("a", session.id).subagent(subagents[0].id)
    await served.stack.kv_store.put(getattr(ref, kind), b"junk")
    await served.stack.kv_store.put(ref.job_key, encode_record(JobRecord()))
    await until(lambda: is_idle(served, session.id))
    reports = json.loads(outputs(served)[-1])["subagents"]
    assert [report["status"] for report in reports] == ["failed", "completed"]
    assert (await api.delete(session.id)).deleted


async def test_a_session_with_a_damaged_subagent_can_be_cancelled(served: Served) -> None:
    session = await run_session(served.client, play([create(GET)], WAIT), tools=[FUNCTION], multi_agent=ENABLED)
    api = served.client.beta.agents.sessions
    await until(lambda: is_waiting(served, session.id))
    [subagent] = (await api.subagents.list(session.id)).data
    await served.stack.kv_store.put(SessionRef("a", session.id).subagent(subagent.id).state_key, b"junk")
    await send(served.client, session.id, CANCEL)
    assert (await rest(served.client, session.id)).status == "idle"
    assert (await api.delete(session.id)).deleted


async def is_waiting(served: Served, session_id: str) -> bool:
    return [turn.status for turn in await list_turns(served.client, session_id)] == ["waiting"]


async def is_idle(served: Served, session_id: str) -> bool:
    return (await served.client.beta.agents.sessions.retrieve(session_id)).status == "idle"
