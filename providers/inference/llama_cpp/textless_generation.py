"""Models on llama.cpp that write no text."""

from collections.abc import AsyncGenerator

from apis.chat import ChatRequest
from apis.completion import CompletionBatch, CompletionRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Delta
from apis.errors import Unsupported
from apis.sink import Sink
from apis.wire.base import Effort
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.generation import ClientLender


class TextlessGeneration:
    """The part of a Generation that refuses: a model that writes no text has a `purpose` of its own."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose

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

    async def generate(self, client: EngineClient, request: ChatRequest, sink: Sink[Delta]) -> None:
        """Raise Unsupported: the model has no chats."""
        self.check(request)

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

    def _build_refusal(self, model: str, action: str) -> Unsupported:
        return Unsupported(f"The model '{model}' {self._purpose}; it cannot {action}.", param="model")
