"""The bounds of one answer that an upstream streams: bytes that it may hold, and tokens that it may have."""

from collections.abc import Sequence
from typing import Final

from apis.deltas import Delta, ReasoningDelta, RefusalDelta, TextDelta, ToolArgumentsDelta
from apis.errors import UpstreamError

DEFAULT_MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Bytes of text, reasoning and arguments of one answer, in UTF-8; a longer answer fails."""
MIN_DELTA_BYTES: Final = 16
"""Bytes that a delta counts at least, since the memory of a short one is that of its event."""
LOGPROB_BYTES: Final = 32
"""Bytes that the log probability of a token, or of an alternative to it, counts in an answer."""
BYTES_PER_TOKEN: Final = 4
"""Bytes of text that make a token at least before an answer is cut: some servers send a token in several deltas."""


class AnswerTooLarge(UpstreamError):
    """The answer of an upstream passed the bound of the config. It says nothing about the upstream's health."""


def text_bytes(text: str) -> int:
    """Return the length of `text` in UTF-8; lone surrogates count three bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def deltas_bytes(deltas: Sequence[Delta]) -> int:
    """Return the bytes of text, reasoning and arguments in the deltas."""
    texts = (TextDelta, ReasoningDelta, RefusalDelta, ToolArgumentsDelta)
    return sum(text_bytes(delta.text) for delta in deltas if isinstance(delta, texts))


def tokens_with_slack(max_tokens: int) -> int:
    """Return the number of tokens at which the server ends an answer that may have `max_tokens`. Upstreams count a few
    tokens differently: those of control, and those of a stop string."""
    return max_tokens + max_tokens // 4 + 16
