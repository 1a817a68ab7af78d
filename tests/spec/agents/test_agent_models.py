"""A stored agent as the model of responses, chat completions and messages."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic

from tests.support.sdk.requests import messages
from tests.support.servers.serving import Served, scripted, serving

Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "name": "f", "description": "of the agent", "parameters": {"type": "object"}}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(scripted([{"text": "hi"}])) as served:
        yield served


async def create_agent(served: Served, **fields: Any) -> str:
    agent = await served.client.beta.agents.create(model="scripted", instructions="Be brief.", **fields)
    return f"agent/{agent.id}"


async def test_a_response_has_the_fields_of_the_agent_below_its_own(served: Served) -> None:
    model = await create_agent(served, tools=[FUNCTION], reasoning={"effort": "low"}, text={"verbosity": "low"})
    response = await served.client.responses.create(model=model, input="x")
    assert (response.model, response.instructions, response.output_text) == ("scripted", "Be brief.", "hi")
    assert [tool.type for tool in response.tools] == ["function"]
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"
    tools: Any = [{"type": "function", "name": "f", "parameters": {}, "description": "of the request"}]
    response = await served.client.responses.create(
        model=model, input="x", instructions="In French.", reasoning={"effort": "high"}, tools=tools
    )
    assert response.instructions == "Be brief.\n\nIn French."
    assert response.reasoning is not None
    assert response.reasoning.effort == "high"
    assert [tool.to_dict()["description"] for tool in response.tools] == ["of the request"]


async def test_a_chat_completion_reads_the_instructions_of_the_agent() -> None:
    schema: Json = {"type": "object", "properties": {}, "additionalProperties": False}
    async with serving(scripted([{"text": "{}"}])) as other:
        model = await create_agent(other, text={"format": {"type": "json_schema", "schema": schema}}, tools=[FUNCTION])
        completion = await other.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}]
        )
        assert (completion.model, completion.choices[0].message.content) == ("scripted", "{}")
        assert [(each["role"], each["content"]) for each in messages(other)] == [("system", "Be brief."), ("user", "x")]


async def test_a_chat_completion_refuses_an_agent_with_hosted_tools(served: Served) -> None:
    model = await create_agent(served, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="web_search"):
        await served.client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}])


async def test_a_message_is_answered_by_the_agent(served: Served) -> None:
    model = await create_agent(served)
    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = await client.messages.create(
            model=model, max_tokens=100, system="In French.", messages=[{"role": "user", "content": "x"}]
        )
    assert message.content[0].to_dict()["text"] == "hi"
    assert messages(served)[0]["content"] == "Be brief.\n\nIn French."


async def test_agents_are_listed_as_models(served: Served) -> None:
    model = await create_agent(served)
    assert [each.id async for each in served.client.models.list()] == ["scripted", model]
    assert (await served.client.models.retrieve(model)).owned_by == "agents"
    for call in (served.client.models.retrieve("agent/x"), served.client.responses.create(model="agent/x", input="x")):
        with pytest.raises(openai.NotFoundError) as raised:
            await call
        assert raised.value.code == "model_not_found"


async def test_a_line_and_a_count_of_tokens_name_an_agent(served: Served) -> None:
    model = await create_agent(served)
    count = await served.client.responses.input_tokens.count(model=model, input="x")
    plain = await served.client.responses.input_tokens.count(model="scripted", input="x")
    assert count.input_tokens > plain.input_tokens
