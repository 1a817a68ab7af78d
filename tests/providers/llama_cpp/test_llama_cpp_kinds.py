"""Models that are not only for text chats: images through a projector, and embeddings."""

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from apis.chat import ChatRequest
from apis.completion import CompletionRequest
from apis.documents.embeddings import EmbeddingRequest
from apis.errors import ConfigError, ContextLengthExceeded, Unsupported
from providers.inference.llama_cpp.provider import LlamaCpp
from providers.inference.minilm.provider import MiniLM
from providers.inference.model_files.catalogue import CATALOGUE, CatalogueModel, HubFile
from providers.inference.model_files.packages import PACKAGED_MODELS, models_dir
from tests.conformance.inference import drain
from tests.providers.llama_cpp.asking import MODEL, small_config, text_of
from tests.support.models.tiny_bert import write_tiny_bert
from tests.support.models.tiny_bert_gguf import write_bert_gguf
from tests.support.models.tiny_projector import tiny_projector
from tests.support.servers.hub_server import COMMIT, hub_environment, running_hub

RED, BLUE = (255, 0, 0), (0, 0, 255)


@asynccontextmanager
async def started(config: LlamaCpp.Config) -> AsyncGenerator[LlamaCpp]:
    inference = LlamaCpp(config, None)
    try:
        await inference.start()
        yield inference
    finally:
        await inference.close()


def png(colour: tuple[int, int, int], size: int = 32) -> dict[str, Any]:
    """Return a part with an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(colour) * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def show(colour: tuple[int, int, int], before: str = "The colour of the car is", after: str = "", **fields: Any) -> Any:
    content = [{"type": "text", "text": before}, png(colour), {"type": "text", "text": after}]
    request = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}
    return ChatRequest.model_validate({**request, "max_completion_tokens": 20, **fields})


def embedding_request(texts: str | list[str], **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate({"model": "bert", "input": texts, **fields})


def vision_config() -> LlamaCpp.Config:
    projector_path = tiny_projector(models_dir() / PACKAGED_MODELS[MODEL].filename)
    return small_config(projector_path=projector_path, context_tokens=512, parallel=1)


async def test_a_vision_model_sees_the_pixels(model_is_there: None) -> None:
    async with started(await asyncio.to_thread(vision_config)) as llama:
        (model,) = await llama.models()
        assert model.modalities == {"image"}
        question = show(RED, after=". Which colour is the car?", max_completion_tokens=12)
        assert "red" in text_of(await drain(llama, question))
        remote = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
        with pytest.raises(Unsupported) as caught:
            await drain(llama, show(RED, messages=[{"role": "user", "content": [remote]}]))
        assert caught.value.param == "messages[0].content[0]"


@pytest.mark.long
async def test_images_are_counted_and_read_under_a_schema(model_is_there: None) -> None:
    async with started(await asyncio.to_thread(vision_config)) as llama:
        for colour, word in ((RED, "red"), (BLUE, "blue")):
            question = show(colour, after=". Which colour is the car?")
            assert word in text_of(await drain(llama, question))
            # the count has the image's tokens
            assert await llama.count_tokens(question) > await llama.count_tokens(
                question.model_copy(update={"messages": [question.messages[0].model_copy(update={"content": "x"})]})
            )
        schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert "blue" in text_of(await drain(llama, show(BLUE, response_format=form)))


async def test_a_missing_projector_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="projector_path"):
        async with started(small_config(projector_path=tmp_path / "none.gguf", model_path=__file__)):
            pass


async def test_an_embedding_model_makes_the_vectors_of_its_weights(tmp_path: Path) -> None:
    """The numpy implementation is the reference, with the same weights and vocabulary."""
    folder = write_tiny_bert(tmp_path / "bert")
    file = write_bert_gguf(folder, tmp_path / "bert.gguf")
    texts = ["the cat", "a kitten on the stock market.", "cats"]
    reference = MiniLM(MiniLM.Config.model_validate({"model_path": folder, "threads": 1}))
    await reference.start()
    try:
        expected = await reference.embed(embedding_request(texts, model="all-minilm-l6-v2"))
    finally:
        await reference.close()
    async with started(small_config(model_path=file, context_tokens=512)) as llama:
        (model,) = await llama.models()
        assert (model.id, model.embedding_dimensions) == ("bert", 64)
        embeddings = await llama.embed(embedding_request(texts))
        for one, two in zip(expected.vectors, embeddings.vectors, strict=True):
            assert float(np.dot(np.asarray(one), np.asarray(two))) > 0.9999
        many = await llama.embed(embedding_request(texts * 20))
        assert len(many.vectors) == 60
        with pytest.raises(Unsupported) as caught:
            await llama.embed(embedding_request("a", dimensions=3))
        assert caught.value.param == "dimensions"
        with pytest.raises(ContextLengthExceeded):
            await llama.embed(embedding_request("cat " * 1000))
        completion = CompletionRequest.model_validate({"model": "bert", "prompt": "hi"})
        with pytest.raises(Unsupported, match="cannot complete texts"):
            await anext(llama.complete(completion))
        with pytest.raises(Unsupported, match="cannot chat"):
            await drain(
                llama, ChatRequest.model_validate({"model": "bert", "messages": [{"role": "user", "content": "hi"}]})
            )


async def test_models_of_the_catalogue_bring_their_projector_and_their_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first is loaded, so the second one's files may hold anything that fits the catalogue."""
    weights = write_bert_gguf(write_tiny_bert(tmp_path / "bert"), tmp_path / "bert.gguf").read_bytes()
    with running_hub() as hub, hub_environment(hub, str(tmp_path)):
        files = [
            HubFile("o/tiny-GGUF", name, COMMIT, len(content), hub.put("o/tiny-GGUF", name, content))
            for name, content in (("vectors.gguf", weights), ("sees.gguf", b"GGUF" + weights), ("mmproj.gguf", b"x"))
        ]
        for name, kind, projector in (("vectors", "embedding", None), ("sees", "chat", files[2])):
            file = next(file for file in files if file.file == f"{name}.gguf")
            model = CatalogueModel(name, kind, "MIT", 512, 256, (file,), projector)  # type: ignore[arg-type]  # literals
            monkeypatch.setitem(cast("dict[str, CatalogueModel]", CATALOGUE), name, model)
        small = small_config(model="vectors", models=["sees"], context_tokens=256, memory_gb=2)
        async with started(small) as llama:
            vectors, sees = await llama.models()
            assert (vectors.id, vectors.embedding_dimensions, vectors.modalities) == ("vectors", 64, frozenset())
            assert (sees.id, sees.embedding_dimensions, sees.modalities) == ("sees", None, {"image"})
            embeddings = await llama.embed(embedding_request("the cat", model="vectors"))
            assert len(embeddings.vectors[0]) == 64
            with pytest.raises(Unsupported, match="makes no embeddings"):
                await llama.embed(embedding_request("the cat", model="sees"))
