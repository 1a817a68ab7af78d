"""Embedding models on llama.cpp: texts to vectors, no chats."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final, Self

from apis.chat import ChatRequest
from apis.deltas import DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ContextLengthExceeded, Unsupported
from apis.inference import Model
from apis.wire.base import Effort
from providers.inference.chat_completions.embeddings import join_embeddings, split_request
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.llama_cpp.client import EngineClient

EMBEDDING_ARCHITECTURES: Final = frozenset(
    (
        *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
        *("modern-bert", "eurobert", "gemma-embedding"),
    )
)
"""`general.architecture` of the files whose models make vectors."""


class EmbeddingGeneration:
    """See Generation."""

    def __init__(self, dimensions: int, context_tokens: int) -> None:
        self._dimensions = dimensions
        self._context_tokens = context_tokens

    @classmethod
    async def load(cls, client: EngineClient, model: str, context_tokens: int) -> Self:
        """Embed one text to learn the vectors' length. A text may have `context_tokens`."""
        embeddings = await client.embed(EmbeddingRequest(model=model, input="a", dimensions=None))
        return cls(len(embeddings.vectors[0]), context_tokens)

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        return replace(model, modalities=frozenset(), enforces=frozenset(), embedding_dimensions=self._dimensions)

    def check(self, request: ChatRequest) -> None:
        """Raise Unsupported: the model has no chats."""
        raise Unsupported(
            f"The model '{request.model}' makes embeddings (/v1/embeddings); it cannot chat.", param="model"
        )

    async def generate(self, client: EngineClient, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Raise Unsupported: the model has no chats."""
        self.check(request)
        yield ()  # makes this function a generator

    async def count_tokens(self, client: EngineClient, request: ChatRequest) -> int:
        """Raise Unsupported: the model has no chats."""
        self.check(request)
        return 0

    def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return None: the model does not reason."""
        return None

    async def embed(self, client: EngineClient, request: EmbeddingRequest) -> Embeddings:
        """See `Inference.embed`. `dimensions` must be the model's own."""
        if request.dimensions not in (None, self._dimensions):
            raise Unsupported(
                f"The model '{request.model}' makes vectors of {self._dimensions} dimensions only.",
                param="dimensions",
                code="unsupported_value",
            )
        try:
            return join_embeddings([await client.embed(part) for part in split_request(request)])
        except UpstreamUnavailable:
            # The engine reports a text that is too long as a failure of its own.
            await self._check_lengths(client, request)
            raise

    async def _check_lengths(self, client: EngineClient, request: EmbeddingRequest) -> None:
        """Raise ContextLengthExceeded naming the first text that is too long."""
        for position, one in enumerate(request.inputs):
            tokens = await client.count_text_tokens(one) if isinstance(one, str) else len(one)
            if tokens > self._context_tokens:
                raise ContextLengthExceeded(
                    f"This model embeds at most {self._context_tokens:,} tokens of a text, and here are {tokens:,}.",
                    param="input" if isinstance(request.input, str) else f"input[{position}]",
                )
