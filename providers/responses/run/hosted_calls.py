"""Hosted tool calls of one response, run concurrently: their limits, their time-outs and what a failure becomes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Final

from apis.errors import StackError, ToolFailed
from apis.events import EventBatch
from apis.telemetry import (
    NO_SPAN,
    AttributeValue,
    Span,
    SpanType,
    current_agent,
    error_type_of,
    open_span,
    telemetry,
)
from providers.responses.events.citations import one_line
from providers.responses.events.output import ResponseOutput
from providers.responses.settings import LoopSettings
from providers.responses.tools.call import HostedCall

_log = logging.getLogger(__name__)

Put = Callable[[EventBatch], Awaitable[None]]
_MAX_DESCRIPTION_CHARS: Final = 1024
"""Length at which the description of a tool is cut: that of an MCP tool is its server's text."""
_CANCEL_TIMEOUT_S: Final = 5
"""Seconds that cancelled calls have to stop; the stream ends without those that take longer."""


async def run_hosted_calls(
    calls: Sequence[HostedCall],
    output: ResponseOutput,
    config: LoopSettings,
    record_result: Callable[[HostedCall], None],
    put: Put,
) -> None:
    """Run the calls, `put` their events as they happen, and return when all have ended. `record_result` is called with
    each call that has its result, before its last events are put: a checkpoint after these events must hold the result.
    A caller that is cancelled cancels the calls and waits until they have stopped."""
    slots = asyncio.Semaphore(config.parallel_tool_calls)

    async def run_in_slot(call: HostedCall) -> None:
        async with slots:
            with _open_tool_span(call) as span:
                started_at, outcome = monotonic(), "cancelled"
                try:
                    failure, events = await _run_call(call, output, config, put, span)
                    record_result(call)
                    await put(events)
                    outcome = "completed" if failure is None else f"failed: {one_line(failure.message)[:300]}"
                finally:
                    elapsed_s = monotonic() - started_at
                    log_fields = (call.id, one_line(call.name or call.item_type), output.ids.response_id)
                    _log.info("the call %s of the tool %s in %s took %.3f s: %s", *log_fields, elapsed_s, outcome)

    tasks = [asyncio.create_task(run_in_slot(call)) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)


async def _run_call(
    call: HostedCall, output: ResponseOutput, config: LoopSettings, put: Put, span: Span
) -> tuple[ToolFailed | None, EventBatch]:
    """Run one call to its end, and return its failure, if it failed, and its last events. A failed tool raises nothing:
    its error is the result that the model reads."""
    limit_s = call.timeout_s or config.tool_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:

            async def emit(events: EventBatch) -> None:
                async with _paused(limit):  # a reader may be slow, which is not the tool's time
                    await put(events)

            await call.run(output, emit)
        return None, call.finish()
    except StackError as exc:
        error_type = error_type_of(exc)
        failure = exc if isinstance(exc, ToolFailed) else ToolFailed(exc.message)
    except TimeoutError:
        error_type = "timeout"
        failure = ToolFailed(f"The tool took longer than {limit_s:g} s and was stopped.")
    except Exception as exc:  # noqa: BLE001 - around a tool call: the model reads that it failed, not the bug's own text
        error_type = error_type_of(exc)
        _log.exception("the tool %s failed on a bug", call.name)
        failure = ToolFailed("The tool failed on an error of its own.")
    span.fail(error_type)
    return failure, call.fail(failure)


@asynccontextmanager
async def _paused(limit: asyncio.Timeout) -> AsyncGenerator[None]:
    """Let the time within the context not count towards the limit."""
    now, ends_at = asyncio.get_running_loop().time, limit.when()
    left_s = None if ends_at is None else ends_at - now()
    limit.reschedule(None)
    yield
    if left_s is not None:  # else another context, within which this one began, does it
        limit.reschedule(now() + left_s)


@contextmanager
def _open_tool_span(call: HostedCall) -> Generator[Span]:
    """Open the span of a hosted call, current within the context. The listing of an MCP server's tools is no tool."""
    if call.row.call is None or not telemetry().is_on:
        yield NO_SPAN
        return
    name = call.name or call.item_type
    if (calls := current_agent()) is not None:
        calls.tool_calls += 1
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "datastore" if call.row.is_datastore else "extension",
    }
    if call.tool is not None and (description := call.tool.find_description(call.name)):
        attributes["gen_ai.tool.description"] = description[:_MAX_DESCRIPTION_CHARS]
    if call.call_id:
        attributes["gen_ai.tool.call.id"] = call.call_id
    with open_span(SpanType.EXECUTE_TOOL, name, attributes) as span:
        yield span
        result = call.tool_result.output if call.tool_result is not None else None
        span.set(telemetry().describe_tool(call.text, result))
