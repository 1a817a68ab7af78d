"""Even: a provider whose model finds every option of a question equally likely."""

from collections.abc import AsyncGenerator, Sequence

from apis.chat import ChatRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import DeltaBatch, Usage
from apis.errors import Unsupported
from apis.inference import Inference, Model
from apis.provider import Provider


class Even(Inference):
    """One model, named `even`."""

    class Config(Provider.Config):
        """No fields."""

    def __init__(self, config: Config) -> None:
        self._model = Model(id="even", owned_by="tests")

    async def models(self) -> Sequence[Model]:
        return [self._model]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
        raise Unsupported("It does not chat.", param="model")
        yield ()

    async def count_tokens(self, request: ChatRequest) -> int:
        return 1

    async def decide(self, request: DecisionRequest) -> Decisions:
        counts = [len(question.options) for question in request.questions]
        return Decisions([[1 / count] * count for count in counts], Usage(1, 1))
