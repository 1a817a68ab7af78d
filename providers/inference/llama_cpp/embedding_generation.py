"""Embedding models on llama.cpp: texts to vectors, no chats."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import DeltaBatch
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import ContextLengthExceeded, Unsupported
from apis.inference import Model
from apis.wire.base import Effort
from providers.inference.chat_completions.embeddings import join_embeddings, split_request
from providers.inference.chat_completions.errors import UpstreamUnavailable
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.generation import ClientLender


class EmbeddingGeneration:
    """See Generation. Vectors have `dimensions`, and a text at most `context_tokens`."""

    def __init__(self, dimensions: int, context_tokens: int) -> None:
        self._dimensions = dimensions
        self._context_tokens = context_tokens

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        return replace(model, modalities=frozenset(), enforces=frozenset(), embedding_dimensions=self._dimensions)

    def check(self, request: ChatRequest) -> None:
        """Raise Unsupported: the model has no chats."""
        raise self._build_refusal(request.model, "chat")

    def check_completion(self, request: CompletionRequest) -> None:
        """Raise Unsupported: the model has no text completions."""
        raise self._build_refusal(request.model, "complete texts")

    def check_decision(self, request: DecisionRequest) -> None:
        """Raise Unsupported: the model makes no decisions."""
        raise self._build_refusal(request.model, "decide")

    async def decide(self, client: EngineClient, request: DecisionRequest) -> Decisions:
        """Raise Unsupported: the model makes no decisions."""
        raise self._build_refusal(request.model, "decide")

    async def generate(self, client: EngineClient, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Raise Unsupported: the model has no chats."""
        self.check(request)
        yield ()  # makes this function a generator

    async def complete(self, client: EngineClient, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Raise Unsupported: the model has no text completions."""
        self.check_completion(request)
        yield ()  # makes this function a generator

    async def count_tokens(self, lend_client: ClientLender, request: ChatRequest) -> int:
        """Raise Unsupported: the model has no chats."""
        self.check(request)
        return 0

    def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return None: the model does not reason."""
        return None

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

    def _build_refusal(self, model: str, action: str) -> Unsupported:
        return Unsupported(f"The model '{model}' makes embeddings (/v1/embeddings); it cannot {action}.", param="model")

    async def _check_lengths(self, client: EngineClient, request: EmbeddingRequest) -> None:
        """Raise ContextLengthExceeded naming the first text that is too long."""
        for position, one in enumerate(request.inputs):
            tokens = await client.count_text_tokens(one) if isinstance(one, str) else len(one)
            if tokens > self._context_tokens:
                raise ContextLengthExceeded(
                    f"This model embeds at most {self._context_tokens:,} tokens of a text, and here are {tokens:,}.",
                    param="input" if isinstance(request.input, str) else f"input[{position}]",
                )
