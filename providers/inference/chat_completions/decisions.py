"""Decisions of models on servers elsewhere: by the server's own route for them, else by the labels of a chat."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from apis.chat import ChatRequest
from apis.decisions import DecisionRequest, Decisions
from apis.deltas import Usage
from apis.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    PayloadTooLarge,
    StackError,
    UpstreamError,
)
from providers.common.recent import RecentEntries
from providers.inference.chat_completions.body import UpstreamEngine
from providers.inference.chat_completions.first_token import MAX_SCORED_IDS, MAX_TOP_LOGPROBS, FirstToken
from providers.inference.chat_completions.replicas import Upstreams
from providers.inference.chat_completions.system_one import request_to_system_one_body
from providers.inference.decisions.labels import (
    FEW_LABELS,
    LABELS,
    Label,
    find_labels,
    list_spellings,
    require_labels,
)
from providers.inference.decisions.prompts import build_chat
from providers.inference.decisions.rows import DecisionRow, LabelScores, decide_by_labels

_PARALLEL: Final = 8
"""Rows that a server is sent at once."""
_MAX_MODELS: Final = 1024
_VERDICT_S: Final = 300.0
"""Seconds for which a model is known: its server may be replaced by another one."""
_LEAST_MASS: Final = 1e-3
"""The least share of all probability that the labels of a model have which begins with one of them."""
_FEW_PROBABILITIES: Final = f"its server reports {MAX_TOP_LOGPROBS} probabilities"
_NO_OPTION: Final = (
    "The model's answer would begin with none of the options. It may reason first: decisions need a model, or a "
    "setting of its server, without reasoning."
)

ScoreChat = Callable[[ChatRequest, Sequence[int]], Awaitable[FirstToken]]
"""Reads the first token of the answer to a chat; with ids of tokens, the probabilities of these where the server scores
chosen tokens."""


ScoreRow = Callable[[DecisionRow, Sequence[int]], Awaitable[FirstToken]]


class _TokensIgnoredError(Exception):
    """The server does not score chosen tokens."""


class RemoteDecisions:
    """The decisions of models on other servers."""

    def __init__(self, engine: UpstreamEngine) -> None:
        self._fields: dict[str, Any] = {"max_completion_tokens": 1, "temperature": 0, "logprobs": True}
        self._fields["top_logprobs"] = MAX_TOP_LOGPROBS
        self._scores_chosen_tokens = engine == "vllm"
        if engine == "vllm":
            self._fields["chat_template_kwargs"] = {"enable_thinking": False}
        self._retry_at = RecentEntries[str, float](_MAX_MODELS)
        self._labels = RecentEntries[str, tuple[float, Sequence[Label]]](_MAX_MODELS)
        """The labels of a model, and when they are looked for again; none where its server does not score them."""

    async def decide(
        self, upstreams: Upstreams, request: DecisionRequest, score: ScoreChat, labels: Sequence[Label] = ()
    ) -> Decisions:
        """Return the decisions: of the server's own route where it has one for the model, else by `score`. The server
        is asked for the labels of its vocabulary where they are not given."""
        decisions = await self._decide_natively(upstreams, request)
        return decisions or await self._decide_by_chat(upstreams, request, score, labels)

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

    async def _decide_by_chat(
        self, upstreams: Upstreams, request: DecisionRequest, score: ScoreChat, labels: Sequence[Label]
    ) -> Decisions:
        fields = dict(self._fields)
        fields["prompt_cache_key"], fields["cache_salt"] = request.prompt_cache_key, request.cache_salt
        fields["cache_root"] = secrets.token_hex(16)

        async def score_row(row: DecisionRow, scored_ids: Sequence[int]) -> FirstToken:
            return await score(build_chat(request.model, row.messages, **fields), scored_ids)

        if labels := await self._find_labels(upstreams, request.model, labels):
            require_labels(len(labels), request.questions, FEW_LABELS)
            try:
                return await _decide_by_chosen_tokens(request, labels, score_row)
            except _TokensIgnoredError:
                self._labels[request.model] = (time.monotonic() + _VERDICT_S, ())
        return await _decide_by_likeliest_tokens(request, score_row)

    async def _find_labels(self, upstreams: Upstreams, model: str, labels: Sequence[Label]) -> Sequence[Label]:
        """Return the labels whose tokens the model's server scores; none where it scores only the likeliest tokens."""
        if not self._scores_chosen_tokens:
            return ()
        until, remembered = self._labels.find(model) or (0.0, ())
        if time.monotonic() < until:
            return remembered
        if not labels:
            try:
                ids = await upstreams.query_any(lambda endpoint: endpoint.find_token_ids(model, list_spellings()))
            except InvalidRequest:
                ids = {}
            except StackError:  # the chat says why, if it fails, too
                return ()
            labels = find_labels(ids)
        self._labels[model] = (time.monotonic() + _VERDICT_S, labels)
        return labels


async def _decide_by_chosen_tokens(request: DecisionRequest, labels: Sequence[Label], score: ScoreRow) -> Decisions:
    """Return the decisions by the tokens of all labels. Raises _TokensIgnoredError."""

    async def read(row: DecisionRow) -> LabelScores:
        own = labels[: row.label_count]
        ids = [token_id for label in own for token_id in label.token_ids]
        probabilities: dict[int, float] = {}
        usage = Usage()
        for begin in range(0, len(ids), MAX_SCORED_IDS):
            part = ids[begin : begin + MAX_SCORED_IDS]
            try:
                token = await score(row, part)
            except (ContextLengthExceeded, PayloadTooLarge, ModelNotFound):
                raise
            except InvalidRequest as exc:
                raise _TokensIgnoredError from exc
            if (scored := token.find_scored(part)) is None:
                raise _TokensIgnoredError
            probabilities |= scored
            usage = usage.plus(token.usage)
        return _to_scores([sum(probabilities[each] for each in label.token_ids) for label in own], usage)

    return await decide_by_labels(request, [label.text for label in labels], read, parallel=_PARALLEL)


async def _decide_by_likeliest_tokens(request: DecisionRequest, score: ScoreRow) -> Decisions:
    """Return the decisions by the likeliest tokens, among which are those of the labels. Raises Unsupported for more
    options than a server reports tokens."""
    require_labels(MAX_TOP_LOGPROBS, request.questions, _FEW_PROBABILITIES)

    async def read(row: DecisionRow) -> LabelScores:
        token = await score(row, ())
        return _to_scores([token.probabilities.get(label, 0.0) for label in LABELS[: row.label_count]], token.usage)

    return await decide_by_labels(request, LABELS, read, parallel=_PARALLEL)


def _to_scores(weights: Sequence[float], usage: Usage) -> LabelScores:
    mass = min(sum(weights), 1.0)
    if mass < _LEAST_MASS:
        raise UpstreamError(_NO_OPTION)
    return LabelScores(weights, mass, usage)
