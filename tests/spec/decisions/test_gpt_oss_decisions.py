"""Decisions of gpt-oss: the distribution at the beginning of the final channel, and one reading of the input."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError
from openai.types import Decision

from apis.chat import TextPart
from apis.decisions import DecisionOption, DecisionQuestion, DecisionRequest
from providers.inference.decisions.prompts import build_messages
from providers.inference.gpt_oss.provider import GptOss
from providers.inference.harmony.harmony import Harmony
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.harmony.vocabulary import CHANNEL, MESSAGE
from tests.spec.responses.test_gpt_oss import section
from tests.spec.responses.test_gpt_oss_llama_cpp import section as llama_section
from tests.support.models.gpt_oss_reference import reference, reference_logits
from tests.support.models.harmony_conversations import MODEL, OPTIONS
from tests.support.models.tiny_gpt_oss import tiny_gpt_oss_folder
from tests.support.sdk.decisions import PIXEL
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400, func_only=True)]

TICKET = "I was charged twice for my order and want one of the charges back."
QUESTIONS = {
    "Which topic is it?": ("billing", "bug", "shipping", "login"),
    "The customer is angry.": ("yes", "no"),
    "Which number?": tuple(map(str, range(60))),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    async with serving(await asyncio.to_thread(section)) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harmony() -> Harmony:
    return await Harmony.load(HarmonyOptions.model_validate(OPTIONS))


async def decide(served: Served, **fields: Any) -> Decision:
    decisions: Any = served.client.with_options(timeout=300).decisions
    return await decisions.create(**{"model": MODEL, "input": TICKET, **fields})


def to_choice(instructions: str, options: Sequence[str]) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "choices": [{"value": option} for option in options]}


def probabilities_of(decision: Decision) -> list[list[float]]:
    answers: list[Any] = [answer.to_dict() for answer in decision.answers]
    return [[one["probability"] for one in answer["probabilities"]] for answer in answers]


async def reference_probabilities(harmony: Harmony) -> list[list[float]]:
    """The softmax over the labels of the logits that transformers computes at the end of each prompt."""
    model = await asyncio.to_thread(lambda: reference(tiny_gpt_oss_folder()))
    results: list[list[float]] = []
    for instructions, texts in QUESTIONS.items():
        options = [DecisionOption(text=text) for text in texts]
        question = DecisionQuestion(
            kind="choice", instructions=[TextPart(text=instructions)], options=options, param="questions[0]"
        )
        request = DecisionRequest(model=MODEL, input=[TextPart(text=TICKET)], questions=[question])
        labels = harmony.labels[: len(texts)]
        messages = build_messages(request, question, [label.text for label in labels], is_joined=False)
        ids = await harmony.render_decision(MODEL, messages)
        assert ids[-3:] == [CHANNEL, *harmony.encode_text("final"), MESSAGE]
        logits = (await asyncio.to_thread(reference_logits, model, ids))[-1].double()
        weights = [math.fsum(math.exp(float(logits[token])) for token in label.token_ids) for label in labels]
        results.append([weight / math.fsum(weights) for weight in weights])
    return results


async def test_the_probabilities_are_those_of_the_models_logits(served: Served, harmony: Harmony) -> None:
    pytest.importorskip("transformers")
    expected = await reference_probabilities(harmony)
    questions = [to_choice(*each) for each in QUESTIONS.items()]
    for _ in range(2):  # the second time from the cache of prefixes
        probabilities = probabilities_of(await decide(served, questions=questions))
        for one, other in zip(probabilities, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


async def test_the_other_engine_decides_alike(served: Served) -> None:
    """llama.cpp reads the same prompt with the same weights, in another precision."""
    questions = [to_choice(*each) for each in QUESTIONS.items()]
    own = probabilities_of(await decide(served, questions=questions))
    async with serving(await asyncio.to_thread(llama_section)) as other:
        others = probabilities_of(await decide(other, questions=questions))
    for one, another in zip(own, others, strict=True):
        assert one == pytest.approx(another, abs=0.05)


async def test_a_hundred_questions_read_the_input_once(served: Served) -> None:
    ticket = " ".join(f"Line {number}: {TICKET}" for number in range(40))
    engine: Any = served.stack.inference
    assert isinstance(engine, GptOss)
    before, began = engine.metrics(), time.perf_counter()
    usage = (await decide(served, input=ticket, questions=[to_choice("Topic?", ("a", "b"))])).usage
    first_s, one = time.perf_counter() - began, engine.metrics()
    questions = [to_choice(f"Is it number {number}?", ("yes", "no")) for number in range(100)]
    began = time.perf_counter()
    many = (await decide(served, input=ticket, questions=questions)).usage
    many_s, after = time.perf_counter() - began, engine.metrics()
    cached = many.input_tokens_details.cached_tokens
    computed = after.computed_tokens - one.computed_tokens
    print(
        f"\ninput: {usage.input_tokens} tokens, {one.computed_tokens - before.computed_tokens} computed, "
        f"{first_s:.2f} s; 100 questions: {many.input_tokens} tokens, {cached} cached, {computed} computed, "
        f"{many_s:.2f} s, {many_s * 10:.1f} ms each"
    )
    assert usage.input_tokens > 600
    assert many.input_tokens - cached == computed
    assert computed / 100 < 80  # a question, and the rest of a page
    assert many.output_tokens == 100


async def test_images_are_refused_by_name(served: Served) -> None:
    content = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": PIXEL}]
    with pytest.raises(BadRequestError, match="reads text only") as caught:
        await decide(served, input=[{"role": "user", "content": content}], questions=[to_choice("Which?", "ab")])
    assert caught.value.param == "input"


async def test_an_input_beyond_the_context_is_named(served: Served) -> None:
    with pytest.raises(BadRequestError) as caught:
        await decide(served, input="word " * 9000, questions=[to_choice("Which?", "ab")])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_decisions_at_once_are_what_they_are_alone(served: Served) -> None:
    questions = [to_choice(*each) for each in QUESTIONS.items()]
    alone = probabilities_of(await decide(served, questions=questions))
    results = await asyncio.gather(*(decide(served, questions=questions) for _ in range(4)))
    for one, other in pairwise([alone, *map(probabilities_of, results)]):
        for question, same in zip(one, other, strict=True):
            assert question == pytest.approx(same, abs=1e-4)
