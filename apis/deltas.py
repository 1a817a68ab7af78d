"""The deltas that a model call yields, up to its one Finish."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from apis.wire.base import Phase

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token: str
    logprob: float
    bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token of the answer's text, its natural-log probability and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: Sequence[TopLogprob] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. A change of `phase` begins a new message."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSummaryDelta:
    """More text of the summary of the reasoning before it. No Inference provider yields one."""

    text: str


@dataclass(frozen=True, slots=True)
class RefusalDelta:
    """More text of a refusal."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `id` is unique in this chat. A `custom` call's input is raw text, a function's is JSON."""

    id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More text of the arguments or the input of the call `id`, which has begun. Calls may interleave."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one chat. `output_tokens` counts reasoning too; the two details are parts of their totals."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The last delta, exactly one. `tool_calls` means that the calls are complete and await their outputs."""

    reason: FinishReason
    usage: Usage


Delta = TextDelta | ReasoningDelta | ReasoningSummaryDelta | RefusalDelta | ToolCallStart | ToolArgumentsDelta | Finish


DeltaBatch = Sequence[Delta]
"""Deltas that became ready together: one read of an upstream's socket, one step of an engine."""
