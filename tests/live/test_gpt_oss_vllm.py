"""A real vLLM that serves the tiny gpt-oss through `template: harmony`, as an OpenAI client of the stack sees it."""

import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from providers.inference.harmony.vocabulary import load_vocabulary
from tests.live.vllm_server import VLLMServer, vllm_python
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import (
    CONVERSATIONS,
    GRAMMAR_CONVERSATIONS,
    MODEL,
    OPTIONS,
    TOOL,
    Conversation,
    say,
)
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(300, func_only=True)]

ENFORCING = '{"backend": "guidance", "enable_in_reasoning": true}'
SERVED = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8"),
    *("--enable-prompt-tokens-details", "--structured-outputs-config", ENFORCING),
)


@pytest.fixture(scope="module")
def gpt_oss(request: pytest.FixtureRequest) -> Generator[VLLMServer]:
    """The server, running. The model is trained the first time, within half a minute."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(what: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\nlive tests: {what}\n")
            sys.stderr.flush()

    server = VLLMServer(vllm_python(say), tiny_gpt_oss_folder(), MODEL, *SERVED)
    say("starting vLLM with the tiny gpt-oss")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
async def served(gpt_oss: VLLMServer, tmp_path: Path) -> AsyncGenerator[Served]:
    """A stack of its own for each test."""
    inference = {"provider": "vllm", "base_url": f"{gpt_oss.url}/v1", "template": "harmony", "harmony": OPTIONS}
    async with serving(inference, kv_store={"provider": "sqlite", "path": str(tmp_path / "responses.db")}) as stack:
        yield stack


@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *GRAMMAR_CONVERSATIONS], ids=lambda each: each.__name__)
async def test_conversation(conversation: Conversation, served: Served) -> None:
    await conversation(served.client)


async def test_a_prompt_that_was_seen_is_read_from_the_cache_of_its_salt(served: Served) -> None:
    async def cached_tokens(salt: str) -> int:
        response = await say(served.client, known.OSLO, tools=[TOOL], extra_body={"cache_salt": salt})
        assert response.usage is not None
        return response.usage.input_tokens_details.cached_tokens

    assert [await cached_tokens(salt) for salt in ("one", "one", "two")] == [0, 128, 0]


async def test_sampling_is_the_requests(served: Served) -> None:
    (paris,) = load_vocabulary().encode(" Paris")
    biased = {"logit_bias": {str(paris): -100}, "seed": 1, "top_k": 1}
    assert "Paris" not in (await say(served.client, known.FRANCE, extra_body=biased)).output_text


async def test_a_prompt_beyond_the_context_is_refused(served: Served) -> None:
    with pytest.raises(BadRequestError) as caught:
        await served.client.responses.create(model=MODEL, input="x y " * 4096)
    assert caught.value.code == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(NotFoundError) as caught:
        await served.client.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"
