"""Objects of the Agents API as JSON: each has all the fields of the SDK's type, and no other."""

import time
from typing import Any

import httpx
import pytest
from openai.types.beta import Agent, AgentSession
from openai.types.beta.agents import OneTimeAutomation, PeriodicAutomation
from openai.types.beta.agents.automations import AutomationInvocation
from openai.types.beta.agents.sessions import Turn
from pydantic import BaseModel

from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
SESSION: Json = {"environment": {"type": "none"}, "agent": {"model": "scripted"}}
MESSAGE: Json = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
TARGET: Json = {"type": "new_session", **SESSION, "input": [MESSAGE]}
PERIODIC: Json = {"type": "periodic", "name": "a", "expression": "0 8 * * *", "timezone": "UTC", "target": TARGET}
ONCE: Json = {"type": "once", "name": "b", "run_at": int(time.time()) + 9000, "target": TARGET}
CREATED: dict[str, tuple[type[BaseModel], Json]] = {
    "": (Agent, {"model": "scripted"}),
    "/sessions": (AgentSession, {**SESSION, "input": "hi"}),
    "/automations": (PeriodicAutomation, PERIODIC),
}


async def call(served: Served, method: str, path: str, body: Json | None = None) -> Any:
    async with httpx.AsyncClient(trust_env=False, headers={"OpenAI-Beta": "agents=v1"}) as client:
        answer = await client.request(method, f"{served.url}/v1/agents{path}", json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()


def assert_whole(value: Json, sdk_type: type[BaseModel]) -> None:
    assert sdk_type.model_validate(value).model_dump(mode="json", by_alias=True) == value


@pytest.mark.parametrize("path", CREATED)
async def test_objects_have_the_fields_of_the_sdks_types(path: str) -> None:
    sdk_type, body = CREATED[path]
    async with serving() as served:
        created = await call(served, "POST", path, body)
        assert_whole(created, sdk_type)
        assert (await call(served, "GET", f"{path}/{created['id']}")).keys() == created.keys()
        (listed,) = (await call(served, "GET", path))["data"]
        assert listed.keys() == created.keys()


async def test_turns_and_invocations_have_them_too() -> None:
    async with serving() as served:
        session = await call(served, "POST", "/sessions", CREATED["/sessions"][1])
        (turn,) = (await call(served, "GET", f"/sessions/{session['id']}/turns"))["data"]
        assert_whole(turn, Turn)
        once = await call(served, "POST", "/automations", ONCE)
        assert_whole(once, OneTimeAutomation)
        assert_whole(await call(served, "POST", f"/automations/{once['id']}/invocations"), AutomationInvocation)
