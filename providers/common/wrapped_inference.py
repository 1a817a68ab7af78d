"""WrappedInference: the parts that every wrapper of an Inference leaves as they are."""

from collections.abc import AsyncGenerator, Sequence

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.inference import DefaultSampling, Inference, Model, ModelHost, ModelNames
from apis.observation.background import UpstreamHealth
from apis.provider import ProviderMetrics
from apis.sink import Sink
from apis.transcription import Transcript, TranscriptionRequest
from apis.wire.base import Effort


class WrappedInference(Inference):
    """Forwards every call to the Inference that it wraps; a subclass changes those that it is about."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def models(self) -> Sequence[Model]:
        return await self._inference.models()

    async def find_names(self, model: str) -> ModelNames:
        return await self._inference.find_names(model)

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        await self._inference.stream(request, sink)

    async def count_tokens(self, request: ChatRequest) -> int:
        return await self._inference.count_tokens(request)

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        return await self._inference.used_effort(request)

    async def default_sampling(self, model: str) -> DefaultSampling | None:
        return await self._inference.default_sampling(model)

    async def model_host(self, model: str) -> ModelHost:
        return await self._inference.model_host(model)

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        return await self._inference.embed(request, tenant=tenant)

    async def decide(self, request: DecisionRequest) -> Decisions:
        return await self._inference.decide(request)

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        return self._inference.complete(request)

    async def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Transcript:
        return await self._inference.transcribe(request, sink)

    def upstreams(self) -> Sequence[UpstreamHealth]:
        return self._inference.upstreams()

    def metrics(self) -> ProviderMetrics | None:
        return self._inference.metrics()
