"""A model for decisions in a GGUF file: the engine's own route answers, and the model does nothing else."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError

from apis.errors import ConfigError
from providers.inference.model_files.gguf_header import read_header
from providers.inference.model_files.packages import PACKAGED_MODELS, fetch_model, models_dir
from tests.support.models.decision_gguf import KIND, decision_gguf
from tests.support.models.small_gguf import small_gguf
from tests.support.sdk.decisions import PIXEL
from tests.support.servers.serving import Served, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300, func_only=True)]

CHAT_MODEL = "smollm2-135m-instruct"
MODEL = "decider"
CHOICE: dict[str, Any] = {"type": "choice", "instructions": "Topic?", "choices": [{"value": "bills"}, {"value": "bug"}]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncGenerator[Served]:
    try:
        source = await fetch_model(PACKAGED_MODELS[CHAT_MODEL], models_dir(), 100)
    except ConfigError as exc:
        pytest.skip(str(exc))
    path = await asyncio.to_thread(lambda: decision_gguf(small_gguf(source)))
    header = await asyncio.to_thread(read_header, path)
    assert header is not None
    assert (header.decision_type, header.is_embedding) == (KIND, False)
    local = {"provider": "llama_cpp", "model_path": str(path), "model": MODEL, "threads": 1, "context_tokens": 1024}
    async with serving({**local, "parallel": 2}) as running:
        yield running


async def decide(served: Served, **fields: Any) -> Any:
    decisions: Any = served.client.with_options(timeout=100).decisions
    return await decisions.create(**{"model": MODEL, "input": "I was charged twice.", "questions": [CHOICE], **fields})


async def test_each_kind_of_question_has_its_answer(served: Served) -> None:
    score = {"type": "score", "instructions": "Angry?", "levels": [{"label": "calm"}, {"label": "furious"}]}
    predicate = {"type": "predicate", "instructions": "Money back.", "name": "refund"}
    decision = await decide(served, questions=[predicate, CHOICE, score])
    first, second, third = decision.answers
    assert (first.type, first.name) == ("predicate", "refund")
    assert 0 < first.probability < 1
    assert sum(one.probability for one in second.probabilities) == pytest.approx(1)
    assert [one.label for one in third.probabilities] == ["calm", "furious"]
    assert decision.usage.input_tokens > 0


async def test_what_the_engine_refuses_is_a_refusal(served: Served) -> None:
    levels = [{"label": f"level {number}"} for number in range(11)]
    with pytest.raises(BadRequestError, match="2 to 10 levels"):
        await decide(served, questions=[{"type": "score", "instructions": "How?", "levels": levels}])
    with pytest.raises(BadRequestError) as caught:
        await decide(served, input="word " * 3000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]
    with pytest.raises(BadRequestError, match="reads text only") as caught:
        await decide(served, input=image)
    assert caught.value.param == "input"
    twins = [{"value": True}, {"value": "true"}]
    with pytest.raises(BadRequestError, match="different texts") as caught:
        await decide(served, questions=[{**CHOICE, "choices": twins}])
    assert caught.value.param == "questions[0]"


async def test_it_does_not_chat(served: Served) -> None:
    with pytest.raises(BadRequestError, match="makes decisions \\(/v1/decisions\\); it cannot chat") as caught:
        await served.client.responses.create(model=MODEL, input="hi")
    assert caught.value.param == "model"
    with pytest.raises(BadRequestError, match="cannot complete texts"):
        await served.client.completions.create(model=MODEL, prompt="hi")
