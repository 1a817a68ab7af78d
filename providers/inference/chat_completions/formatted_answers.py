"""Tools together with a text format, for servers that cannot combine them.

vLLM applies the format to all output, so a model with tools can never call one. Here the model first generates without
the format. If it calls tools, that is the result; if it answers in text, it generates again with the format and without
calls. The prompt is the same, so the server has it in its prefix cache.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import orjson

from apis.chat import ChatAllowedTools, ChatRequest
from apis.deltas import Delta, DeltaBatch, Finish, RefusalDelta, TextDelta, ToolCallStart, Usage, count_delayed
from apis.wire.text_format import JsonObjectFormat

ChatFunction = Callable[[ChatRequest], AsyncGenerator[DeltaBatch]]


def needs_two_passes(request: ChatRequest) -> bool:
    """Return true if the model may call tools and its text must have a format."""
    choice = request.tool_choice.allowed_tools.mode if isinstance(request.tool_choice, ChatAllowedTools) else None
    is_free = request.tool_choice in (None, "auto") or choice == "auto"
    form = request.response_format
    return bool(request.tools) and is_free and form is not None and form.type != "text"


async def chat_in_two_passes(chat: ChatFunction, request: ChatRequest) -> AsyncGenerator[DeltaBatch]:
    """Generate a request for which `needs_two_passes` is true. The text of the first pass is buffered until it is
    certain to be used."""
    buffered: list[Delta] = []
    is_decided = False
    finish: Finish | None = None
    async with aclosing(chat(request.model_copy(update={"response_format": None}))) as batches:
        async for batch in batches:
            output: list[Delta] = []
            for delta in batch:
                if isinstance(delta, Finish):
                    finish = delta
                elif isinstance(delta, TextDelta) and not is_decided:
                    buffered.append(delta)
                elif isinstance(delta, ToolCallStart | RefusalDelta) and not is_decided:
                    is_decided = True
                    output += [*buffered, delta]
                    buffered = []
                else:
                    output.append(delta)
            if counted := count_delayed(batch, output):
                yield counted
    if finish is None:
        return
    if is_decided or finish.reason != "stop" or _has_format(buffered, request):
        yield (*buffered, finish)
        return
    async with aclosing(chat(_build_second_request(request, finish.usage))) as batches:
        async for batch in batches:
            yield tuple(_add_usage(delta, finish.usage) for delta in batch)


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
