"""Sessions of agents through the SDK: created, followed to their rest, and held against the laws of their log."""

import asyncio
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI
from openai.types.beta import AgentSession

from tests.support.waiting import until_status

NONE: Any = {"type": "none"}
FUNCTION: Any = {"type": "function", "name": "get", "description": "d", "parameters": {"type": "object"}}
"""A function that the client runs."""
CALL: Any = {"call": "get", "arguments": '{"a": 1}', "id": "call_1"}
"""The call of it, in a script of the model."""
RESTING = ("idle", "failed", "requires_action")


async def create_session(client: AsyncOpenAI, text: str = "hello", **agent: Any) -> AgentSession:
    """A session of the scripted model that has begun its first turn."""
    fields: Any = {"model": "scripted", **agent}
    return await client.beta.agents.sessions.create(agent=fields, environment=NONE, input=text)


async def rest(client: AsyncOpenAI, session_id: str, within_s: float = 20) -> AgentSession:
    """The session once it does nothing."""
    return await until_status(client.beta.agents.sessions, session_id, *RESTING, within_s=within_s)


async def run_session(client: AsyncOpenAI, text: str = "hello", **agent: Any) -> AgentSession:
    """A session after its first turn, or where that waits."""
    return await rest(client, (await create_session(client, text, **agent)).id)


async def send(client: AsyncOpenAI, session_id: str, *events: Any, **options: Any) -> None:
    """Send events to a session."""
    await client.beta.agents.sessions.events.create(session_id, events=[*events], **options)


def message(text: str) -> Any:
    return {
        "type": "agent.session.input.message",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}],
    }


CANCEL: Any = {"type": "agent.session.input.cancel"}


def tool_result(action: Any, output: Any = "42", **fields: Any) -> Any:
    """The result of the function that a session waits for."""
    result = {"turn_id": action.turn_id, "call_id": action.call_id, "success": True, "output": output, **fields}
    return {"type": "agent.session.input.tool_result", **result}


async def read_log(client: AsyncOpenAI, session_id: str, count: int) -> list[Any]:
    """The first `count` events of a session, whose numbers have no gaps."""
    stream = await client.beta.agents.sessions.events.stream(session_id, extra_query={"starting_after": 0})
    events: list[Any] = []
    async with asyncio.timeout(10), stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    assert [event.sequence_number for event in events] == [*range(1, count + 1)]
    assert len({event.event_id for event in events}) == count
    return events


async def list_items(client: AsyncOpenAI, session_id: str) -> list[Any]:
    """All items of a session, oldest first."""
    return [item async for item in client.beta.agents.sessions.items.list(session_id, order="asc")]


async def list_turns(client: AsyncOpenAI, session_id: str) -> list[Any]:
    """All turns of a session, oldest first."""
    return [turn async for turn in client.beta.agents.sessions.turns.list(session_id, order="asc")]


def kinds(objects: Sequence[Any]) -> list[str]:
    """The types of events, without what all of them begin with, or of items."""
    return [each.type.removeprefix("agent.session.") for each in objects]
