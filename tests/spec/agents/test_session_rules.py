"""The rules of the Agents API that its types do not show: statuses, bounds, cursors, conflicts, keys and webhooks."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from apis.storage.kv_store import Put
from apis.storage.records import encode_record
from providers.agents.work import TURN_PREFIX
from providers.common.jobs import JobRecord
from tests.support.sdk.openapi_document import described_routes
from tests.support.sdk.sessions import (
    CALL,
    CANCEL,
    FUNCTION,
    NONE,
    create_session,
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
from tests.support.servers.webhook_receiver import SECRET, receiving
from tests.support.waiting import until_empty

Json = dict[str, Any]
BETA = {"OpenAI-Beta": "agents=v1"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(scripted([{"text": "hi"}])) as served:
        yield served


async def refusal(served: Served, path: str, body: Any) -> tuple[int, Json]:
    """The status and the error of a POST that is refused."""
    with pytest.raises(openai.APIStatusError) as raised:
        await served.client.post(f"/agents{path}", body=body, cast_to=object, options={"headers": BETA})
    error: Any = raised.value.body
    return raised.value.status_code, error


MOST_SUBAGENTS = "agent.multi_agent.max_concurrent_subagents"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"stream": True, "input": None}, "input"),
        ({"environment": None}, "environment"),
        ({"environment": {"type": "openai_hosted"}}, "environment.type"),
        ({"environment": {"type": "self_hosted", "workspace_directory": "/"}}, "environment.type"),
        ({"agent": None}, "agent"),
        ({"agent": {"instructions": "x"}}, "agent.model"),
        ({"agent": {"model": "m", "multi_agent": {"enabled": True, "max_concurrent_subagents": 33}}}, MOST_SUBAGENTS),
        ({"agent": {"model": "m", "tools": [{"type": "computer_use"}]}}, "agent.tools[0].type"),
        ({"vault_ids": ["vault_1"]}, "vault_ids"),
        ({"review": "auto_review"}, "review"),
        ({"metadata": {"key": "x" * 513}}, "metadata.key"),
        ({"input": [{"role": "assistant"}]}, "input[0].role"),
    ],
)
async def test_a_session_that_cannot_be_is_refused_by_name(served: Served, fields: Json, param: str) -> None:
    body: Json = {"environment": NONE, "agent": {"model": "scripted"}, "input": "x", **fields}
    status, error = await refusal(served, "/sessions", body)
    assert (status, error["param"]) == (400, param)
    assert (await served.client.beta.agents.sessions.list()).data == []


async def test_an_unknown_agent_is_not_found(served: Served) -> None:
    status, error = await refusal(served, "/sessions", {"environment": NONE, "agent_id": "agent_0", "input": "x"})
    assert (status, error["type"], error["code"]) == (404, "not_found_error", "not_found_error")


@pytest.mark.parametrize(
    "body", [b'{"events":[],"events":[]}', b'\xef\xbb\xbf{"events":[]}', b"[]", b'{"events":null}']
)
async def test_a_body_that_is_no_plain_object_is_refused(served: Served, body: bytes) -> None:
    session = await run_session(served.client)
    with pytest.raises(openai.BadRequestError):
        await served.client.post(
            f"/agents/sessions/{session.id}/events",
            cast_to=object,
            options={"headers": {**BETA, "content-type": "application/json"}},
            content=body,
        )


async def test_creations_answer_201_and_events_202_without_a_body(served: Served) -> None:
    sessions = served.client.beta.agents.sessions.with_raw_response
    created = await sessions.create(agent={"model": "scripted"}, environment=NONE, input="x")
    assert created.status_code == 201
    session = await rest(served.client, json.loads(created.text)["id"])
    sent = await sessions.events.create(session.id, events=[])
    assert (sent.status_code, sent.text) == (202, "")
    assert (await served.client.beta.agents.sessions.retrieve(session.id)) == session


async def test_sessions_are_listed_in_pages_by_agent_and_metadata(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(model="scripted")
    plain = [await run_session(served.client) for _ in range(2)]
    tagged = await agents.sessions.create(agent_id=agent.id, environment=NONE, input="x", metadata={"a": "b", "c": "d"})
    await rest(served.client, tagged.id)
    ids = [plain[0].id, plain[1].id, tagged.id]
    assert [each.id async for each in agents.sessions.list(limit=2)] == ids[::-1]
    assert [each.id async for each in agents.sessions.list(limit=0, order="asc")] == ids
    assert [each.id async for each in agents.sessions.list(agent_id=agent.id, limit=200)] == [tagged.id]
    assert [each.id async for each in agents.sessions.list(metadata={"a": "b"})] == [tagged.id]
    assert (await agents.sessions.list(metadata={"a": "x"})).data == []
    with pytest.raises(openai.NotFoundError):
        await agents.sessions.list(after="sess_0")


async def test_items_and_turns_are_listed_in_pages(served: Served) -> None:
    session = await run_session(served.client)
    for number in range(2):
        await send(served.client, session.id, message(str(number)))
        await rest(served.client, session.id)
    items = await list_items(served.client, session.id)
    sessions = served.client.beta.agents.sessions
    assert [item.id async for item in sessions.items.list(session.id, limit=2)] == [item.id for item in items][::-1]
    assert len((await sessions.items.list(session.id, limit=0)).data) == 1
    turns = await list_turns(served.client, session.id)
    assert [turn.id async for turn in sessions.turns.list(session.id, limit=1)] == [turn.id for turn in turns][::-1]
    second = [item.id async for item in sessions.turns.items.list(turns[1].id, session_id=session.id, limit=1)]
    assert second == [items[3].id, items[2].id]
    for call in (
        sessions.items.list(session.id, after="msg_0"),
        sessions.turns.items.list(turns[0].id, session_id=session.id, after=items[2].id),
    ):
        with pytest.raises(openai.BadRequestError):
            await call
    with pytest.raises(openai.NotFoundError):
        await sessions.turns.list(session.id, after="turn_0")
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await sessions.turns.list(session.id, limit=limit)


async def test_a_session_is_changed_where_the_request_names_a_field(served: Served) -> None:
    sessions = served.client.beta.agents.sessions
    session = await run_session(served.client, instructions="One.")
    with pytest.raises(openai.BadRequestError, match="At least one update field is required"):
        await sessions.update(session.id)
    changed = await sessions.update(
        session.id, metadata={"a": "b"}, agent={"tools": [FUNCTION], "reasoning": {"effort": "low"}}
    )
    assert (changed.metadata, changed.agent.instructions, changed.agent.reasoning.effort) == ({"a": "b"}, "One.", "low")
    assert [tool.type for tool in changed.agent.tools] == ["function"]
    cleared = await sessions.update(session.id, metadata=None, agent={"tools": None})
    assert (cleared.metadata, cleared.agent.tools, cleared.agent.model) == ({}, [], "scripted")


async def test_a_session_with_a_turn_is_not_deleted_and_a_deleted_one_stays_so() -> None:
    async with serving(scripted([CALL], [{"text": "done"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        sessions = served.client.beta.agents.sessions
        with pytest.raises(openai.ConflictError) as raised:
            await sessions.delete(session.id)
        error: Any = raised.value.body
        assert (error["type"], error["code"]) == ("conflict_error", "conflict_error")
        await send(served.client, session.id, CANCEL)
        for _ in range(2):
            deleted = await sessions.delete(session.id)
            assert deleted.to_dict() == {"id": session.id, "object": "agent.session.deleted", "deleted": True}
        with pytest.raises(openai.NotFoundError):
            await sessions.retrieve(session.id)
        with pytest.raises(openai.NotFoundError):
            await sessions.items.list(session.id)
        kv = served.stack.kv_store
        for kind in ("session", "session_state", "turn", "item", "item_number", "input", "kept", "action", "event"):
            assert await kv.scan(f"default/agent_{kind}/") == []
        assert await kv.scan("default/conversation") == []


async def test_a_repeated_request_with_its_key_is_taken_once(served: Served) -> None:
    sessions: Any = served.client.beta.agents.sessions
    headers = {"Idempotency-Key": "k1"}
    fields: Any = {"agent": {"model": "scripted"}, "environment": NONE, "input": "x"}
    first = await sessions.create(**fields, extra_headers=headers)
    stream = await sessions.create(**{**fields, "input": "x", "stream": True}, extra_headers={"Idempotency-Key": "k2"})
    events = [event.to_dict() async for event in stream]
    again = await sessions.create(**{**fields, "stream": True}, extra_headers={"Idempotency-Key": "k2"})
    assert [event.to_dict() async for event in again] == events
    assert (await sessions.create(**fields, extra_headers=headers)).id == first.id
    with pytest.raises(openai.BadRequestError) as raised:
        await sessions.create(**{**fields, "input": "y"}, extra_headers=headers)
    assert raised.value.code == "idempotency_key_reused"
    assert len((await sessions.list()).data) == 2
    await rest(served.client, first.id)
    for _ in range(2):
        await send(served.client, first.id, message("again"), idempotency_key="k1")
    await rest(served.client, first.id)
    assert len(await list_turns(served.client, first.id)) == 2


async def test_two_messages_at_once_are_both_taken(served: Served) -> None:
    session = await run_session(served.client)
    await asyncio.gather(*(send(served.client, session.id, message(str(number))) for number in range(8)))
    await rest(served.client, session.id)
    texts = [item.content[0].text for item in await list_items(served.client, session.id) if item.role == "user"]
    assert sorted(texts[1:]) == [str(number) for number in range(8)]


async def test_the_stream_of_events_begins_now_or_after_a_number(served: Served) -> None:
    session = await run_session(served.client)
    sessions = served.client.beta.agents.sessions
    async with await sessions.events.stream(session.id) as stream:
        await send(served.client, session.id, message("again"))
        live = await anext(aiter(stream))
    assert (live.type, live.to_dict()["sequence_number"]) == ("agent.session.turn.created", 13)
    await rest(served.client, session.id)
    events = await read_log(served.client, session.id, 24)
    assert events[12].to_dict() == live.to_dict()
    assert [turn.to_dict()["sequence_number"] for turn in await list_turns(served.client, session.id)] == [1, 13]
    async with await sessions.events.stream(session.id, extra_query={"starting_after": 11}) as stream:
        assert (await anext(aiter(stream))).to_dict() == events[11].to_dict()
    async with await sessions.events.stream(
        session.id, include_obfuscation=True, extra_query={"starting_after": 0}
    ) as stream:
        async for event in stream:
            if event.type == "agent.session.turn.output_text.delta":
                assert event.obfuscation
                break


async def test_webhooks_are_sent_of_the_changes_of_a_session() -> None:
    names = ["created", "in_progress", "idle", "failed", "action_required"]
    async with receiving() as receiver:
        hook = {
            "url": receiver.url,
            "secret": SECRET,
            "private": True,
            "events": [f"agent.session.{each}" for each in names],
        }
        async with serving(scripted([CALL], [{"text": "done"}]), webhooks={"receivers": [hook]}) as served:
            session = await run_session(served.client, tools=[FUNCTION])
            [action] = session.required_actions
            await send(served.client, session.id, tool_result(action))
            await rest(served.client, session.id)
            events = await receiver.come(5)
    assert sorted(event.type for event in events) == [
        "agent.session.action_required",
        "agent.session.created",
        "agent.session.idle",
        "agent.session.in_progress",
        "agent.session.in_progress",
    ]
    assert {event.data.id for event in events} == {session.id}
    [waiting] = [event for event in events if event.type == "agent.session.action_required"]
    assert waiting.data.required_action.type == "function_call"
    assert {event.data.environment_type for event in events if event is not waiting} == {"none"}


async def test_a_deleted_session_leaves_no_log_of_its_webhooks() -> None:
    async with receiving() as receiver:
        receiver.answer = lambda: 500
        async with serving(scripted([{"text": "done"}]), webhooks={"receivers": [receiver.hook()]}) as served:
            session = await run_session(served.client)
            kv, prefix = served.stack.kv_store, f"default/webhook_delivery/{session.id}/"
            assert len(await kv.scan(prefix)) == 3  # it was created, works and is idle
            await served.client.beta.agents.sessions.delete(session.id)
            assert await kv.scan(prefix) == []
            begun = len(receiver.requests)
            await receiver.arrival(begun + 3)  # what waits is still sent, and is not logged again
            assert await kv.scan(prefix) == []


@pytest.mark.parametrize("path", ["/agents/sessions/s/traces"])
async def test_what_is_not_offered_says_so(served: Served, path: str) -> None:
    with pytest.raises(openai.BadRequestError, match="not offered"):
        await served.client.get(path, cast_to=object, options={"headers": BETA})


def test_a_key_needs_the_scope_of_agents() -> None:
    """A reader sees sessions, and writes none."""
    routes = {(route.method, path): route for path, route in described_routes()}
    assert routes["POST", "/v1/agents"].access.find_scopes("POST") == {"api.agents.write"}
    assert routes["GET", "/v1/agents"].access.find_scopes("GET") == {"read", "api.agents.read", "api.agents.write"}


async def test_a_server_that_gets_no_request_for_agents_does_what_the_store_has_for_them() -> None:
    """The turn of a session that was deleted meanwhile, by another server of the store, ends without a request."""
    async with serving() as served:
        kv = served.stack.kv_store
        await kv.write([Put(f"{TURN_PREFIX}tenant/asess_1", encode_record(JobRecord()))])
        await until_empty(lambda: kv.scan(TURN_PREFIX))


async def test_a_turn_of_a_session_waits_for_nothing_in_this_process() -> None:
    async with serving(scripted([CALL], [{"text": "done"}])) as served:
        session = await run_session(served.client, tools=[FUNCTION])
        kv = served.stack.kv_store
        await until_empty(lambda: kv.scan("/agent_turn"))
        assert served.stack.responses.count_running() == 0
        assert await kv.scan("/run/") == []
        assert session.status == "requires_action"


async def test_a_running_session_shows_its_turn() -> None:
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.2}, {"text": "b"}])) as served:
        session = await create_session(served.client)
        await read_log(served.client, session.id, 7)
        [turn] = await list_turns(served.client, session.id)
        assert (turn.status, turn.completed_at) == ("in_progress", None)
        assert (await served.client.beta.agents.sessions.retrieve(session.id)).status == "in_progress"
        assert [item.status for item in await list_items(served.client, session.id)] == ["completed", "in_progress"]


async def test_requests_at_once_with_one_key_create_one_session(served: Served) -> None:
    """Those that come too late leave no conversation."""
    sessions: Any = served.client.beta.agents.sessions
    fields: Any = {"agent": {"model": "scripted"}, "environment": NONE, "input": "x"}
    created = await asyncio.gather(
        *(sessions.create(**fields, extra_headers={"Idempotency-Key": "k"}) for _ in range(6))
    )
    assert len({session.id for session in created}) == 1
    assert len(await served.stack.kv_store.scan("default/conversation/")) == 1
