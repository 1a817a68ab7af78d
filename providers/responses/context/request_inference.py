"""RequestInferences: the Inference that the turns of one request run on, and the tokens of their prompts."""

from apis.inference import Inference
from apis.responses import CreateResponse
from providers.responses.context.reasoning_summary import SummarizingInference
from providers.responses.context.token_estimate import TokenCounter
from providers.responses.context.truncation import with_truncation


class RequestInferences:
    """Wraps one Inference as each request needs it. `summary_model` summarizes reasoning; None repeats it."""

    def __init__(self, inference: Inference, summary_model: str | None = None) -> None:
        self.token_counter = TokenCounter(inference)
        self._inference = inference
        self._summary_model = summary_model

    def build(self, request: CreateResponse) -> Inference:
        """Return the Inference for the chats of the request: it shortens prompts and summarizes reasoning where the
        request asks for that."""
        inference = with_truncation(self._inference, request)
        style = (request.reasoning.summary or request.reasoning.generate_summary) if request.reasoning else None
        return inference if style is None else SummarizingInference(inference, style, self._summary_model)
