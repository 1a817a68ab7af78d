"""The deltas that a model call yields, up to its one Finish.

They are frozen structs, because a frozen dataclass assigns its fields in Python code, for every token.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct
from openai.types.responses import ResponseUsage

from apis.wire.base import Phase

_CHARS_PER_TOKEN: Final = 4

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class TopLogprob(Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: Sequence[int]


class TokenLogprob(Struct, frozen=True, gc=False):
    """A generated token of the answer's text, its natural-log probability and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: Sequence[TopLogprob] = ()


class TextDelta(Struct, frozen=True, gc=False):
    """More text of the answer. A change of `phase` begins a new message, and so does `begins_message`."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    phase: Phase | None = None
    begins_message: bool = False


class ReasoningDelta(Struct, frozen=True, gc=False):
    """More text of the model's reasoning. `begins_message`: the text before is a message by itself."""

    text: str
    begins_message: bool = False


class ReasoningSummaryDelta(Struct, frozen=True, gc=False):
    """More text of the summary of the reasoning before it. No Inference provider yields one."""

    text: str


class RefusalDelta(Struct, frozen=True, gc=False):
    """More text of a refusal."""

    text: str


class ToolCallStart(Struct, frozen=True, gc=False):
    """A call begins; `id` is unique in this chat. A `custom` call's input is raw text, a function's is JSON."""

    id: str
    name: str
    custom: bool = False


class ToolArgumentsDelta(Struct, frozen=True, gc=False):
    """More text of the arguments or the input of the call `id`, which has begun. Calls may interleave."""

    id: str
    text: str


class Usage(Struct, frozen=True, gc=False):
    """Tokens of one chat. `output_tokens` counts reasoning too; the two details are parts of their totals."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: "Usage") -> "Usage":
        """Return the sums of both."""
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


def usage_from_wire(usage: ResponseUsage) -> Usage:
    """Return the usage in a response object."""
    return Usage(
        usage.input_tokens,
        usage.output_tokens,
        usage.input_tokens_details.cached_tokens,
        usage.output_tokens_details.reasoning_tokens,
    )


class Finish(Struct, frozen=True, gc=False):
    """The last delta, exactly one. `tool_calls` means that the calls are complete and await their outputs. With
    `stop_sequence` the model wrote that text, one of the request's `stop`; None also where that is not known."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None


class DelayedOutput(Struct, frozen=True, gc=False):
    """Output that the model has generated and that is delayed on its way: a number of deltas and their characters,
    negative where delayed output leaves. It is no part of the answer. It only counts, for an answer without a Finish.
    """

    deltas: int
    chars: int


Delta = (
    TextDelta
    | ReasoningDelta
    | ReasoningSummaryDelta
    | RefusalDelta
    | ToolCallStart
    | ToolArgumentsDelta
    | DelayedOutput
    | Finish
)


DeltaBatch = Sequence[Delta]
"""Deltas that became ready together: one read of an upstream's socket, one step of an engine."""


def count_delayed(batch: DeltaBatch, output: DeltaBatch) -> DeltaBatch:
    """Return `output`, which is all that leaves of `batch` now, with the DelayedOutput of the difference. A Finish
    counts everything itself."""
    if len(output) == len(batch) or (output and isinstance(output[-1], Finish)):
        return output
    (batch_count, batch_chars), (output_count, output_chars) = measure_deltas(batch), measure_deltas(output)
    delayed = DelayedOutput(batch_count - output_count, batch_chars - output_chars)
    return (*output, delayed) if delayed.deltas or delayed.chars else output


def measure_deltas(batch: Sequence[Any]) -> tuple[int, int]:
    """Return how many deltas, of any kind of output, and how many characters a model has generated."""
    count = chars = 0
    for delta in batch:
        if isinstance(delta, DelayedOutput):
            count, chars = count + delta.deltas, chars + delta.chars
        elif not isinstance(delta, Finish):
            count, chars = count + 1, chars + len(getattr(delta, "text", ""))
    return count, chars


def estimate_tokens(deltas: int, chars: int) -> int:
    """Return an estimate of the tokens of an output: its deltas, of which one may hold many tokens."""
    return max(deltas, chars // _CHARS_PER_TOKEN)
