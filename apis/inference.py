"""Inference: a chat model behind one method. A request goes in whole, deltas come out as they are made."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from apis.chat import ChatRequest, NativeToolName
from apis.deltas import DeltaBatch
from apis.embeddings import EmbeddingRequest, Embeddings
from apis.errors import Unsupported
from apis.provider import Provider

Modality = Literal["image", "file"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served now. `modalities` are the inputs it takes beside text, None where not known;
    `native_tools` are those it takes as a NativeTool. A model of embeddings has `embedding_dimensions`, where known."""

    id: str
    owned_by: str
    created: int = 0
    context_tokens: int | None = None
    modalities: frozenset[Modality] | None = None
    native_tools: frozenset[NativeToolName] = frozenset()
    embedding_dimensions: int | None = None


class Inference(Provider, ABC):
    """Models by id, for chats and for embeddings. Messages and deltas are all that the layers above know of a model."""

    @abstractmethod
    async def models(self) -> Sequence[Model]:
        """What is served now, asked of whoever serves it. Raises UpstreamError when nobody answers."""

    @abstractmethod
    def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Generate, as non-empty steps of deltas; the last delta of the last step is the one Finish.

        A stream that breaks off raises and never ends in a made-up Finish: UpstreamError, UpstreamTimeout,
        RateLimited, ContextLengthExceeded, ModelNotFound, InvalidRequest. What the provider cannot honour is an
        Unsupported naming the field, raised before the first step. Closing the generator stops the generation within
        a second: always iterate under `contextlib.aclosing`.
        """

    @abstractmethod
    async def count_tokens(self, request: ChatRequest) -> int:
        """The prompt's length in tokens as the model would see it. Raises Unsupported where that cannot be known."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """A vector for each input. Raises as `chat` does; as here where a model makes none."""
        raise Unsupported(f"The model '{request.model}' makes no embeddings.", param="model")
