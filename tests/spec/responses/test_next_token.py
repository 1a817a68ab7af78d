"""A stack over a function that says which token comes next, as an OpenAI client sees it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import APIStatusError

from tests.support.sdk.requests import create, stream
from tests.support.servers.serving import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "mine"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


def section(function: str) -> dict[str, Any]:
    return {"provider": "next_token", "function": f"tests.support.models.token_functions:{function}", "model": MODEL}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(section("plain")) as served:
        yield served


async def test_it_thinks_and_answers(served: Served) -> None:
    response = await create(served, model=MODEL, input="hi")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "A greeting."
    assert response.output_text == "Hello there!"
    assert response.output[1].phase == "final_answer"
    assert response.usage.output_tokens_details.reasoning_tokens == 3


async def test_it_streams_token_by_token(served: Served) -> None:
    events = await stream(served, model=MODEL, input="hi")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["Hello", " there", "!"]


async def test_its_call_is_answered_and_it_goes_on(served: Served) -> None:
    first = await create(served, model=MODEL, input="weather", tools=[TOOL])
    call = first.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city":"Rome"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    events = await stream(served, model=MODEL, input=[result], tools=[TOOL], previous_response_id=first.id)
    assert events[-1].response.output_text == "It is sunny."


async def test_it_is_listed_and_counts_tokens(served: Served) -> None:
    assert [model.id for model in (await served.client.models.list()).data] == [MODEL]
    counted = await served.client.responses.input_tokens.count(model=MODEL, input="hi")
    assert counted.input_tokens == (await create(served, model=MODEL, input="hi")).usage.input_tokens


async def test_a_function_that_fails_fails_that_response_only() -> None:
    async with serving(section("fails_to_call")) as served:
        failed, well = await asyncio.gather(
            stream(served, model=MODEL, input="weather", tools=[TOOL]), create(served, model=MODEL, input="hi")
        )
        assert failed[-1].type == "response.failed"
        assert failed[-1].response.error.code == "server_error"
        assert "secret" not in failed[-1].response.error.message
        assert well.output_text == "Hello there!"
        with pytest.raises(APIStatusError) as caught:
            await create(served, model=MODEL, input="weather", tools=[TOOL])
        assert caught.value.status_code == 502
