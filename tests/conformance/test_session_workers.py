"""Sessions of agents on two workers, over each shared store."""

from typing import Any

from tests.support.sdk.sessions import FUNCTION, create_session, kinds, list_items, read_log, rest, send, tool_result
from tests.support.servers.serving import serving

MODEL = {"provider": "tests.support.servers.stepping_provider:Stepping"}


async def test_two_workers_share_the_turns_and_events_of_a_session(shared_store: dict[str, Any]) -> None:
    """Either of them drives the turn, before and after the result of its function."""
    async with serving(MODEL, kv_store=shared_store) as one, serving(MODEL, kv_store=shared_store) as two:
        session = await create_session(one.client, "get it", tools=[FUNCTION])
        events = await read_log(two.client, session.id, 7)
        assert events[-1].type == "agent.session.turn.output_text.delta"
        session = await rest(two.client, session.id)
        await send(two.client, session.id, tool_result(session.required_actions[0]))
        assert (await rest(one.client, session.id)).status == "idle"
        items = await list_items(one.client, session.id)
        assert kinds(items) == ["message", "message", "function_call", "function_call_output", "message"]
        assert items[-1].output_text == "two"
        events = await read_log(one.client, session.id, 24)
        assert kinds(events[-2:]) == ["turn.completed", "idle"]
