"""Automations through the official SDK: schedules, their invocations, and what each of them begins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import openai
import orjson
import pytest
from openai.types.beta.agents.automations import AutomationInvocation

from apis.storage.kv_store import Put
from tests.support.sdk.answer_shapes import call
from tests.support.sdk.sessions import rest
from tests.support.servers.serving import Served, scripted, serving
from tests.support.waiting import until

Json = dict[str, Any]
NONE: Any = {"type": "none"}
BERLIN = ZoneInfo("Europe/Berlin")
MESSAGE: Any = {"role": "user", "content": [{"type": "input_text", "text": "What is new?"}]}
NEW_SESSION: Any = {
    "type": "new_session",
    "environment": NONE,
    "agent": {"model": "scripted"},
    "input": [MESSAGE],
}
RESPONSE: Any = {"type": "response", "request": {"model": "scripted", "input": "What is new?"}}
HOURLY: Any = {"type": "periodic", "name": "news", "expression": "0 * * * *", "timezone": "Europe/Berlin"}


class Clock:
    """The clock by which the automations of servers go."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 28, 12, 30, tzinfo=BERLIN).timestamp()
        self._automations: list[Any] = []

    @classmethod
    async def of(cls, *served: Served) -> "Clock":
        """Return a clock of these servers, whose agents it loads."""
        clock = cls()
        for each in served:
            assert each.stack.agents is not None
            automations = (await each.stack.agents.load()).automations
            automations.now = lambda: clock.now
            clock._automations.append(automations)
        return clock

    def set(self, *moment: int) -> None:
        """Set the clock to a time in Berlin, and have the servers look at it."""
        self.now = datetime(*moment, tzinfo=BERLIN).timestamp()  # pyright: ignore[reportArgumentType] - year to minute
        for automations in self._automations:
            automations.on_due()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


def times_of(automation: Any) -> list[int]:
    """Return the next times of an automation, an extension."""
    return automation.next_times


async def invocations_of(served: Served, automation_id: str) -> list[AutomationInvocation]:
    """Return the invocations of an automation, oldest first."""
    listed = served.client.beta.agents.automations.invocations.list(automation_id, order="asc")
    return [each async for each in listed]


async def wait_for_invocations(served: Served, automation_id: str, *statuses: str) -> list[AutomationInvocation]:
    """Return the invocations of an automation once they have these statuses."""
    listed: list[AutomationInvocation] = []

    async def has_all() -> bool:
        listed[:] = await invocations_of(served, automation_id)
        return [each.status for each in listed] == [*statuses]

    try:
        await until(has_all)
    except TimeoutError:
        pytest.fail(f"{[(each.status, each.error) for each in listed]}, not {statuses}")
    return listed


async def test_an_hour_begins_a_session(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=NEW_SESSION, metadata={"team": "a"})
    assert (automation.status, automation.type, automation.metadata) == ("active", "periodic", {"team": "a"})
    clock.set(2026, 3, 28, 13, 0)
    (invocation,) = await wait_for_invocations(served, automation.id, "completed")
    assert invocation.scheduled_at == clock.now
    assert invocation.source.type == "automation"
    assert invocation.source.automation.id == automation.id
    assert invocation.session_id is not None
    sessions = served.client.beta.agents.sessions
    assert (await rest(served.client, invocation.session_id)).status == "idle"
    items = [item async for item in sessions.items.list(invocation.session_id, order="asc")]
    assert [item.type for item in items] == ["message", "message"]


async def test_a_response_is_a_target_too(served: Served) -> None:
    automations = served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=RESPONSE)
    invocation = await automations.invocations.create(automation.id)
    assert (invocation.status, invocation.source.type, invocation.scheduled_at) == ("queued", "manual", None)
    (ended,) = await wait_for_invocations(served, automation.id, "completed")
    response_id: Any = (ended.model_extra or {})["response_id"]

    async def is_completed() -> bool:
        return (await served.client.responses.retrieve(response_id)).status == "completed"

    await until(is_completed)


