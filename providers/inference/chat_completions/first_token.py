"""The likeliest first tokens of an answer, as servers of chat and of text completions report them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from apis.deltas import Usage
from apis.errors import Unsupported, UpstreamError
from providers.inference.chat_completions.body import body_to_json
from providers.inference.chat_completions.usage import parse_usage

MAX_TOP_LOGPROBS: Final = 20
"""The most alternatives of a token that servers report."""
MAX_SCORED_IDS: Final = 128
"""The most tokens that a request to vLLM names."""
_ID_PREFIX: Final = "token_id:"
_SPACE_LETTERS: Final = ("\u2581", "\u0120")
"""How vocabularies write a space."""
_SPACE_MARKS: Final = f" \t\r\n{''.join(_SPACE_LETTERS)}"
"""Spaces around a token's text."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The probabilities of the likeliest first tokens, or of those that the request named, by their texts without the
    spaces around them."""

    probabilities: Mapping[str, float]
    usage: Usage

    def find_scored(self, token_ids: Iterable[int]) -> dict[int, float] | None:
        """Return the probabilities of the tokens that the request named; None from a server that leaves one out."""
        scored = {token_id: self.probabilities.get(f"{_ID_PREFIX}{token_id}") for token_id in token_ids}
        probabilities = {token_id: each for token_id, each in scored.items() if each is not None}
        return probabilities if len(probabilities) == len(scored) else None


class _Alternative(msgspec.Struct):
    token: str = ""
    logprob: float | None = None


class _Position(_Alternative):
    top_logprobs: list[_Alternative] | None = None


class _ChatLogprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _ChatChoice(msgspec.Struct):
    logprobs: _ChatLogprobs | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: Any = None


class _TextLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _TextChoice(msgspec.Struct):
    logprobs: _TextLogprobs | None = None


class _TextAnswer(msgspec.Struct):
    choices: list[_TextChoice]
    usage: Any = None


class _Tokens(msgspec.Struct):
    tokens: list[Any]
    token_strs: list[Any] | None = None


_AnswerT = TypeVar("_AnswerT", _ChatAnswer, _TextAnswer, _Tokens)


def scored_ids_to_fields(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields by which vLLM reports the probabilities of these tokens, at most MAX_SCORED_IDS, whether or not
    they are among the likeliest. Servers that do not know the fields ignore them."""
    return {"logprob_token_ids": token_ids, "return_tokens_as_token_ids": True} if token_ids else {}


def texts_to_tokenize_body(model: str, texts: Iterable[str]) -> bytes:
    """Return the body of vLLM's POST /tokenize for texts without line breaks, each on a line of its own: no token of a
    vocabulary goes on after a line break."""
    body = {"model": model, "prompt": "".join(f"\n{text}" for text in texts), "add_special_tokens": False}
    return body_to_json({**body, "return_token_strs": True})


def parse_tokens(body: bytes) -> dict[str, int]:
    """Return the ids of the tokens in an answer of /tokenize by their texts. There are none from a server that reports
    no texts. Raises UpstreamError."""
    answer = _decode(body, _Tokens)
    named = zip(answer.token_strs or (), answer.tokens, strict=False)
    return {_plain_space(text): each for text, each in named if isinstance(text, str) and type(each) is int}


def _plain_space(text: str) -> str:
    return f" {text[1:]}" if text[:1] in _SPACE_LETTERS else text


def token_ids_to_body(model: str, token_ids: Sequence[int], extra_body: Mapping[str, Any]) -> bytes:
    """Return the body of a text completion of one token after a prompt of tokens."""
    body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, "logprobs": MAX_TOP_LOGPROBS}
    return body_to_json({**body, **extra_body})


def parse_chat_answer(body: bytes) -> FirstToken:
    """Return the first token of an answer of /chat/completions. Raises UpstreamError, and Unsupported for a server that
    reports no probabilities."""
    answer = _decode(body, _ChatAnswer)
    logprobs = answer.choices[0].logprobs if answer.choices else None
    positions = logprobs.content if logprobs is not None else None
    if not positions:
        raise _no_probabilities()
    first = positions[0]
    alternatives = first.top_logprobs or [first]
    return _build_token(((each.token, each.logprob) for each in alternatives), answer.usage)


def parse_text_answer(body: bytes) -> FirstToken:
    """Return the first token of an answer of /completions. Raises as `parse_chat_answer`."""
    answer = _decode(body, _TextAnswer)
    logprobs = answer.choices[0].logprobs if answer.choices else None
    top = logprobs.top_logprobs[0] if logprobs is not None and logprobs.top_logprobs else None
    if not top:
        raise _no_probabilities()
    return _build_token(top.items(), answer.usage)


def _decode(body: bytes, answer_type: type[_AnswerT]) -> _AnswerT:
    try:
        return msgspec.json.decode(body, type=answer_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError("The inference server sent an answer that is not valid.") from exc


def _build_token(alternatives: Iterable[tuple[str, float | None]], usage: object) -> FirstToken:
    probabilities: dict[str, float] = {}
    for token, logprob in alternatives:
        if logprob is not None and logprob == logprob:  # noqa: PLR0124 - NaN
            text = token.strip(_SPACE_MARKS)
            probabilities[text] = probabilities.get(text, 0.0) + math.exp(min(logprob, 0.0))
    return FirstToken(probabilities, parse_usage(usage))


def _no_probabilities() -> Unsupported:
    return Unsupported("This model's server reports no log probabilities, which decisions need.", param="model")
