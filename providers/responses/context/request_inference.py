"""RequestInferences: the Inference that the turns of one request run on, and the tokens of their prompts."""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from apis.chat import ChatRequest
from apis.deltas import Finish, Usage
from apis.errors import StackError
from apis.inference import Inference
from apis.moderation import Moderation, ModerationScores
from apis.responses import CreateResponse, ReasoningOptions
from apis.wire.item_parts import InputText
from apis.wire.items import CustomToolCallOutput, FunctionCallOutput, InputMessage, Item
from apis.wire.request_options import ModerationOptions
from apis.wire.text_format import JsonObjectFormat, JsonSchema
from providers.common.chat_tokens import TokenCounters
from providers.common.moderated_inference import CountUse, ModeratedInference, RequestModeration
from providers.responses.context.answer_check import CheckedInference, CheckRules
from providers.responses.context.reasoning_summary import SummarizingInference
from providers.responses.context.truncation import TruncatingInference
from providers.responses.tools.models import ModelCatalog
from providers.responses.tools.offered import OfferedTools

_log = logging.getLogger(__name__)


class RequestInferences:
    """Wraps one Inference as each request needs it. `summary_model` summarizes reasoning; None repeats it, unless that
    is hidden. `moderation` judges the input and output of requests that ask for that."""

    def __init__(
        self,
        inference: Inference,
        models: ModelCatalog,
        summary_model: str | None = None,
        moderation: Moderation | None = None,
        *,
        hides_reasoning: bool = False,
    ) -> None:
        self.token_counters = TokenCounters(inference)
        self.inference = inference
        self._models = models
        self._summary_model = summary_model
        self._moderation = moderation
        self._hides_reasoning = hides_reasoning

    async def with_used_options(self, request: CreateResponse, chat: ChatRequest) -> CreateResponse:
        """Return the request with the options that have an effect, as far as the model's provider knows: its default
        sampling, the effort that the model is shown, and the turns whose reasoning it is sure to be shown. Else return
        it unchanged."""
        if request.temperature is None or request.top_p is None:
            sampling = await self.inference.default_sampling(request.model)
            if sampling is not None:
                values = {"temperature": sampling.temperature, "top_p": sampling.top_p}
                unset = {name: value for name, value in values.items() if getattr(request, name) is None}
                request = request.model_copy(update=unset)
        used: dict[str, Any] = {}
        if (effort := await self.inference.used_effort(chat)) is not None:
            used["effort"] = effort
        if chat.all_reasoning and not (await self._models.find(chat.model)).shows_all_reasoning:
            used["context"] = "current_turn"
        if not used:
            return request
        reasoning = (request.reasoning or ReasoningOptions()).model_copy(update=used)
        return request.model_copy(update={"reasoning": reasoning})

    async def moderate(
        self,
        request: CreateResponse,
        options: ModerationOptions,
        items: Sequence[Item],
        *,
        judged_input: ModerationScores | None,
        judged_output: ModerationScores | None,
        count_use: CountUse | None,
    ) -> RequestModeration:
        """Return the moderation that a request asks for by its `options`, after it has judged these items of its
        input, unless another worker has: `judged_input` and `judged_output` are the scores that it has found. Raises
        InvalidRequest for input that is blocked, and Unsupported where nothing is moderated."""
        moderation = RequestModeration(self._moderation, options, request.cache_salt, count_use)
        moderation.restore(judged_input, judged_output)
        if judged_input is None:
            await moderation.judge_input(_list_texts(items), "input")
        return moderation

    async def prefill(self, chat: ChatRequest) -> Usage:
        """Let the model's engine cache the prompt of the chat, and return the tokens that it read: none where the
        engine has no such cache, or fails, because a later request reads the prompt in any case."""
        if not (await self._models.find(chat.model)).caches_prefixes:
            return Usage()
        shortest = chat.model_copy(update={"max_completion_tokens": 1})
        try:
            async with aclosing(self.inference.chat(shortest)) as batches:
                async for batch in batches:
                    for delta in batch:
                        if isinstance(delta, Finish):
                            return msgspec.structs.replace(delta.usage, output_tokens=0, reasoning_tokens=0)
        except StackError as exc:
            _log.warning("a prompt for %s could not be prepared: %s", chat.model, exc.message)
        return Usage()

    async def build(
        self, request: CreateResponse, toolbox: OfferedTools, moderation: RequestModeration | None = None
    ) -> Inference:
        """Return the Inference for the chats of the request: it moderates answers, shortens prompts and summarizes
        reasoning where the request asks for that, and checks answers whose form the engine does not promise to
        hold."""
        inference = self.inference if moderation is None else ModeratedInference(self.inference, moderation)
        if request.truncation == "auto":
            inference = TruncatingInference(inference)
        form = request.text.format if request.text else None
        demands_json = isinstance(form, JsonObjectFormat) or (isinstance(form, JsonSchema) and form.strict is not False)
        if demands_json or toolbox.has_client_tools:
            is_streamed = request.stream is True
            rules = CheckRules(
                partial(self._models.enforces, request.model, "json_schema"),
                demands_json=demands_json,
                is_client_function=toolbox.is_client_tool,
                streams_text=is_streamed,
                streams_calls=is_streamed or request.background is True,
            )
            inference = CheckedInference(inference, rules)
        style = (request.reasoning.summary or request.reasoning.generate_summary) if request.reasoning else None
        if style is None or (self._hides_reasoning and self._summary_model is None):
            return inference
        return SummarizingInference(inference, style, self._summary_model, repeats_reasoning=not self._hides_reasoning)


def _list_texts(items: Sequence[Item]) -> Sequence[str]:
    """Return the texts of the user, and the outputs of the client's tools."""
    texts: list[str] = []
    for item in items:
        match item:
            case InputMessage(role="user", content=content):
                pass
            case FunctionCallOutput(output=content) | CustomToolCallOutput(output=content):
                pass
            case _:
                continue
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += [part.text for part in content if isinstance(part, InputText)]
    return texts
