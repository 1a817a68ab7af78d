"""Speculation: greedy answers do not change, and what the engine cannot do is refused."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from apis.errors import ConfigError, Unsupported
from providers.inference.llama_cpp.drafts import LlamaCppMetrics
from providers.inference.llama_cpp.provider import LlamaCpp
from tests.providers.llama_cpp.asking import MODEL, ask, finish_of, small_config, text_of
from tests.support.models import tiny_lessons as known
from tests.support.models.harmony_conversations import OPTIONS
from tests.support.models.tiny_gguf import tiny_gpt_oss_gguf

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT_S = 10.0


@asynccontextmanager
async def started(**fields: object) -> AsyncGenerator[LlamaCpp]:
    inference = LlamaCpp(small_config(context_tokens=512, parallel=2, **fields), None)
    try:
        await inference.start()
        yield inference
    finally:
        await inference.close()


async def drafted_and_accepted(inference: LlamaCpp) -> tuple[int, int]:
    """Return the counts once there are some."""
    async with asyncio.timeout(COUNT_S):
        while True:
            figures = inference.metrics()
            assert isinstance(figures, LlamaCppMetrics)
            if figures.drafted_tokens:
                return figures.drafted_tokens, figures.accepted_draft_tokens
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("model_is_there")
async def test_greedy_answers_are_the_same_with_drafts_by_repetition() -> None:
    """Both engines are new: a prompt that is read in other batches may round the first token to another one."""
    question = f"Count:{' 1, 2, 3,' * 8}"
    fields = {"temperature": 0.0, "max_completion_tokens": 40}
    async with started() as inference:
        alone = await ask(inference, question, **fields)
    async with started(draft_model="ngram", draft_tokens=8) as inference:
        drafted = await ask(inference, question, **fields)
        assert text_of(drafted) == text_of(alone)
        assert finish_of(drafted).usage.output_tokens == finish_of(alone).usage.output_tokens
        proposed, accepted = await drafted_and_accepted(inference)
        assert 0 < accepted <= proposed
        with pytest.raises(Unsupported) as caught:
            await ask(inference, logprobs=True)
        assert caught.value.param == "logprobs"


@pytest.mark.long
async def test_gpt_oss_answers_the_same_with_a_model_that_drafts() -> None:
    """The draft is the model itself, and always right; a step then has several tokens."""
    path = str(await asyncio.to_thread(tiny_gpt_oss_gguf))
    fields = {"model": "tiny", "temperature": 0.0, "max_completion_tokens": 60}
    section = {"model_path": path, "model": "tiny", "harmony": OPTIONS}
    async with started(**section) as plain, started(**section, draft_model=path) as drafting:
        for question in (known.FRANCE, known.ROME):
            alone, drafted = await ask(plain, question, **fields), await ask(drafting, question, **fields)
            assert text_of(drafted) == text_of(alone)
            assert finish_of(drafted).usage.output_tokens == finish_of(alone).usage.output_tokens
        proposed, accepted = await drafted_and_accepted(drafting)
        assert accepted > 0.8 * proposed


async def test_a_draft_of_another_vocabulary_is_refused_at_the_start(small_file: Path) -> None:
    draft = await asyncio.to_thread(tiny_gpt_oss_gguf)
    with pytest.raises(ConfigError, match="same vocabulary"):
        async with started(model=MODEL, model_path=small_file, draft_model=str(draft)):
            pass


async def test_a_missing_draft_is_refused_at_the_start(model_is_there: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        async with started(draft_model=str(tmp_path / "none.gguf")):
            pass