async def test_times_that_passed_while_all_servers_were_off_come_once(served: Served) -> None:
    clock = await Clock.of(served)
    automation = await served.client.beta.agents.automations.create(**HOURLY, target=RESPONSE)
    clock.set(2026, 3, 31, 9, 40)
    (invocation,) = await wait_for_invocations(served, automation.id, "completed")
    assert invocation.scheduled_at == datetime(2026, 3, 31, 9, 0, tzinfo=BERLIN).timestamp()
    clock.set(2026, 3, 31, 10, 0)
    await wait_for_invocations(served, automation.id, "completed", "completed")


async def test_a_clock_that_goes_back_begins_nothing_again(served: Served) -> None:
    clock = await Clock.of(served)
    automation = await served.client.beta.agents.automations.create(**HOURLY, target=RESPONSE)
    clock.set(2026, 3, 28, 13, 0)
    await wait_for_invocations(served, automation.id, "completed")
    for moment in ((2026, 3, 28, 12, 0), (2026, 3, 28, 13, 0), (2026, 3, 28, 13, 30)):
        clock.set(*moment)
        await asyncio.sleep(0.05)
    clock.set(2026, 3, 28, 14, 0)
    await wait_for_invocations(served, automation.id, "completed", "completed")


@pytest.mark.parametrize(
    ("expression", "day", "hours"),
    [
        ("30 2 * * *", (2026, 3, 29), [3.0]),  # 2:30 does not exist: right after the gap
        ("30 2 * * *", (2026, 10, 25), [2.5]),  # 2:30 comes twice: once
    ],
)
async def test_daylight_saving_moves_a_time_and_repeats_none(
    served: Served, expression: str, day: tuple[int, int, int], hours: list[float]
) -> None:
    clock = await Clock.of(served)
    clock.set(*day, 0, 30)
    schedule: Any = {**HOURLY, "expression": expression, "target": RESPONSE}
    automations: Any = served.client.beta.agents.automations
    automation = await automations.create(**schedule)
    expected = [datetime(*day, int(hour), int(hour % 1 * 60), tzinfo=BERLIN).timestamp() for hour in hours]
    for moment in ((*day, 1, 59), *((*day, 2, minute) for minute in (0, 30, 59)), (*day, 3, 0), (*day, 12, 0)):
        clock.set(*moment)
        await asyncio.sleep(0.05)
    listed = await wait_for_invocations(served, automation.id, *("completed" for _ in hours))
    assert [each.scheduled_at for each in listed] == expected


