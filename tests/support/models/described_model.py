"""A scripted model that describes itself as a model of an engine does."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch, Finish, TextDelta, Usage
from apis.inference import ALL_CONSTRAINTS, Modality, Model
from apis.wire.base import Effort
from providers.inference.harmony.options import HarmonyOptions
from providers.inference.scripted import Scripted


class Described(Scripted):
    """Plays its script, with a window, image input, and the efforts of Harmony where `has_efforts` is set. A second
    model of its list makes embeddings. `title` answers requests without tools, in which clients let a model
    name their sessions."""

    class Config(Scripted.Config):
        context_tokens: int | None = 131_072
        modalities: frozenset[Modality] | None = None
        has_efforts: bool = True
        title: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._described = config

    async def models(self) -> Sequence[Model]:
        config = self._described
        model = Model(
            config.model,
            "tests",
            context_tokens=config.context_tokens,
            modalities=config.modalities,
            enforces=ALL_CONSTRAINTS,
        )
        return [Model("embedder", "tests", embedding_dimensions=384), model]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        if self._described.title is not None and not request.tools:
            yield (TextDelta(self._described.title), Finish("stop", Usage(input_tokens=1, output_tokens=1)))
            return
        async with aclosing(super().chat(request)) as batches:
            async for batch in batches:
                yield batch

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        return HarmonyOptions().used_effort(request.reasoning_effort) if self._described.has_efforts else None


DESCRIBED = "tests.support.models.described_model:Described"
"""The name of the provider in a run config."""
