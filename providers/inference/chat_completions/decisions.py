"""Decisions of models on servers elsewhere: by the server's own route for them, else by the labels of a chat."""

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from apis.chat import ChatRequest
from apis.decisions import DecisionRequest, Decisions
from apis.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, PayloadTooLarge, UpstreamError
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import UpstreamEngine
from providers.inference.chat_completions.first_token import MAX_TOP_LOGPROBS, FirstToken
from providers.inference.chat_completions.replicas import Upstreams
from providers.inference.chat_completions.system_one import request_to_system_one_body
from providers.inference.decisions.labels import LABELS, require_labels
from providers.inference.decisions.prompts import build_chat
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels

_PARALLEL: Final = 8
"""Rows that a server is sent at once."""
_MAX_MODELS: Final = 1024
_VERDICT_S: Final = 300.0
"""Seconds after which a model without decisions of its own is tried again: its server may be a newer one."""
_FEW_PROBABILITIES: Final = f"its server reports {MAX_TOP_LOGPROBS} probabilities"

ScoreChat = Callable[[ChatRequest], Awaitable[FirstToken]]


class RemoteDecisions:
    """The decisions of models on other servers."""

    def __init__(self, engine: UpstreamEngine) -> None:
        self._fields: dict[str, Any] = {"max_completion_tokens": 1, "temperature": 0, "logprobs": True}
        self._fields["top_logprobs"] = MAX_TOP_LOGPROBS
        if engine == "vllm":
            self._fields["chat_template_kwargs"] = {"enable_thinking": False}
        self._retry_at = RecentEntries[str, float](_MAX_MODELS)

    async def decide(self, upstreams: Upstreams, request: DecisionRequest, score: ScoreChat) -> Decisions:
        """Return the decisions: of the server's own route where it has one for the model, else by `score`, which reads
        the first token of the answer to a chat."""
        decisions = await self._decide_natively(upstreams, request)
        return decisions or await self._decide_by_labels(request, score)

    async def _decide_natively(self, upstreams: Upstreams, request: DecisionRequest) -> Decisions | None:
        """Return the decisions of the server's own route; None where it has none for this model or this request."""
        body = request_to_system_one_body(request)
        if body is None or time.monotonic() < (self._retry_at.find(request.model) or 0.0):
            return None
        try:
            return await upstreams.decide(request, body)
        except (ContextLengthExceeded, PayloadTooLarge, ModelNotFound):
            raise
        except InvalidRequest:  # also Unsupported: servers say in several ways that a model makes none
            self._retry_at[request.model] = time.monotonic() + _VERDICT_S
            return None

    async def _decide_by_labels(self, request: DecisionRequest, score: ScoreChat) -> Decisions:
        require_labels(MAX_TOP_LOGPROBS, request.questions, _FEW_PROBABILITIES)
        fields = dict(self._fields)
        fields["prompt_cache_key"], fields["cache_salt"] = request.prompt_cache_key, request.cache_salt
        fields["cache_root"] = secrets.token_hex(16)

        async def read(row: DecisionRow) -> LabelScores:
            token = await score(build_chat(request.model, row.messages, **fields))
            weights = [token.probabilities.get(label, 0.0) for label in LABELS[: row.label_count]]
            if not any(weights):
                raise UpstreamError(
                    "The model's answer would begin with none of the options. It may reason first: decisions need a "
                    "model, or a setting of its server, without reasoning."
                )
            return LabelScores(weights, min(sum(weights), 1.0), token.usage)

        return await decide_by_labels(request, LABELS, read, parallel=_PARALLEL)