async def test_one_time(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    run_at = int(clock.now) + 600
    automation = await automations.create(type="once", name="later", run_at=run_at, target=RESPONSE)
    assert automation.type == "once"
    clock.set(2026, 3, 28, 12, 40)
    (invocation,) = await wait_for_invocations(served, automation.id, "completed")
    assert invocation.scheduled_at == run_at
    assert (await automations.retrieve(automation.id)).status == "completed"
    with pytest.raises(openai.ConflictError):
        await automations.pause(automation.id)
    with pytest.raises(openai.BadRequestError, match="has come already"):
        await automations.update(automation.id, run_at=run_at + 900)


@pytest.fixture
async def calling() -> AsyncIterator[Served]:
    async with serving(scripted([call("weather", id="c1")], [{"text": "Sun."}], [{"text": "On it."}])) as served:
        yield served


async def test_a_session_gets_instructions_when_it_is_idle(calling: Served) -> None:
    clock, client, served = await Clock.of(calling), calling.client.beta.agents, calling
    session = await client.sessions.create(
        agent={"model": "scripted", "tools": [WEATHER]}, environment=NONE, input="Hi"
    )
    assert (await rest(served.client, session.id)).status == "requires_action"
    target: Any = {"type": "existing_session", "session_id": session.id, "instructions": "Go on."}
    automation = await client.automations.create(**HOURLY, target=target)
    clock.set(2026, 3, 28, 13, 0)
    await wait_for_invocations(served, automation.id, "queued")
    clock.set(2026, 3, 28, 14, 0)
    queued, skipped = await wait_for_invocations(served, automation.id, "queued", "skipped")
    assert skipped.skip_reason == "pending_delivery"
    (action,) = (await client.sessions.retrieve(session.id)).required_actions
    result: Any = {"type": "agent.session.input.tool_result", "success": True, "output": "sun"}
    assert action.type == "function_call"
    events: Any = [{**result, "turn_id": action.turn_id, "call_id": action.call_id}]
    await client.sessions.events.create(session.id, events=events)
    assert (await rest(served.client, session.id)).status == "idle"
    clock.set(2026, 3, 28, 14, 10)
    delivered, _ = await wait_for_invocations(served, automation.id, "completed", "skipped")
    assert (delivered.id, delivered.session_id) == (queued.id, session.id)
    assert (await rest(served.client, session.id)).status == "idle"
    turns = [turn async for turn in client.sessions.turns.list(session.id)]
    assert len(turns) == 2
    listed = [each.id async for each in client.automations.list(session_id=session.id)]
    assert listed == [automation.id]


async def test_an_automation_rests_once_its_session_is_gone(served: Served) -> None:
    clock, client = await Clock.of(served), served.client.beta.agents
    session = await client.sessions.create(agent={"model": "scripted"}, environment=NONE, input="Hi")
    assert (await rest(served.client, session.id)).status == "idle"
    target: Any = {"type": "existing_session", "session_id": session.id, "instructions": "Go on."}
    automation = await client.automations.create(**HOURLY, target=target)
    await client.sessions.delete(session.id)
    clock.set(2026, 3, 28, 13, 0)
    (failed,) = await wait_for_invocations(served, automation.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "session_not_found"
    rests = await client.automations.retrieve(automation.id)
    assert (rests.status, rests.pause_reason) == ("paused", "target_session_failed")


async def test_pause_and_resume(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=RESPONSE)
    next_times = [int(clock.now) + 1800 + 3600 * hours for hours in range(5)]
    assert [times_of(each) for each in (automation, await automations.retrieve(automation.id))] == [next_times] * 2
    assert [times_of(each) async for each in automations.list()] == [next_times[:1]]
    paused = await automations.pause(automation.id)
    assert (paused.status, times_of(paused)) == ("paused", [])
    clock.set(2026, 3, 28, 15, 0)
    await asyncio.sleep(0.05)
    assert (await automations.resume(automation.id)).status == "active"
    clock.set(2026, 3, 28, 16, 0)
    (invocation,) = await wait_for_invocations(served, automation.id, "completed")
    assert invocation.scheduled_at == clock.now


async def test_changes_and_deletion(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=RESPONSE)
    changed = await automations.update(automation.id, expression="15 * * * *", name="quarter")
    assert (changed.type == "periodic" and changed.expression, changed.name) == ("15 * * * *", "quarter")
    clock.set(2026, 3, 28, 13, 15)
    (invocation,) = await wait_for_invocations(served, automation.id, "completed")
    assert (await automations.invocations.retrieve(invocation.id, automation_id=automation.id)).id == invocation.id
    assert (await automations.delete(automation.id)).deleted
    for request in (automations.retrieve(automation.id), automations.invocations.create(automation.id)):
        with pytest.raises(openai.NotFoundError):
            await request
    assert not await served.stack.kv_store.scan("/automation_due/")


BAD: list[tuple[Json, str]] = [
    ({"expression": "* * * *"}, "expression"),
    ({"expression": "0 0 31 2 *"}, "expression"),
    ({"expression": "61 * * * *"}, "expression"),
    ({"expression": "* * * * * *"}, "expression"),
    ({"timezone": "Mars/Olympus"}, "timezone"),
    ({"timezone": "../../etc/passwd"}, "timezone"),
    ({"run_at": 1}, "run_at"),
    ({"type": "once", "expression": None, "timezone": None, "run_at": 1}, "run_at"),
    ({"name": ""}, "name"),
    ({"target": {**NEW_SESSION, "input": []}}, "target.input"),
    ({"target": {**NEW_SESSION, "environment": {"type": "openai_hosted"}}}, "target.environment"),
    ({"target": {"type": "existing_session", "session_id": "sess_none", "instructions": "x"}}, "session_id"),
    ({"target": {"type": "response", "request": {"input": "x" * 2**21, "model": "scripted"}}}, "target"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[f"{param}-{index}" for index, (_, param) in enumerate(BAD)])
async def test_bad_input_names_its_field(served: Served, change: Json, param: str) -> None:
    fields = {name: value for name, value in {**HOURLY, "target": RESPONSE, **change}.items() if value is not None}
    with pytest.raises(openai.APIStatusError) as raised:
        await served.client.beta.agents.automations.create(**fields)
    body: Any = raised.value.body
    assert raised.value.status_code in (400, 404)
    assert str(body["param"]).startswith(param)


async def test_secrets_of_a_target_are_not_shown(served: Served) -> None:
    secret = {"server_url": "https://mcp.example/", "authorization": "hidden-1", "headers": {"x-key": "hidden-2"}}
    tool = {"type": "mcp", "server_label": "a", "transport": {"type": "http", **secret}}
    agent = {**NEW_SESSION, "agent": {"model": "scripted", "tools": [tool]}}
    automations: Any = served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=agent)
    text = repr(automation) + repr(await automations.retrieve(automation.id))
    assert "mcp.example" in text
    assert "hidden" not in text


async def test_two_servers_begin_each_time_once(tmp_path: Path) -> None:
    store = {"provider": "sqlite", "path": str(tmp_path / "store.db")}
    async with AsyncExitStack() as servers:
        both = [await servers.enter_async_context(serving(kv_store=store)) for _ in range(2)]
        clock, automations = await Clock.of(*both), both[0].client.beta.agents.automations
        created = [await automations.create(**HOURLY, target=RESPONSE) for _ in range(10)]
        for hour in (13, 14, 15):
            clock.set(2026, 3, 28, hour, 0)
            for automation in created:
                await wait_for_invocations(both[hour % 2], automation.id, *["completed"] * (hour - 12))


async def test_an_automation_whose_time_zone_this_machine_does_not_know_can_be_seen_and_mended(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    automation = await automations.create(**HOURLY, target=NEW_SESSION)
    kv = served.stack.kv_store
    [(key, entry)] = await kv.scan("default/automation/")
    await kv.write([Put(key, entry.value.replace(b"Europe/Berlin", b"Mars/Olympus"))])  # by a machine that knows it
    assert times_of(await automations.retrieve(automation.id)) == times_of(automation)[:1]
    await automations.invocations.create(automation.id)
    await wait_for_invocations(served, automation.id, "completed")
    assert (await automations.pause(automation.id)).status == "paused"
    with pytest.raises(openai.BadRequestError) as raised:
        await automations.resume(automation.id)
    assert raised.value.param == "timezone"
    await automations.update(automation.id, timezone="Europe/Berlin")
    assert times_of(await automations.resume(automation.id)) == times_of(automation)
    clock.set(2026, 3, 28, 13, 0)
    await wait_for_invocations(served, automation.id, "completed", "completed")


async def test_a_damaged_automation_stops_only_itself(served: Served) -> None:
    clock, automations = await Clock.of(served), served.client.beta.agents.automations
    damaged, whole = [await automations.create(**HOURLY, target=RESPONSE) for _ in range(2)]
    (key,) = [
        key for key, _ in await served.stack.kv_store.scan("", limit=10_000) if key.endswith(f"automation/{damaged.id}")
    ]
    await served.stack.kv_store.put(key, b"{")
    clock.set(2026, 3, 28, 13, 0)
    await wait_for_invocations(served, whole.id, "completed")
    assert [each.id async for each in automations.list()] == [whole.id]
    await automations.delete(damaged.id)
    with pytest.raises(openai.NotFoundError):
        await automations.retrieve(damaged.id)


async def test_a_damaged_due_row_silences_nothing(served: Served) -> None:
    clock = await Clock.of(served)
    automation = await served.client.beta.agents.automations.create(**HOURLY, target=RESPONSE)
    kv = served.stack.kv_store
    (key,) = [key for key, _ in await kv.scan("/automation_due/") if key.endswith(automation.id)]
    await kv.put(key, b"{")
    for hour in (13, 14):
        clock.set(2026, 3, 28, hour, 0)
        await wait_for_invocations(served, automation.id, *["completed"] * (hour - 12))


async def test_a_damaged_invocation_does_not_stop_those_after_it() -> None:
    """It waits for a session that works, and is damaged meanwhile."""
    async with serving(scripted([{"text": "a"}, {"wait_s": 0.3}, {"text": "b"}])) as served:
        clock, sessions = await Clock.of(served), served.client.beta.agents.sessions
        session = await sessions.create(agent={"model": "scripted"}, environment=NONE, input="work")
        target: Any = {"type": "existing_session", "session_id": session.id, "instructions": "Go on."}
        automation = await served.client.beta.agents.automations.create(**HOURLY, target=target)
        clock.set(2026, 3, 28, 13, 0)
        [invocation] = await wait_for_invocations(served, automation.id, "queued")
        await served.stack.kv_store.put(f"default/automation_invocation/{automation.id}/{invocation.id}", b"{")
        await rest(served.client, session.id)
        clock.set(2026, 3, 28, 13, 1)  # the delivery is tried again

        async def is_over() -> bool:
            entry = await served.stack.kv_store.get(f"default/automation/{automation.id}")
            return entry is not None and not orjson.loads(entry.value)["queued"]

        await until(is_over)
        clock.set(2026, 3, 28, 14, 0)
        await wait_for_invocations(served, automation.id, "completed")


WEATHER: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}


SECRET_TOOLS: dict[str, Json] = {
    "the path of an MCP server": {"type": "mcp", "server_label": "x", "server_url": "https://example.com/mcp"},
    "a token": {"type": "mcp", "server_label": "x", "server_url": "https://example.com", "authorization": "sk-secret"},
    "a header": {"type": "mcp", "server_label": "x", "server_url": "https://example.com", "headers": {"X": "secret"}},
}


@pytest.mark.parametrize("tool", SECRET_TOOLS)
async def test_secrets_of_a_response_are_not_shown_either(served: Served, tool: str) -> None:
    api: Any = served.client.beta.agents.automations
    target: Json = {"type": "response", "request": {**RESPONSE["request"], "tools": [SECRET_TOOLS[tool]]}}
    automation = await api.create(**HOURLY, target=RESPONSE)
    changed = await api.update(automation.id, target=target)
    text = repr([await api.create(**HOURLY, target=target), changed, [each async for each in api.list()]])
    assert "https://example.com" in text
    assert [secret for secret in ("/mcp", "secret") if secret in text] == []


async def test_numbers_beyond_64_bits_stay_where_they_are_sent() -> None:
    """A schema may have any number, and no listing fails for it."""
    schema: Json = {"type": "object", "properties": {"a": {"type": "number", "maximum": 10**30}}}
    function: Json = {"type": "function", "name": "f", "parameters": schema}
    async with serving(scripted([{"text": "ok"}])) as served:
        client = served.client
        target: Json = {"type": "response", "request": {**RESPONSE["request"], "tools": [function]}}
        api: Any = client.beta.agents
        await api.automations.create(**HOURLY, target=target)
        agent = await api.create(model="scripted", tools=[{**function, "description": "d"}])
        response = await client.responses.create(model=f"agent/{agent.id}", input="hi")
        tools: Any = response.tools
        assert tools[0].parameters["properties"]["a"]["maximum"] == 1e30
        chat: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
        await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], tools=[chat]
        )
        for listing in (api.list(), api.automations.list()):
            assert len((await listing).data) == 1
