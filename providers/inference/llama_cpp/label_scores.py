"""Reads the distribution over label tokens at one position from llama.cpp's server.

A bias that is equal for all labels leaves them alone among the likeliest tokens, and their proportions as they are. So
the engine's list of probabilities is the softmax over the labels.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from apis.deltas import Usage
from apis.errors import UpstreamError
from providers.inference.chat_completions.usage import parse_count
from providers.inference.decisions.labels import Label
from providers.inference.decisions.rows import LabelScores

_BIAS: Final = 100.0
"""Added to the logits of all labels: more than what lies between the logits of any two tokens."""
_UNCUT: Final[Mapping[str, Any]] = {"temperature": 1, "samplers": ["temperature"]}
"""Sampling that leaves all tokens and their probabilities."""


class _Candidate(msgspec.Struct):
    id: int
    prob: float = 0.0
    logprob: float = float("-inf")


class _Position(_Candidate):
    top_probs: list[_Candidate] = []
    top_logprobs: list[_Candidate] = []


class _ChatLogprobs(msgspec.Struct):
    content: list[_Position]


class _ChatChoice(msgspec.Struct):
    logprobs: _ChatLogprobs


class _PromptDetails(msgspec.Struct):
    cached_tokens: Any = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: _PromptDetails = msgspec.field(default_factory=_PromptDetails)


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _ChatUsage


class _Timings(msgspec.Struct):
    cache_n: Any = None
    prompt_n: Any = None
    predicted_n: Any = None


class _CompletionAnswer(msgspec.Struct):
    completion_probabilities: list[_Position]
    timings: _Timings


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The one token that the engine has sampled: its natural-log probability where no bias is counted in, and the
    probabilities of the likeliest tokens by their ids where it is."""

    token_id: int
    logprob: float
    probabilities: Mapping[int, float]
    usage: Usage


Ask = Callable[[Mapping[str, Any]], Awaitable[ScoredToken]]
"""Sends one prompt with these fields of the engine's sampling."""


async def score_labels(ask: Ask, labels: Sequence[Label], *, measures_mass: bool) -> LabelScores:
    """Return the scores of the labels at the end of a prompt. With `measures_mass` the engine reads it once more, for
    the probability that it gave one of them among all tokens."""
    ids = [token_id for label in labels for token_id in label.token_ids]
    bias = {"logit_bias": [[token_id, _BIAS] for token_id in ids]}
    scored = await ask({**_UNCUT, **bias, "n_probs": len(ids), "post_sampling_probs": True})
    weights = [sum(scored.probabilities.get(token_id, 0.0) for token_id in label.token_ids) for label in labels]
    if not measures_mass:
        return LabelScores(weights, None, scored.usage)
    raw = await ask({**_UNCUT, **bias, "n_probs": 1})
    share = scored.probabilities.get(raw.token_id, 0.0)
    mass = min(math.exp(raw.logprob) / share, 1.0) if share > 0 else None
    return LabelScores(weights, mass, scored.usage)


def read_scored_chat(answer: Mapping[str, Any]) -> ScoredToken:
    """Return the token of an answer of /v1/chat/completions. Raises UpstreamError for one without probabilities."""
    chat = _convert(answer, _ChatAnswer)
    usage = chat.usage
    counts = Usage(
        parse_count(usage.prompt_tokens),
        parse_count(usage.completion_tokens),
        parse_count(usage.prompt_tokens_details.cached_tokens),
    )
    return _build_token([position for choice in chat.choices for position in choice.logprobs.content], counts)


def read_scored_completion(answer: Mapping[str, Any]) -> ScoredToken:
    """Return the token of an answer of /completion. Raises UpstreamError for one without probabilities."""
    completion = _convert(answer, _CompletionAnswer)
    cached = parse_count(completion.timings.cache_n)
    counts = Usage(
        cached + parse_count(completion.timings.prompt_n), parse_count(completion.timings.predicted_n), cached
    )
    return _build_token(completion.completion_probabilities, counts)


AnswerT = TypeVar("AnswerT", _ChatAnswer, _CompletionAnswer)


def _convert(answer: Mapping[str, Any], answer_type: type[AnswerT]) -> AnswerT:
    try:
        return msgspec.convert(answer, answer_type)
    except msgspec.ValidationError as exc:
        raise UpstreamError("The local engine (llama.cpp) sent an answer without probabilities.") from exc


def _build_token(positions: Sequence[_Position], usage: Usage) -> ScoredToken:
    if not positions:
        raise UpstreamError("The local engine (llama.cpp) sent an answer without probabilities.")
    first = positions[0]
    return ScoredToken(first.id, first.logprob, {each.id: each.prob for each in first.top_probs}, usage)
