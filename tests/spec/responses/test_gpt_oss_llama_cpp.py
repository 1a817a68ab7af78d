"""The tiny gpt-oss on llama.cpp, as an OpenAI client sees it: the conversations that the stack's own engine holds."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
import pytest_asyncio
from agents import Agent, FunctionTool, ModelSettings, OpenAIResponsesModel
from openai.types.responses import Response

from tests.spec.responses.test_gpt_oss import section as own_section
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import (
    CONVERSATIONS,
    GRAMMAR_CONVERSATIONS,
    MODEL,
    OPTIONS,
    TOOL,
    Conversation,
    a_function_is_called_and_its_result_is_used,
    the_answers_tokens_have_probabilities,
)
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf
from tests.support.sdk.agents_sdk import RUNS, Run, outputs
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400, func_only=True)]


SHORT = (
    a_function_is_called_and_its_result_is_used,
    the_answers_tokens_have_probabilities,
)
"""Conversations of the default suite; the others are marked long."""


def section() -> dict[str, Any]:
    """Return the inference section of a stack that serves it."""
    return {
        "provider": "llama_cpp",
        "model_path": str(tiny_gpt_oss_gguf()),
        "model": MODEL,
        "threads": 1,
        "parallel": 4,
        "context_tokens": 4096,
        "harmony": OPTIONS,
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(await asyncio.to_thread(section)) as stack:
        yield stack


@pytest.mark.parametrize("conversation", SHORT, ids=lambda each: each.__name__)
async def test_conversation(conversation: Conversation, served: Served) -> None:
    await conversation(served.client)


@pytest.mark.long
@pytest.mark.parametrize(
    "conversation",
    [each for each in (*CONVERSATIONS, *GRAMMAR_CONVERSATIONS) if each not in SHORT],
    ids=lambda each: each.__name__,
)
async def test_further_conversation(conversation: Conversation, served: Served) -> None:
    await conversation(served.client)


@pytest.mark.parametrize("run", RUNS, ids=["whole", "streamed"])
async def test_an_agent_of_the_agents_sdk_calls_its_function(run: Run, served: Served) -> None:
    async def weather(_: Any, arguments: str) -> str:
        assert arguments == known.ROME_CALL
        return known.ROME_RESULT

    schema = known.WEATHER["parameters"]
    tool = FunctionTool("get_weather", known.WEATHER["description"], schema, weather, strict_json_schema=False)
    settings = ModelSettings(temperature=0, max_tokens=300)
    model = OpenAIResponsesModel(MODEL, served.client)
    result = await run(Agent("Tiny", model=model, tools=[tool], model_settings=settings), known.ROME)
    assert result.final_output == known.ROME_ANSWER
    assert outputs(result) == ["reasoning", "function_call", "reasoning", "message"]


@pytest.mark.long
async def test_items_equal_those_of_the_own_engine(served: Served) -> None:
    """One turn that calls after a preamble: the same items, with the same fields, but for ids."""
    async with serving(await asyncio.to_thread(own_section)) as own:
        ours, theirs = [
            await client.responses.create(
                model=MODEL, input=known.OSLO, tools=[cast(Any, TOOL)], temperature=0, max_output_tokens=100
            )
            for client in (own.client, served.client)
        ]
    assert without_ids(ours) == without_ids(theirs)
    assert (ours.usage, ours.reasoning) == (theirs.usage, theirs.reasoning)


def without_ids(response: Response) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
