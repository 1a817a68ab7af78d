"""Stored agents through the official SDK: creation, changes, listings, deletion, and the errors of the beta."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.sdk.client import sdk_client
from tests.support.servers.serving import Served, serving

Json = dict[str, Any]
KEYS = [{"key": "key-a", "tenant": "a"}, {"key": "key-b", "tenant": "b"}]
FUNCTION: Any = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


def error_of(raised: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[int, str, Any, Any]:
    body: Any = raised.value.body
    return raised.value.status_code, body["type"], body["code"], body["param"]


async def test_an_agent_is_created_with_all_its_fields(served: Served) -> None:
    agents = served.client.beta.agents
    bare = await agents.create(model="scripted")
    assert bare.id.startswith("agent_")
    assert (bare.object, bare.name, bare.instructions, bare.tools, bare.metadata) == ("agent", None, None, [], {})
    assert (bare.text.format.type, bare.text.verbosity, bare.service_tier) == ("text", "medium", "auto")
    assert (bare.multi_agent.enabled, bare.reasoning.effort, bare.created_at) == (False, None, bare.updated_at)
    deferred: Any = {**FUNCTION, "defer_loading": True}
    agent = await agents.create(
        model="scripted",
        name="Tester",
        instructions="Be brief.",
        tools=[
            deferred,
            {"type": "tool_search"},
            {"type": "mcp", "server_label": "m", "transport": {"type": "http", "server_url": "https://m.test/mcp"}},
            {"type": "web_search", "allowed_domains": ["example.com"]},
        ],
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"team": "x"},
    )
    assert [tool.type for tool in agent.tools] == ["function", "tool_search", "mcp", "web_search"]
    assert agent.reasoning.effort == "low"
    assert agent.text.format.to_dict() == {"type": "json_schema", "schema": {"type": "object"}}
    assert (await agents.retrieve(agent.id)) == agent


async def test_a_creation_answers_201(served: Served) -> None:
    raw = await served.client.beta.agents.with_raw_response.create(model="scripted")
    assert raw.status_code == 201


async def test_an_absent_field_stays_and_null_clears(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(
        model="scripted", name="A", instructions="I", tools=[FUNCTION], metadata={"a": "b"}, reasoning={"effort": "low"}
    )
    renamed = await agents.update(agent.id, name="B")
    assert (renamed.name, renamed.instructions, len(renamed.tools), renamed.metadata) == ("B", "I", 1, {"a": "b"})
    cleared = await agents.update(agent.id, name=None, instructions=None, tools=None, metadata=None, reasoning=None)
    assert (cleared.name, cleared.instructions, cleared.tools, cleared.metadata) == (None, None, [], {})
    assert (cleared.reasoning.effort, cleared.model, cleared.created_at) == (None, "scripted", agent.created_at)
    with pytest.raises(openai.BadRequestError) as raised:
        await agents.update(agent.id, extra_body={"model": None})
    assert error_of(raised) == (400, "invalid_request_error", "invalid_type", "model")


async def test_metadata_has_bounds_that_name_the_key(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await served.client.beta.agents.create(model="scripted", metadata={"key": "x" * 513})
    assert error_of(raised)[3] == "metadata.key"
    with pytest.raises(openai.BadRequestError) as raised:
        await served.client.beta.agents.create(model="scripted", metadata={str(n): "" for n in range(17)})
    assert error_of(raised)[3] == "metadata"


async def test_agents_are_listed_in_pages(served: Served) -> None:
    agents = served.client.beta.agents
    empty = await agents.list()
    assert (empty.data, empty.has_more, empty.to_dict()["first_id"], empty.to_dict()["last_id"]) == (
        [],
        False,
        None,
        None,
    )
    ids = [(await agents.create(model="scripted")).id for _ in range(3)]
    assert [agent.id async for agent in agents.list(limit=2)] == ids[::-1]
    assert [agent.id async for agent in agents.list(limit=0, order="asc")] == ids
    assert len((await agents.list(limit=200)).data) == 3
    page = await agents.list(limit=1)
    assert (page.data[0].id, page.has_more) == (ids[2], True)
    with pytest.raises(openai.NotFoundError) as raised:
        await agents.list(after="agent_0")
    assert error_of(raised) == (404, "not_found_error", "not_found_error", "after")


async def test_a_deleted_agent_is_gone(served: Served) -> None:
    agents = served.client.beta.agents
    agent = await agents.create(model="scripted")
    assert (await agents.delete(agent.id)).to_dict() == {"id": agent.id, "object": "agent.deleted", "deleted": True}
    for call in (agents.retrieve(agent.id), agents.delete(agent.id), agents.update(agent.id, name="x")):
        with pytest.raises(openai.NotFoundError) as raised:
            await call
        assert error_of(raised)[:3] == (404, "not_found_error", "not_found_error")


@pytest.mark.parametrize("beta", ["", "agents=v2", "responses=v1"])
async def test_a_request_names_the_beta(served: Served, beta: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await served.client.beta.agents.list(extra_headers={"OpenAI-Beta": beta})
    assert error_of(raised)[:3] == (400, "invalid_beta", "invalid_beta")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "computer_use"}]}, "tools[0].type"),
        ({"tools": [{"type": "programmatic_tool_calling"}]}, "tools[0].type"),
        ({"tools": [{"type": "automations"}]}, "tools[0].type"),
        ({"tools": [{**FUNCTION, "async": True}]}, "tools[0].async"),
        (
            {
                "tools": [
                    {"type": "mcp", "server_label": "m", "transport": {"type": "stdio", "command": "c", "cwd": "/"}}
                ]
            },
            "tools[0].transport.type",
        ),
        ({"experimental": {"time_awareness": True}}, "experimental"),
    ],
)
async def test_an_agent_without_such_a_feature_is_refused_by_name(served: Served, fields: Json, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await served.client.beta.agents.create(model="scripted", extra_body=fields)
    assert error_of(raised)[3] == param
    assert "not offered" in str(raised.value)


async def test_tenants_have_their_own_agents() -> None:
    async with serving(server={"api_keys": KEYS}) as served, sdk_client(served.url, "key-b") as other:
        agent = await served.client.beta.agents.create(model="scripted")
        with pytest.raises(openai.NotFoundError):
            await other.beta.agents.retrieve(agent.id)
        assert (await other.beta.agents.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=f"agent/{agent.id}", input="x")
        assert [model.id async for model in other.models.list()] == ["scripted"]
