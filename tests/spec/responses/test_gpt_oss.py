"""The tiny gpt-oss on the stack's own engine, as an OpenAI client sees it: the conversations that vLLM holds too."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError, NotFoundError

from providers.inference.gpt_oss.provider import GptOss
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import (
    CONVERSATIONS,
    GRAMMAR_CONVERSATIONS,
    MODEL,
    OPTIONS,
    TOOL,
    Conversation,
    brief,
    result,
    say,
)
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400, func_only=True)]

CUSTOM: Any = {
    "type": "custom",
    "name": "note",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"},
}


def section() -> dict[str, Any]:
    """The inference section of a stack that serves it."""
    return {
        "provider": "gpt_oss",
        "path": str(tiny_gpt_oss_folder()),
        "model": MODEL,
        "dtype": "float32",
        "threads": 1,
        "slots": 8,
        "context_tokens": 4096,
        "kv_memory_gib": 0.1,
        "harmony": OPTIONS,
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(await asyncio.to_thread(section)) as stack:
        yield stack


def engine(served: Served) -> GptOss:
    provider: Any = served.stack.inference
    assert isinstance(provider, GptOss)
    return provider


@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *GRAMMAR_CONVERSATIONS], ids=lambda each: each.__name__)
async def test_conversation(conversation: Conversation, served: Served) -> None:
    await conversation(served.client)


async def test_a_chained_turn_computes_only_what_is_new(served: Served) -> None:
    salt: dict[str, Any] = {"cache_salt": "a chain of its own"}
    first = await say(served.client, known.ROME, tools=[TOOL], extra_body=salt)
    result_message = result(first, known.ROME_RESULT)
    second = await say(served.client, result_message, tools=[TOOL], previous_response_id=first.id, extra_body=salt)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 0
    known_tokens = first.usage.total_tokens
    # all of the first turn but what its last page of 16 had not filled
    assert known_tokens - 16 <= second.usage.input_tokens_details.cached_tokens <= known_tokens


async def test_a_salt_keeps_prefixes_apart(served: Served) -> None:
    async def cached_tokens(salt: str) -> int:
        extra: dict[str, Any] = {"cache_salt": salt}
        response = await say(served.client, known.OSLO, tools=[TOOL], extra_body=extra, max_output_tokens=16)
        assert response.usage is not None
        return response.usage.input_tokens_details.cached_tokens

    one, again, other = [await cached_tokens(salt) for salt in ("one", "one", "two")]
    assert one == other == 0
    assert again > 0


async def test_a_custom_tools_grammar_holds(served: Served) -> None:
    forced = await served.client.responses.create(
        model=MODEL, input=known.HELLO, tools=[CUSTOM], tool_choice="required", temperature=0, max_output_tokens=200
    )
    call: Any = forced.output[-1]
    assert (call.type, call.name) == ("custom_tool_call", "note")
    assert len(call.input) == 3
    assert set(call.input) <= {"a", "b"}


async def test_penalties_change_what_is_said(served: Served) -> None:
    async def ask(**fields: Any) -> str:
        response = await served.client.responses.create(
            model=MODEL, input=known.FRANCE, max_output_tokens=60, temperature=0, extra_body=fields
        )
        return response.output_text

    slight, strong = await asyncio.gather(ask(frequency_penalty=0.01), ask(presence_penalty=2, repetition_penalty=10))
    assert slight == known.FRANCE_ANSWER != strong


async def test_one_seed_gives_one_answer_with_any_other_requests(served: Served) -> None:
    async def ask(seed: int) -> str:
        response = await served.client.responses.create(
            # of few candidates, because in single precision a batch's sums differ in their last bits
            model=MODEL,
            input=known.FRANCE,
            temperature=2,
            max_output_tokens=40,
            extra_body={"seed": seed, "top_k": 2},
        )
        return str(brief(response))

    alone = await ask(7)
    crowd = await asyncio.gather(ask(7), *(ask(seed) for seed in range(20, 26)))
    assert crowd[0] == alone
    assert len(set(crowd)) > 1


async def test_a_client_that_leaves_stops_its_generation(served: Served) -> None:
    stream = await served.client.responses.create(
        model=MODEL,
        input="Go on for ever.",
        temperature=2,
        stream=True,
        extra_body={"logit_bias": {"200002": -100, "200012": -100, "200007": -100}},
    )
    async for event in stream:
        if event.type.endswith("delta"):
            break
    assert engine(served).metrics().running == 1
    await stream.close()
    await say(served.client, known.FRANCE)
    assert engine(served).metrics().running == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"logit_bias": {"300000": 1}}}, "logit_bias"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, None),
        ({"input": "x y " * 4096}, None),
        ({"tools": [{**CUSTOM, "format": {**CUSTOM["format"], "definition": "(("}}]}, "tools[0].format.definition"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    fields: dict[str, Any], param: str | None, served: Served
) -> None:
    create: Any = served.client.responses.create
    with pytest.raises(BadRequestError) as caught:
        await create(**{"model": MODEL, "input": "hi", **fields})
    assert param is None or caught.value.param == param


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(NotFoundError):
        await served.client.responses.create(model="other", input="hi")
