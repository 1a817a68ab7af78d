"""Tools together with a text format, for servers that cannot combine them.

vLLM applies the format to all output, so a model with tools can never call one. Here the model first generates without
the format. If it calls tools, that is the result; if it answers in text, it generates again with the format and without
calls. The prompt is the same, so the server has it in its prefix cache.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import orjson

from apis.chat import ChatAllowedTools, ChatRequest
from apis.deltas import Delta, DeltaBatch, Finish, RefusalDelta, TextDelta, ToolCallStart, Usage, count_delayed
from apis.sink import ConvertedSink, Sink
from apis.wire.text_format import JsonObjectFormat

StreamFunction = Callable[[ChatRequest, Sink[Delta]], Awaitable[None]]


def needs_two_passes(request: ChatRequest) -> bool:
    """Return true for a chat with tools that the model may call, while its text must have a format."""
    choice = request.tool_choice.allowed_tools.mode if isinstance(request.tool_choice, ChatAllowedTools) else None
    is_free = request.tool_choice in (None, "auto") or choice == "auto"
    form = request.response_format
    return is_free and form is not None and form.type != "text"


async def stream_in_two_passes(stream: StreamFunction, request: ChatRequest, sink: Sink[Delta]) -> None:
    """Generate a request for which `needs_two_passes` is true. The text of the first pass is buffered until it is
    certain to be used."""
    first = _FirstPass()
    await stream(request.model_copy(update={"response_format": None}), ConvertedSink(sink, first.take))
    finish = first.finish
    if finish is None:
        return
    if first.is_decided or finish.reason != "stop" or _has_format(first.buffered, request):
        await sink.put((*first.buffered, finish))
        return

    def add_usage(batch: DeltaBatch) -> DeltaBatch:
        return tuple(_add_usage(delta, finish.usage) for delta in batch)

    await stream(_build_second_request(request, finish.usage), ConvertedSink(sink, add_usage))


class _FirstPass:
    """The answer without a format. It `is_decided` that it is used once it has a call or a refusal."""

    def __init__(self) -> None:
        self.buffered: list[Delta] = []
        self.is_decided = False
        self.finish: Finish | None = None

    def take(self, batch: DeltaBatch) -> DeltaBatch:
        """Return what leaves of a batch now, and the count of what is delayed."""
        output: list[Delta] = []
        for delta in batch:
            if isinstance(delta, Finish):
                self.finish = delta
            elif isinstance(delta, TextDelta) and not self.is_decided:
                self.buffered.append(delta)
            elif isinstance(delta, ToolCallStart | RefusalDelta) and not self.is_decided:
                self.is_decided = True
                output += [*self.buffered, delta]
                self.buffered = []
            else:
                output.append(delta)
        return count_delayed(batch, output)


def _has_format(buffered: list[Delta], request: ChatRequest) -> bool:
    """Return true if the text already has the format. Only formats without a schema are checked."""
    if not isinstance(request.response_format, JsonObjectFormat):
        return False
    text = "".join(delta.text for delta in buffered if isinstance(delta, TextDelta))
    with suppress(orjson.JSONDecodeError):
        return isinstance(orjson.loads(text), dict)
    return False


def _build_second_request(request: ChatRequest, first_usage: Usage) -> ChatRequest:
    remaining_tokens = request.max_completion_tokens
    if remaining_tokens is not None:
        remaining_tokens = max(1, remaining_tokens - first_usage.output_tokens)
    return request.model_copy(update={"tool_choice": "none", "max_completion_tokens": remaining_tokens})


def _add_usage(delta: Delta, first_usage: Usage) -> Delta:
    """Add the first pass's output tokens to the usage of the Finish; the prompt counts once."""
    if not isinstance(delta, Finish):
        return delta
    usage = delta.usage
    output = usage.output_tokens + first_usage.output_tokens
    reasoning = usage.reasoning_tokens + first_usage.reasoning_tokens
    return Finish(
        delta.reason,
        Usage(first_usage.input_tokens, output, cached_tokens=first_usage.cached_tokens, reasoning_tokens=reasoning),
    )
