"""Log probabilities of tokens as servers report them."""

from collections.abc import Sequence
from typing import Final

import msgspec

from apis.deltas import TokenLogprob, TopLogprob
from providers.inference.chat_completions.text_repair import repair_surrogates

MIN_LOGPROB: Final = -9999.0


class _TopFields(msgspec.Struct, gc=False):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _TokenFields(_TopFields, gc=False):
    top_logprobs: list[_TopFields] | None = None


class Logprobs(msgspec.Struct, gc=False):
    """The log probabilities of the tokens of a chunk."""

    content: list[_TokenFields] | None = None


def build_logprob(token: _TokenFields) -> TokenLogprob:
    """Return the log probability of a token in the form of the API, with texts and numbers that JSON can hold."""
    top = (
        TopLogprob(repair_surrogates(one.token), clamp_logprob(one.logprob), _token_bytes(one))
        for one in token.top_logprobs or ()
    )
    return TokenLogprob(repair_surrogates(token.token), clamp_logprob(token.logprob), _token_bytes(token), tuple(top))


def clamp_logprob(logprob: float | None) -> float:
    """Return a log probability that JSON can hold and that every client accepts."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)


def _token_bytes(token: _TopFields) -> Sequence[int]:
    try:
        return list(bytes(token.bytes or ()) or repair_surrogates(token.token).encode())
    except (ValueError, OverflowError):  # numbers that are no bytes
        return list(repair_surrogates(token.token).encode())
