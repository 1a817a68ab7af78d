"""The tiny gpt-oss on the stack's own engine, on llama.cpp and on a real vLLM: the same items for the same requests."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.live.test_gpt_oss_vllm import SERVED
from tests.live.vllm_server import VLLMServer, vllm_python
from tests.spec.responses.test_gpt_oss import section as own_section
from tests.spec.responses.test_gpt_oss_llama_cpp import section as llama_section
from tests.spec.responses.test_gpt_oss_llama_cpp import without_ids
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import MODEL, OPTIONS, PERSON, TOOL, result
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder
from tests.support.servers.serving import serving

pytestmark = [
    pytest.mark.live,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600, func_only=True),
]

Clients = Mapping[str, AsyncOpenAI]


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> Generator[VLLMServer]:
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(message: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\nlive tests: {message}\n")

    server = VLLMServer(vllm_python(say), tiny_gpt_oss_folder(), MODEL, *SERVED)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def clients(vllm: VLLMServer) -> AsyncGenerator[Clients]:
    remote = {"provider": "vllm", "base_url": f"{vllm.url}/v1", "template": "harmony", "harmony": OPTIONS}
    local = await asyncio.to_thread(llama_section)
    sections: dict[str, dict[str, Any]] = {
        "own": await asyncio.to_thread(own_section),
        "llama_cpp": local,
        "vllm": remote,
    }
    async with AsyncExitStack() as stacks:
        yield {name: (await stacks.enter_async_context(serving(section))).client for name, section in sections.items()}


async def ask(clients: Clients, **fields: Any) -> dict[str, Response]:
    """Return each engine's response; all have the same items, reasoning settings and counts of tokens."""
    request: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 100, **fields}
    responses: dict[str, Response] = {}
    for name, client in clients.items():
        responses[name] = await client.responses.create(**request)
    own = responses["own"]
    for name, response in responses.items():
        assert without_ids(response) == without_ids(own), name
        assert (response.status, response.reasoning) == (own.status, own.reasoning), name
        # how much was cached depends on the engine
        cached: Any = {"input_tokens_details"}
        assert response.usage is not None
        assert own.usage is not None
        assert response.usage.model_dump(exclude=cached) == own.usage.model_dump(exclude=cached), name
    return responses


async def test_answers_have_the_same_items(clients: Clients) -> None:
    responses = await ask(clients, input=known.FRANCE)
    assert responses["vllm"].output_text == known.FRANCE_ANSWER


async def test_calls_and_their_continuations_have_the_same_items(clients: Clients) -> None:
    """The continuation sends the items of the first turn, as every client without a store does."""
    first = await ask(clients, input=known.ROME, tools=[TOOL])
    items = [{"role": "user", "content": known.ROME}, *(item.model_dump() for item in first["own"].output)]
    second = await ask(clients, input=[*items, *result(first["own"], known.ROME_RESULT)], tools=[TOOL])
    assert second["llama_cpp"].output_text == known.ROME_ANSWER


async def test_preambles_and_calls_have_the_same_items(clients: Clients) -> None:
    await ask(clients, input=known.OSLO, tools=[TOOL])


async def test_answers_under_a_schema_have_the_same_items(clients: Clients) -> None:
    await ask(clients, input=known.INVENT, text=PERSON)


async def test_answers_that_are_cut_have_the_same_items(clients: Clients) -> None:
    responses = await ask(clients, input=known.FRANCE, max_output_tokens=16)
    assert {response.status for response in responses.values()} <= {"incomplete", "completed"}
