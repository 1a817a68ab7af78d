"""The wire types of a chunk of chat completions, which nearly every server sends as they are, and log probabilities."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from apis.deltas import TokenLogprob, TopLogprob
from providers.inference.chat_completions.deviations import UNREAD_FIELD
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


class ChatDelta(msgspec.Struct, gc=False):
    """A delta. `thinking` to `unread` are other places of the answer: where one is set, the chunk is normalized. Then
    `unread` describes what could not be read."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    thinking: Any = None
    reasoning_details: Any = None
    function_call: Any = None
    text: Any = None
    unread: Any = msgspec.field(default=None, name=UNREAD_FIELD)


class ChatChoice(msgspec.Struct, gc=False):
    """A choice. `is_message` is None before the chunk is normalized; true says that the delta was read from a message
    in its place."""

    delta: ChatDelta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # of vLLM
    matched_stop: Any = None  # of SGLang
    message: Any = None
    index: int = 0
    is_message: bool | None = None
    usage: Any = None  # of Moonshot
    error: Any = None  # of OpenRouter


class PlainChoice(ChatChoice, gc=False):
    """A choice whose log probabilities are skipped, because the request does not ask for them."""

    logprobs: ClassVar[None] = None


class LogprobChoice(ChatChoice, gc=False):
    """A choice with its log probabilities."""

    logprobs: Logprobs | None = None


AnyChoiceT = TypeVar("AnyChoiceT", PlainChoice, LogprobChoice)


class ChatChunk(msgspec.Struct, Generic[AnyChoiceT], gc=False):
    """A chunk with choices of either kind."""

    choices: list[AnyChoiceT] | None = None
    usage: Any = None
    error: Any = None
    x_groq: Any = None
    timings: Any = None  # of llama.cpp


AnyChatChunk = ChatChunk[PlainChoice] | ChatChunk[LogprobChoice]
decode_chunk = msgspec.json.Decoder(ChatChunk[PlainChoice]).decode
decode_chunk_with_logprobs = msgspec.json.Decoder(ChatChunk[LogprobChoice]).decode


def is_odd(choice: ChatChoice) -> bool:
    """Return true for a choice whose answer may be in another place than the usual fields of its delta."""
    delta = choice.delta
    return (
        delta is None
        or choice.message is not None
        or (not (delta.reasoning or delta.reasoning_content) and bool(delta.thinking or delta.reasoning_details))
        or delta.function_call is not None
        or delta.text is not None
        or bool(delta.unread)
    )


def holds_content(delta: ChatDelta) -> bool:
    """Return true for a delta with a part of the answer."""
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.refusal or delta.tool_calls)


# --- log probabilities ------------------------------------------------------------------------------------------------


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
