"""The deltas that a model call yields, up to its one Finish.

They are frozen structs, because a frozen dataclass assigns its fields in Python code, for every token.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from apis.wire.base import Phase

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
    """More text of the model's reasoning. `begins_message`: what comes before is a message by itself."""

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


class Finish(Struct, frozen=True, gc=False):
    """The last delta, exactly one. `tool_calls` means that the calls are complete and await their outputs."""

    reason: FinishReason
    usage: Usage


Delta = TextDelta | ReasoningDelta | ReasoningSummaryDelta | RefusalDelta | ToolCallStart | ToolArgumentsDelta | Finish


DeltaBatch = Sequence[Delta]
"""Deltas that became ready together: one read of an upstream's socket, one step of an engine."""
