"""Sessions and automations that several keys of a project use: each key has its own rights, also in another's turn."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from openai import AsyncOpenAI, PermissionDeniedError

from tests.spec.accounts.test_stored_keys import STORED, new_key
from tests.support.sdk.client import sdk_client
from tests.support.sdk.sessions import FUNCTION, create_session, message, rest, run_session, send, tool_result
from tests.support.servers.serving import Served, serving
from tests.support.waiting import until

CALL: Any = {"call": "get", "arguments": "{}", "id": "call_1"}
SCRIPTS: Any = {
    "provider": "router",
    "providers": {
        "a": {"provider": "scripted", "turns": [[CALL], [{"text": "ok"}]]},
        "b": {"provider": "scripted", "model": "cheap", "turns": [[{"text": "ok"}]]},
    },
}
Clients = tuple[AsyncOpenAI, AsyncOpenAI]


@pytest.fixture
async def clients() -> AsyncGenerator[Clients]:
    """The clients of a key with all rights, and of one that is bound to the model `cheap`."""
    async with AsyncExitStack() as stack:
        served: Served = await stack.enter_async_context(serving(SCRIPTS, more=STORED))
        keys = [await new_key(served, "alpha"), await new_key(served, "alpha", "model:cheap")]
        first, second = [await stack.enter_async_context(sdk_client(served.url, key.value)) for key in keys]
        yield first, second


async def test_a_key_that_is_bound_to_a_model_has_sessions_of_it_alone(clients: Clients) -> None:
    _, bound = clients
    session = await run_session(bound, model="cheap")
    assert session.status == "idle"
    with pytest.raises(PermissionDeniedError):
        await create_session(bound)
    agents: Any = bound.beta.agents
    await agents.sessions.update(session.id, agent={"model": "scripted"})
    await send(bound, session.id, message("more"))
    rested = await rest(bound, session.id)
    assert rested.status == "failed"
    assert "may not use the model 'scripted'" in str(rested.error)
    assert (await bound.conversations.create()).id


async def test_a_message_in_the_turn_of_another_key_has_the_rights_of_its_own(clients: Clients) -> None:
    """The turn goes on with them: it is no way to a model that is closed."""
    free, bound = clients
    session = await run_session(free, tools=[FUNCTION])
    assert session.status == "requires_action"
    await send(bound, session.id, message("tell me more"))
    await send(free, session.id, tool_result(session.required_actions[0]))
    rested = await rest(free, session.id)
    assert rested.status == "failed"
    assert "may not use the model 'scripted'" in str(rested.error)


async def test_an_automation_has_the_rights_of_the_key_that_gave_it_its_target(clients: Clients) -> None:
    free, bound = clients
    session = await run_session(free, tools=[FUNCTION])
    await send(free, session.id, tool_result(session.required_actions[0]))
    assert (await rest(free, session.id)).status == "idle"
    target: Any = {"type": "existing_session", "session_id": session.id, "instructions": "tell me"}
    automations: Any = free.beta.agents.automations
    automation = await automations.create(type="once", name="a", run_at=int(time.time()) + 9000, target=target)
    others: Any = bound.beta.agents.automations
    await others.update(automation.id, name="b")
    await others.update(automation.id, target={**target, "instructions": "tell me all"})
    invocation = await others.invocations.create(automation.id)

    async def is_delivered() -> bool:
        present = await others.invocations.retrieve(invocation.id, automation_id=automation.id)
        return present.status == "completed"

    await until(is_delivered)
    rested = await rest(free, session.id)
    assert rested.status == "failed"
    assert "may not use the model 'scripted'" in str(rested.error)
