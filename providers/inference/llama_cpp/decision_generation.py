"""Models on llama.cpp that are made for decisions: the engine's own route answers the questions."""

from dataclasses import replace
from typing import Final

from apis.decisions import DecisionRequest, Decisions
from apis.errors import ContextLengthExceeded, InvalidRequest
from apis.inference import Model
from providers.inference.chat_completions.system_one import parse_system_one, request_to_system_one_body
from providers.inference.decisions.prompts import refuse_images
from providers.inference.llama_cpp.client import EngineClient
from providers.inference.llama_cpp.textless_generation import TextlessGeneration

DECISION_ENCODERS: Final = frozenset(("clef", "laya", "lfm2-d1-omni", "vllm-d3"))
"""The kinds whose models read a text in both directions."""


class DecisionGeneration(TextlessGeneration):
    """See Generation."""

    def __init__(self) -> None:
        super().__init__("makes decisions (/v1/decisions)")

    def describe(self, model: Model) -> Model:
        """See `Generation.describe`."""
        return replace(model, modalities=frozenset(), enforces=frozenset())

    def check_decision(self, request: DecisionRequest) -> None:
        """Raise Unsupported naming an image, and InvalidRequest naming a question with two options of one text."""
        refuse_images(request)
        for question in request.questions:
            if len({option.text for option in question.options}) < len(question.options):
                raise InvalidRequest(
                    "This model needs options of different texts.", param=question.param, code="invalid_value"
                )

    async def decide(self, client: EngineClient, request: DecisionRequest) -> Decisions:
        """See `Generation.decide`. The engine's own refusals name what the model cannot have."""
        body = request_to_system_one_body(request)
        assert body is not None  # `check_decision` has passed
        try:
            return parse_system_one(await client.decide(body, request.model), request)
        except ContextLengthExceeded as exc:
            raise ContextLengthExceeded(exc.message, param=request.input_param) from exc
