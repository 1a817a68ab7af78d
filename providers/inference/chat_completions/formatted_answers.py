"""Tools and a text format together, where a server cannot have both.

vLLM holds all that a model says to the format, so that one that may call tools never does. Here the model is asked
without the format first. Where it calls tools, that was all; an answer in text is asked for again, with the format and
without calls: the prompt is the same, and the server has it in its cache.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import orjson

from apis.chat import AllowedTools, ChatRequest
from apis.deltas import Delta, Finish, Refusal, Step, Text, ToolCallStart, Usage
from apis.wire.text_format import JsonObjectFormat

Chat = Callable[[ChatRequest], AsyncGenerator[Step]]


def wants_both(request: ChatRequest) -> bool:
    """Whether the model may call tools, and its text is to have a format."""
    choice = request.tool_choice.allowed_tools.mode if isinstance(request.tool_choice, AllowedTools) else None
    is_free = request.tool_choice in (None, "auto") or choice == "auto"
    form = request.response_format
    return bool(request.tools) and is_free and form is not None and form.type != "text"


async def in_two(chat: Chat, request: ChatRequest) -> AsyncGenerator[Step]:
    """The answer to a request that `wants_both`. Text of the first is held back until it is known to stay."""
    held: list[Delta] = []
    settled = False
    finish: Finish | None = None
    async with aclosing(chat(request.model_copy(update={"response_format": None}))) as steps:
        async for step in steps:
            told: list[Delta] = []
            for delta in step:
                if isinstance(delta, Finish):
                    finish = delta
                elif isinstance(delta, Text) and not settled:
                    held.append(delta)
                elif isinstance(delta, ToolCallStart | Refusal) and not settled:
                    settled = True
                    told += [*held, delta]
                    held = []
                else:
                    told.append(delta)
            if told:
                yield tuple(told)
    if finish is None:
        return
    if settled or finish.reason != "stop" or _stays(held, request):
        yield (*held, finish)
        return
    async with aclosing(chat(_bound(request, finish.usage))) as steps:
        async for step in steps:
            yield tuple(_added(delta, finish.usage) for delta in step)


def _stays(held: list[Delta], request: ChatRequest) -> bool:
    """Whether the text has the format as it is. Only what needs no schema is looked at."""
    if not isinstance(request.response_format, JsonObjectFormat):
        return False
    text = "".join(delta.text for delta in held if isinstance(delta, Text))
    with suppress(orjson.JSONDecodeError):
        return isinstance(orjson.loads(text), dict)
    return False


def _bound(request: ChatRequest, spent: Usage) -> ChatRequest:
    left = request.max_completion_tokens
    if left is not None:
        left = max(1, left - spent.output_tokens)
    return request.model_copy(update={"tool_choice": "none", "max_completion_tokens": left})


def _added(delta: Delta, spent: Usage) -> Delta:
    """What was said twice was paid for twice; the prompt counts once."""
    if not isinstance(delta, Finish):
        return delta
    usage = delta.usage
    output = usage.output_tokens + spent.output_tokens
    reasoning = usage.reasoning_tokens + spent.reasoning_tokens
    return Finish(
        delta.reason, Usage(spent.input_tokens, output, cached_tokens=spent.cached_tokens, reasoning_tokens=reasoning)
    )
