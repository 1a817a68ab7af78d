"""LlamaCpp with the tiny gpt-oss as GGUF: tokens in and out, grammars, caches of conversations."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from apis.chat import ChatRequest
from apis.completion import CompletionRequest
from apis.deltas import Delta, ReasoningDelta, Usage
from apis.errors import ContextLengthExceeded, InvalidRequest, StackError, Unsupported
from apis.fair_share import Tenants
from apis.inference import ALL_CONSTRAINTS
from providers.inference.harmony.vocabulary import NATIVE_TOOLS, load_vocabulary
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.conformance.inference import LAWS, Law, Subject, drain
from tests.providers.llama_cpp.asking import finish_of, text_of
from tests.support.models import tiny_lessons as known
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "tiny"
TOOL: dict[str, Any] = {"type": "function", "function": known.WEATHER}
ENDLESS = {"200002": -100.0, "200012": -100.0, "199999": -100.0, "200007": -100.0}
BROKEN_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
CONTROL_TOKENS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    *("<|endoftext|>", "<|startoftext|>", "<|reserved_200009|>", "<|endofprompt|>"),
)
OTHER_PARTS = (
    "assistant",
    "system",
    " to=functions.f",
    "final",
    "json",
    "<|",
    "|>",
    "é",
    "\U0001fae0",
    "\n",
    " ",
    "a" * 40,
)


async def start_gpt_oss(**fields: Any) -> LlamaCpp:
    path = await asyncio.to_thread(tiny_gpt_oss_gguf)
    small: dict[str, Any] = {"model": MODEL, "threads": 1, "context_tokens": 1024, "parallel": 2}
    config = LlamaCpp.Config(model_path=path, harmony={"current_date": known.TODAY}, **{**small, **fields})  # type: ignore[arg-type]  # as a run config has it
    inference = LlamaCpp(config, None, Tenants(frozenset({"one", "two"})))
    await inference.start()
    return inference


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gpt_oss() -> AsyncGenerator[LlamaCpp]:
    inference = await start_gpt_oss()
    try:
        yield inference
    finally:
        await inference.close()


def request(content: str = known.FRANCE, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content}]
    return ChatRequest.model_validate({"model": MODEL, "messages": messages, "temperature": 0, **fields})


async def ask(inference: LlamaCpp, content: str = known.FRANCE, **fields: Any) -> list[Delta]:
    """Return the deltas of the answer, which keep the laws."""
    return await drain(inference, request(content, **fields))


def constant(text: str) -> dict[str, Any]:
    """Return a response format that only this text fulfils."""
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"const": text}}}


def thought_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_gpt_oss_on_llama_cpp_conforms(law: Law, gpt_oss: LlamaCpp) -> None:
    long = request(max_completion_tokens=900, logit_bias=ENDLESS)
    unknown = request().model_copy(update={"model": "other"})
    await law(Subject(gpt_oss, text=request(), long=long, call=request(known.ROME, tools=[TOOL]), unknown=unknown))


async def test_its_capabilities_are_those_of_the_other_engines(gpt_oss: LlamaCpp) -> None:
    (model,) = await gpt_oss.models()
    assert (model.context_tokens, model.modalities) == (1024, frozenset())
    assert (model.native_tools, model.enforces) == (NATIVE_TOOLS, ALL_CONSTRAINTS)
    assert await gpt_oss.used_effort(request(reasoning_effort="xhigh")) == "high"


@pytest.mark.parametrize(
    "text",
    [
        "\U0001fae0\u9f98\U0001f9ff x é",
        pytest.param("<|channel|>final<|message|>x<|start|><|return|>", marks=pytest.mark.long),
    ],
)
async def test_every_text_can_be_forced(text: str, gpt_oss: LlamaCpp) -> None:
    """Characters of several tokens, which the engine does not send one by one, and names of control tokens."""
    deltas = await ask(gpt_oss, response_format=constant(text), logprobs=True)
    assert json.loads(text_of(deltas)) == text
    assert finish_of(deltas).reason == "stop"


def hostile_texts(count: int) -> list[str]:
    """Return texts of names of control tokens and parts that surround them in a prompt."""
    chance = random.Random(7)
    parts = (*CONTROL_TOKENS, *OTHER_PARTS)
    return ["".join(chance.choice(parts) for _ in range(chance.randint(1, 12))) for _ in range(count)]


async def check_hostile_texts(gpt_oss: LlamaCpp, count: int) -> None:
    """Each text adds as many tokens to a prompt as it has as ordinary text, in the count and in the engine."""
    vocabulary = load_vocabulary()
    frame = await gpt_oss.count_tokens(request("x")) - 1
    texts = hostile_texts(count)

    async def check(texts: Sequence[str]) -> None:
        for text in texts:
            expected = frame + len(vocabulary.encode(text))
            usage = finish_of(await ask(gpt_oss, text, max_completion_tokens=1)).usage
            assert (await gpt_oss.count_tokens(request(text)), usage.input_tokens) == (expected, expected), text

    await asyncio.gather(check(texts[::2]), check(texts[1::2]))


async def test_control_tokens_in_a_users_text_stay_text(gpt_oss: LlamaCpp) -> None:
    await check_hostile_texts(gpt_oss, 16)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_control_tokens_in_thousands_of_texts_stay_text(gpt_oss: LlamaCpp) -> None:
    await check_hostile_texts(gpt_oss, 5_000)


async def test_a_conversation_goes_on_in_its_slot_though_others_come_between(gpt_oss: LlamaCpp) -> None:
    """Two slots, two conversations in turn: each reads its earlier turns from its own cache."""

    async def turn(conversation: list[dict[str, Any]], content: str) -> tuple[int, int]:
        conversation.append({"role": "user", "content": content})
        deltas = await drain(
            gpt_oss, ChatRequest.model_validate({"model": MODEL, "messages": conversation, "temperature": 0})
        )
        conversation.append({"role": "assistant", "reasoning": thought_of(deltas), "content": text_of(deltas)})
        usage = finish_of(deltas).usage
        return usage.cached_tokens, usage.input_tokens

    one, two = list[dict[str, Any]](), list[dict[str, Any]]()
    before = [await turn(one, known.FRANCE), await turn(two, known.turn_question("one"))]
    for _ in range(2):
        after = [await turn(one, known.THANKS), await turn(two, known.THANKS)]
        for (_, earlier_tokens), (cached, tokens) in zip(before, after, strict=True):
            # the earlier prompt, but for the few tokens at its end that the engine computes again
            assert earlier_tokens - 8 <= cached < tokens
        before = after


async def test_a_salt_keeps_caches_apart(gpt_oss: LlamaCpp) -> None:
    async def cached_tokens(salt: str | None) -> int:
        deltas = await ask(gpt_oss, "One secret of many.", cache_salt=salt, max_completion_tokens=1)
        return finish_of(deltas).usage.cached_tokens

    one, again, other, none = [await cached_tokens(salt) for salt in ("tenant-a", "tenant-a", "tenant-b", None)]
    assert one == other == none == 0
    assert again > 60


async def test_a_salt_keeps_caches_of_text_completions_apart(gpt_oss: LlamaCpp) -> None:
    async def cached_tokens(salt: str) -> int:
        fields = {"model": MODEL, "prompt": "One more secret of many. " * 20, "max_tokens": 1, "cache_salt": salt}
        request = CompletionRequest.model_validate(fields)
        pieces = [piece async for batch in gpt_oss.complete(request) for piece in batch]
        (usage,) = (piece for piece in pieces if isinstance(piece, Usage))
        return usage.cached_tokens

    one, other, again = [await cached_tokens(salt) for salt in ("tenant-a", "tenant-b", "tenant-a")]
    assert (one, other, again > 60) == (0, 0, True)


async def test_an_answer_that_is_cut_at_a_stop_text_has_its_usage(gpt_oss: LlamaCpp) -> None:
    whole = finish_of(await ask(gpt_oss)).usage
    deltas = await ask(gpt_oss, stop=["Paris"])
    assert text_of(deltas) == known.FRANCE_ANSWER.partition("Paris")[0]
    usage = finish_of(deltas).usage
    assert (usage.input_tokens, usage.cached_tokens > 60) == (whole.input_tokens, True)
    assert usage.output_tokens < whole.output_tokens


async def test_sampling_fields_have_their_effect(gpt_oss: LlamaCpp) -> None:
    (paris,) = load_vocabulary().encode(" Paris")
    assert "Paris" not in text_of(await ask(gpt_oss, logit_bias={str(paris): -100.0}))
    assert text_of(await ask(gpt_oss, temperature=2, top_k=1)) == known.FRANCE_ANSWER
    assert text_of(await ask(gpt_oss, temperature=2, top_p=0.01)) == known.FRANCE_ANSWER
    assert text_of(await ask(gpt_oss, temperature=2, min_p=1.0)) == known.FRANCE_ANSWER
    assert text_of(await ask(gpt_oss, repetition_penalty=10, max_completion_tokens=60)) != known.FRANCE_ANSWER
    hot: dict[str, Any] = {"temperature": 2, "max_completion_tokens": 30}
    # the first fills the cache: with and without it, sums differ in their last bits
    _, one, two, other = [await ask(gpt_oss, seed=seed, **hot) for seed in (1, 2**62, 2**62, -5)]
    assert thought_of(one) + text_of(one) == thought_of(two) + text_of(two) != thought_of(other) + text_of(other)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"stop_token_ids": [5]}, Unsupported, "stop_token_ids"),
        ({"min_tokens": 5}, Unsupported, "min_tokens"),
        ({"logit_bias": {"300000": 1.0}}, InvalidRequest, "logit_bias"),
        ({"content": "word " * 2000}, ContextLengthExceeded, None),
        ({"tool_choice": "required"}, InvalidRequest, "tool_choice"),
        ({"response_format": BROKEN_FORMAT}, InvalidRequest, "text.format.schema"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    fields: dict[str, Any], error: type[StackError], param: str | None, gpt_oss: LlamaCpp
) -> None:
    with pytest.raises(error) as caught:
        await ask(gpt_oss, **fields)
    assert caught.value.param == param
