"""Inference API: models by id, of language, embeddings and speech. A request goes in whole; its output streams back as
deltas.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from apis.chat import ChatRequest, NativeToolName
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta, DeltaBatch
from apis.documents.embeddings import EmbeddingRequest, Embeddings
from apis.errors import Unsupported
from apis.model_pulls import ModelInstaller
from apis.observation.background import UpstreamHealth
from apis.provider import Provider
from apis.sink import Sink, Stream, put_all
from apis.transcription import Transcript, TranscriptionRequest
from apis.wire.base import Effort

Modality = Literal["image", "file", "audio"]
Constraint = Literal["json_schema", "grammar"]
"""A constraint on generated text: the schema of a format, or the grammar of a custom tool's input."""


@dataclass(frozen=True, slots=True)
class Model:
    """Model that a provider serves now. `modalities` are its input kinds other than text, None if unknown;
    `native_tools` are the tools it accepts as a NativeTool. An embedding model has `embedding_dimensions`, if known;
    `enforces` are the constraints that its engine promises to hold: others are checked when the text is complete.
    With `caches_prefixes`, a chat whose prompt begins as an earlier one's did is cheaper. `shows_all_reasoning` is
    false where the template of the model's server decides what a chat with `all_reasoning` is shown."""

    id: str
    owned_by: str
    created: int = 0
    context_tokens: int | None = None
    modalities: frozenset[Modality] | None = None
    native_tools: frozenset[NativeToolName] = frozenset()
    embedding_dimensions: int | None = None
    enforces: frozenset[Constraint] = frozenset()
    caches_prefixes: bool = False
    shows_all_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class ModelHost:
    """Where a model runs, for telemetry: `provider_name` as OpenTelemetry's `gen_ai.provider.name`; `is_remote` for a
    server of its own."""

    provider_name: str = "responses_stack"
    is_remote: bool = False


LOCAL_HOST: Final = ModelHost()


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The sampling of requests without their own."""

    temperature: float = 1.0
    top_p: float = 1.0


ALL_CONSTRAINTS: Final[frozenset[Constraint]] = frozenset({"json_schema", "grammar"})


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of one model. Usage is counted by `name`, under which the model is listed; `names` are all that reach
    it, with the one that was asked for. `shared` are ids that other models of other providers have, too: who closes or
    limits such an id means this model as well. `is_listed` is None where only a listing of the models shows it."""

    name: str
    names: frozenset[str]
    shared: frozenset[str] = frozenset()
    is_listed: bool | None = None

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names other than `name`, those first that reach this model alone."""
        return (*sorted(self.names - {self.name}), *sorted(self.shared))


class CallAttempts:
    """Progress of one model call: `is_sent` once it is sent to a server that answers with a status, `has_failed` after
    an attempt that is being repeated, `is_accepted` once a server has taken the request and generates. `on_accepted` is
    called then, if it is set."""

    __slots__ = ("has_failed", "is_accepted", "is_sent", "on_accepted")

    def __init__(self) -> None:
        self.is_sent = self.has_failed = self.is_accepted = False
        self.on_accepted: Callable[[], None] | None = None

    def accept(self) -> None:
        """Record that a server has taken the request."""
        self.is_accepted = True
        if self.on_accepted is not None:
            self.on_accepted()


CALL_ATTEMPTS: Final[ContextVar[CallAttempts | None]] = ContextVar("call_attempts", default=None)
"""The attempts that the caller of `Inference.chat` observes; None where nothing waits for them. A provider that repeats
attempts reports here, so that a stream can still become an HTTP error while no server has accepted it."""


class Inference(Provider, ABC):
    """Models by id, for chats, decisions, embeddings and transcriptions. The layers above see a model of language only
    through messages and deltas."""

    @abstractmethod
    async def models(self) -> Sequence[Model]:
        """Return the models that the provider's server lists now. Raises UpstreamError when the server does not
        respond."""

    async def find_names(self, model: str) -> ModelNames:
        """Return all names of the model that this name reaches, for permissions, limits and prices; by default a model
        has one. Raises UpstreamError where the server that may have the model does not respond."""
        return ModelNames(model, frozenset({model}))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.chat is Inference.chat and cls.stream is Inference.stream:
            raise TypeError(f"{cls.__name__} has neither `chat` nor `stream`.")

    def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        """Generate a response as non-empty batches of deltas; the last delta of the last batch is the only Finish.

        A stream that breaks off raises an error and never ends with an invented Finish: UpstreamError, UpstreamTimeout,
        RateLimited, ContextLengthExceeded, ModelNotFound, InvalidRequest. A field that the provider cannot honour
        raises Unsupported with the field's name before the first batch. Closing the generator stops the generation
        within one second: always iterate under `contextlib.aclosing`.

        A provider has this method or `stream`.
        """
        return Stream(partial(self.stream, request))

    async def stream(self, request: ChatRequest, sink: Sink[Delta]) -> None:
        """Put the batches of `chat` into `sink`, with the promises and errors of `chat`; cancelling stops the
        generation. A provider that receives its data in a callback has this method, writes each batch there, and puts
        the last one. An error of the sink ends the stream, and is raised."""
        await put_all(self.chat(request), sink)

    @abstractmethod
    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the prompt in tokens as the model sees it. Raises CountingUnsupported where it cannot be
        known, and the errors of `chat` for a chat that the model cannot be sent."""

    async def used_effort(self, request: ChatRequest) -> Effort | None:
        """Return the reasoning effort that the model is shown for this request; None where only the model's server
        knows, which is the default."""
        return None

    async def default_sampling(self, model: str) -> DefaultSampling | None:
        """Return the sampling of the model's requests that have none of their own; None where only the model's server
        knows it, which is the default."""
        return None

    async def model_host(self, model: str) -> ModelHost:
        """Return where the model runs; by default in this process. Raises nothing."""
        return LOCAL_HOST

    async def embed(self, request: EmbeddingRequest, *, tenant: str = "") -> Embeddings:
        """Return one vector per input. Where requests wait for each other, tenants take turns. Raises the errors of
        `chat`, and Unsupported for a model without embeddings, which is the default."""
        raise Unsupported(f"The model '{request.model}' makes no embeddings.", param="model")

    async def decide(self, request: DecisionRequest) -> Decisions:
        """Return the probabilities of the options of each question. Raises the errors of `chat`, and Unsupported for a
        model without decisions, which is the default, for one that cannot read images, and for too many options."""
        raise Unsupported(f"The model '{request.model}' makes no decisions.", param="model")

    def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionBatch]:
        """Continue the prompts of a text completion, and yield the pieces in non-empty batches; every completion ends
        with a `finish_reason`. The promises of `chat` hold. Raises Unsupported for a model without text completions,
        which is the default."""
        raise Unsupported(
            f"The model '{request.model}' has no text completions here: use responses or chat completions.",
            param="model",
        )

    async def transcribe(self, request: TranscriptionRequest, sink: Sink[str]) -> Transcript:
        """Return the words of an audio file. Where the request is streamed, put its text into `sink` in pieces as they
        come. The promises of `stream` hold. Raises Unsupported for a model that transcribes no audio, which is the
        default."""
        raise Unsupported(f"The model '{request.model}' transcribes no audio.", param="model")

    def installer(self) -> ModelInstaller | None:
        """Return what fetches further models for this provider; None where it serves those of its run config alone."""
        return None

    def upstreams(self) -> Sequence[UpstreamHealth]:
        """Return the servers that the provider sends requests to and their health as it last saw it; none for a
        provider that computes by itself, or passes on to other providers. It costs next to nothing."""
        return ()
