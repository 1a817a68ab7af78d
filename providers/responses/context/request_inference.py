"""RequestInferences: the Inference that the turns of one request run on, and the tokens of their prompts."""

from apis.inference import Inference
from apis.responses import CreateResponse
from apis.wire.text_format import JsonSchema
from providers.responses.context.answer_check import CheckedInference
from providers.responses.context.reasoning_summary import SummarizingInference
from providers.responses.context.token_estimate import TokenCounter
from providers.responses.context.truncation import with_truncation
from providers.responses.tools.models import ModelCatalog


class RequestInferences:
    """Wraps one Inference as each request needs it. `summary_model` summarizes reasoning; None repeats it."""

    def __init__(self, inference: Inference, models: ModelCatalog, summary_model: str | None = None) -> None:
        self.token_counter = TokenCounter(inference)
        self._inference = inference
        self._models = models
        self._summary_model = summary_model

    async def build(self, request: CreateResponse) -> Inference:
        """Return the Inference for the chats of the request: it shortens prompts and summarizes reasoning where the
        request asks for that, and checks an answer whose schema the engine does not promise to hold."""
        inference = with_truncation(self._inference, request)
        form = request.text.format if request.text else None
        is_strict = isinstance(form, JsonSchema) and form.strict is not False
        if is_strict and not await self._models.enforces(request.model, "json_schema"):
            inference = CheckedInference(inference, is_streamed=request.stream is True)
        style = (request.reasoning.summary or request.reasoning.generate_summary) if request.reasoning else None
        return inference if style is None else SummarizingInference(inference, style, self._summary_model)
