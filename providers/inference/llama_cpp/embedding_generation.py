"""Embedding models on llama.cpp: texts to vectors, no chats."""

from dataclasses import replace

from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ContextLengthExceeded, Unsupported
from apis.inference import Model
from providers.inference.chat_completions.embeddings import join_embeddings, split_request
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.textless_generation import TextlessGeneration


class EmbeddingGeneration(TextlessGeneration):
    """See Generation. Vectors have `dimensions`, and a text at most `context_tokens`."""

    def __init__(self, dimensions: int, context_tokens: int) -> None:
        super().__init__("makes embeddings (/v1/embeddings)")
        self._dimensions = dimensions
        self._context_tokens = context_tokens

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        return replace(model, modalities=frozenset(), enforces=frozenset(), embedding_dimensions=self._dimensions)

    def check_embedding(self, request: EmbeddingRequest) -> None:
        """Raise Unsupported for vectors of another length than the model's own."""
        if request.dimensions not in (None, self._dimensions):
            raise Unsupported(
                f"The model '{request.model}' makes vectors of {self._dimensions} dimensions only.",
                param="dimensions",
                code="unsupported_value",
            )

    async def embed(self, client: EngineClient, request: EmbeddingRequest) -> Embeddings:
        """See `Inference.embed`; `check_embedding` has passed."""
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
