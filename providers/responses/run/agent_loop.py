"""The inner loop: the model answers, the server runs its own tools, the model goes on, until it wants no more here."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from openai.types.responses import ResponseOutputItemDoneEvent, ResponseStreamEvent
from openai.types.responses.response_output_item import McpListTools

from apis.chat import ChatRequest, Message
from apis.deltas import Finish, Usage
from apis.errors import StackError, ToolFailed, UpstreamError
from apis.events import EventBatch
from apis.inference import Inference
from apis.wire.items import ITEM_LIST_ADAPTER, Item, items_to_json
from providers.responses.context.compaction import ResponseCompaction
from providers.responses.context.conversation import Conversation
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import IncompleteReason, add_usage
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.run.checkpoint import Checkpoint, ResumePoint, lost_call_result
from providers.responses.run.concurrency import EmitEvents, run_concurrently
from providers.responses.run.turn import TurnStream, join_deltas
from providers.responses.tools.call import HostedCall
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.offered import OfferedTools

_log = logging.getLogger(__name__)

_MAX_REPEATS: Final = 5
_MAX_REJECTED_TURNS: Final = 3
_MAX_UNMET_DEMANDS: Final = 2
"""How often a model is asked for a call that is demanded."""
_MAX_CALLS_PER_TURN: Final = 64
_INCOMPLETE_REASONS: Final[Mapping[str, IncompleteReason]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


@dataclass(frozen=True, slots=True)
class ToolCallLimits:
    """Of one response: hosted calls in all, how many of them at a time, and seconds for each."""

    max_calls: int
    parallel_calls: int
    tool_timeout_s: float


class AgentLoop:
    """The turns of one response. `usage`, `told` and `reason` are right whenever `run` is not running; `on_step` is
    given each step at which somebody else could go on, when all events before it have been taken."""

    def __init__(
        self,
        inference: Inference,
        chat: ChatRequest,
        conversation: Conversation,
        output: ResponseOutput,
        toolbox: OfferedTools,
        limits: ToolCallLimits,
    ) -> None:
        self.usage = Usage()
        self.tool_results: dict[str, ToolResultRecord] = conversation.input_tool_results()
        self.incomplete_reason: IncompleteReason | None = None
        self._inference = inference
        self.chat = chat
        self._conversation = conversation
        self._output = output
        self._toolbox = toolbox
        self._limits = limits
        self._token_budget = chat.max_completion_tokens
        self._calls_left = limits.max_calls
        self._requested_calls: list[tuple[str, str]] = []
        self._turn_number = 0
        self._turn: TurnStream | None = None
        self.on_checkpoint: Callable[[Checkpoint], None] | None = None
        self._checkpointed_result_count = 0
        self._running_calls: Sequence[HostedCall] = ()
        self._server_initiated_calls: list[HostedCall] = []
        self._rejected_calls: list[tuple[int, ToolResultRecord]] = []
        self._rejected_turn_count = 0
        self._unmet_demands = 0
        self._executed_call_count = 0
        self.compaction: ResponseCompaction | None = None

    def resume(self, resume_point: ResumePoint) -> None:
        """Go on from there instead of from the beginning."""
        step = resume_point.checkpoint
        self._output.items[:] = resume_point.output_items
        self.usage, self.tool_results, self._checkpointed_result_count = (
            step.usage,
            {**resume_point.tool_results},
            len(resume_point.tool_results),
        )
        self._turn_number, self._calls_left, self._requested_calls = step.turn, step.calls_left, [*step.requested_calls]
        self._output.turn = self._turn_number
        self._rejected_calls, self._rejected_turn_count = [*step.rejected_calls], step.rejected_turn_count
        self._unmet_demands = step.unmet_demands
        self._token_budget = step.token_budget
        self.chat = self._next_chat()

    def run(self, *, stream_deltas: bool = True) -> AsyncGenerator[EventBatch]:
        """The events of all turns, as batches that became ready together. Not `piecemeal`, one delta tells what many
        would have: for those who are shown the outcome only."""
        for told in self._conversation.tool_results.values():
            self._output.sources.update(told.sources)
            self._output.files.update(told.files)
        if self.compaction is not None and self.compaction.is_whole_response:
            return self._compact(self.compaction)
        return self._run_turns(stream_deltas=stream_deltas)

    async def _run_turns(self, *, stream_deltas: bool) -> AsyncGenerator[EventBatch]:
        while True:
            async with aclosing(self._run_before_turn()) as batches:
                async for events in batches:
                    yield events
            if self.compaction is not None:
                async with aclosing(self._compact(self.compaction)) as batches:
                    async for events in batches:
                        yield events
            demand = (
                ToolChoicePolicy(frozenset())
                if self._is_last_turn
                else self._toolbox.choice_policy(self.chat.tool_choice)
            )
            self._turn = turn = TurnStream(self._output, self._toolbox, demand)
            async with aclosing(self._inference.chat(self.chat)) as steps:
                async for step in steps:
                    turn.delta_count += len(step)
                    if events := turn.feed(step if stream_deltas else join_deltas(step)):
                        yield events
            if turn.finish is None:
                raise UpstreamError("The inference server ended its answer without saying why.")
            self.usage = add_usage(self.usage, turn.finish.usage)
            if turn.hosted_calls:
                async with aclosing(self._run_requested_calls([*turn.hosted_calls.values()])) as batches:
                    async for events in batches:
                        yield events
            if self._finish_turn(turn, turn.finish):
                return
            self._turn_number += 1
            self._output.turn = self._turn_number
            self._emit_checkpoint(self._turn_number)
            self.chat = self._next_chat()

    async def _run_before_turn(self) -> AsyncGenerator[EventBatch]:
        """What tools do before the turn. `chat` is then what the model is to be asked."""
        waiting = [iter(tool.calls_before_turn(self._turn_number)) for tool in self._toolbox.typed_tools]
        ran = False
        while calls := [call for each in waiting if (call := next(each, None)) is not None]:
            ran = True
            self._server_initiated_calls += calls
            for call in calls:
                self._output.place_item(call)
                yield call.open()
            for some in (
                self._run_calls([call for call in calls if not call.counts_toward_limit]),
                self._run_requested_calls([call for call in calls if call.counts_toward_limit]),
            ):
                async with aclosing(some) as batches:
                    async for events in batches:
                        yield events
        if ran:
            self._emit_checkpoint(self._turn_number)
            self._toolbox.refresh_names()
            self.chat = self._next_chat()

    async def _compact(self, compaction: ResponseCompaction) -> AsyncGenerator[EventBatch]:
        """Make the chat shorter where it has grown too long."""
        async with aclosing(compaction.run(self.chat)) as batches:
            async for events in batches:
                yield events
        if compaction.last_usage is not None:
            self.usage = add_usage(self.usage, compaction.last_usage)
            if self._token_budget is not None:  # that is for what the client asked for
                self._token_budget += compaction.last_usage.output_tokens
            self._emit_checkpoint(self._turn_number)
            self.chat = self._next_chat()

    def close_open_items(self) -> EventBatch:
        """The events that close what is open when the response ends before its end. What the model has used of a turn
        that has no finish nobody tells: each of its deltas counts as a token."""
        events: list[ResponseStreamEvent] = []
        if self._turn is not None:
            if self._turn.finish is None:
                self.usage = add_usage(self.usage, Usage(output_tokens=self._turn.delta_count))
                self._turn.delta_count = 0
            events += self._turn.close_open_items()
        events += self.compaction.close_open_items() if self.compaction is not None else ()
        for call in self._server_initiated_calls:
            if self._output.items[call.index] is None:
                events += call.close("incomplete")
                self._output.items[call.index] = call.item("incomplete")
        return events

    async def _run_requested_calls(self, calls: Sequence[HostedCall]) -> AsyncGenerator[EventBatch]:
        """Run what the model asked for, as far as it may be run. It is told of all in the order of the calls."""
        refusals = self._refusal_reasons(calls)
        run = [call for call, why in zip(calls, refusals, strict=True) if not why]
        self._executed_call_count = len(run)
        self._calls_left -= len(run)
        self._requested_calls = [*self._requested_calls, *map(_call_signature, calls)][-_MAX_REPEATS:]
        if self._turn is not None and self._turn.continues and self._remaining_tokens() != 0:
            self._running_calls = calls
            self._emit_checkpoint(self._turn_number + 1)
        async with aclosing(self._run_calls(run)) as batches:
            async for events in batches:
                yield events
        for call, why in zip(calls, refusals, strict=True):
            if why:
                events = call.fail(ToolFailed(f"Not run: {why}"))
                self._record_done_items(events)
                self._record_tool_result(call)
                yield events
        self._running_calls = ()

    def _refusal_reasons(self, calls: Sequence[HostedCall]) -> Sequence[str]:
        """Why each may not be run; empty where it may."""
        asked, whys, ran = [*self._requested_calls], list[str](), 0
        for call in calls:
            if self._turn is not None and asked[-_MAX_REPEATS:] == [_call_signature(call)] * _MAX_REPEATS:
                whys.append(f"this very call was made {_MAX_REPEATS} times. Answer with what it gave.")
            elif ran >= self._calls_left:
                whys.append("no more tool calls are allowed in this response. Answer with what you have.")
            elif ran >= _MAX_CALLS_PER_TURN:
                whys.append(f"only {_MAX_CALLS_PER_TURN} tools can be called at a time.")
            else:
                whys.append("")
                ran += 1
            asked.append(_call_signature(call))
        return whys

    async def _run_calls(self, calls: Sequence[HostedCall]) -> AsyncGenerator[EventBatch]:
        jobs = [partial(self._run_call, call) for call in calls]
        async with aclosing(run_concurrently(jobs, self._limits.parallel_calls)) as batches:
            async for events in batches:
                ended = self._record_done_items(events)
                yield events
                if ended and self._running_calls:
                    self._emit_checkpoint(self._turn_number + 1)

    async def _run_call(self, call: HostedCall, emit: EmitEvents) -> None:
        """Run one call to its end, whatever becomes of it: a tool that fails is an outcome that the model is told."""
        limit_s = self._limits.tool_timeout_s
        done = False
        try:
            async with asyncio.timeout(limit_s), aclosing(call.run(self._output)) as batches:
                async for events in batches:
                    if not done and any(isinstance(event, ResponseOutputItemDoneEvent) for event in events):
                        done = True
                        self._record_tool_result(call)  # first: a step that is noted after these events must know
                    emit(events)
            failure = ToolFailed("The tool ended without a result.")
        except StackError as exc:
            failure = exc if isinstance(exc, ToolFailed) else ToolFailed(exc.message)
        except TimeoutError:
            failure = ToolFailed(f"The tool took longer than {limit_s:g} s and was stopped.")
        except Exception:  # noqa: BLE001 - around a tool call: the model is told, though not the bug's own text
            _log.exception("the tool %s failed on a bug", call.name)
            failure = ToolFailed("The tool failed on an error of its own.")
        if not done:
            events = call.fail(failure)
            self._record_tool_result(call)
            emit(events)

    def _record_tool_result(self, call: HostedCall) -> None:
        if call.tool_result is not None:
            told = replace(
                call.tool_result, output=self._output.truncate_text(call.tool_result.output), turn=self._turn_number
            )
            self.tool_results[call.id] = self._conversation.tool_results[call.id] = told

    def _record_done_items(self, events: EventBatch) -> bool:
        """Whether an item ended."""
        ended = [event for event in events if isinstance(event, ResponseOutputItemDoneEvent)]
        for event in ended:
            self._output.items[event.output_index] = event.item
        return bool(ended)

    def _emit_checkpoint(self, turn: int) -> None:
        if self.on_checkpoint is None:
            return
        running = [call for call in self._running_calls if self._output.items[call.index] is None]
        told = dict(islice(self.tool_results.items(), self._checkpointed_result_count, None))
        self._checkpointed_result_count = len(self.tool_results)
        self.on_checkpoint(
            Checkpoint(
                turn,
                self.usage,
                self._token_budget,
                told | {call.id: lost_call_result(call, self._turn_number) for call in running},
                [call.index for call in running],
                self._calls_left,
                self._requested_calls,
                self._rejected_calls,
                self._rejected_turn_count,
                self._unmet_demands,
            )
        )

    def _finish_turn(self, turn: TurnStream, finish: Finish) -> bool:
        """Whether the response is at its end. Raises UpstreamError where the model will not do what is demanded."""
        self.tool_results |= {call.id: call.tool_result for call in turn.client_calls if call.tool_result is not None}
        self.incomplete_reason = _INCOMPLETE_REASONS.get(finish.reason)
        if self.incomplete_reason or turn.function_calls or turn.client_calls:
            return True
        self._unmet_demands = (
            self._unmet_demands + 1 if turn.tool_choice_policy.requires_call and not turn.hosted_calls else 0
        )
        if self._unmet_demands >= _MAX_UNMET_DEMANDS:
            raise UpstreamError(turn.tool_choice_policy.failure_message())
        if not (turn.hosted_calls or turn.rejected_calls or self._unmet_demands):
            return True
        position = len(self._output.items)
        self._rejected_calls += [(position, replace(told, turn=self._turn_number)) for told in turn.rejected_calls]
        if turn.rejected_calls or (turn.hosted_calls and not self._executed_call_count):
            self._rejected_turn_count += 1
        if self._rejected_turn_count > _MAX_REJECTED_TURNS:  # it would go on like this for ever
            self.incomplete_reason = None if turn.has_message else "max_messages"
            return True
        if self._remaining_tokens() == 0:
            self.incomplete_reason = "max_output_tokens"
        return self.incomplete_reason is not None

    def _remaining_tokens(self) -> int | None:
        """How many tokens the model may still generate; None where there is no limit."""
        return None if self._token_budget is None else max(0, self._token_budget - self.usage.output_tokens)

    @property
    def _is_last_turn(self) -> bool:
        """Whether the model has made calls that cannot be made so often that it is given no tools any more."""
        return self._rejected_turn_count >= _MAX_REJECTED_TURNS

    def _next_chat(self) -> ChatRequest:
        """The chat of the turn that comes."""
        forced = self._turn_number == 0 or self._unmet_demands > 0
        tools = self._toolbox.offered_tools(
            include_hosted=self._calls_left > 0 and (forced or not self._is_repeating())
        )
        if self._is_last_turn:
            tools = []
        choice = (
            self._toolbox.tool_choice(listing_errors=self._listing_errors())
            if forced
            else self._toolbox.tool_choice_after_call(tools)
        )
        messages = self._messages()
        if self._unmet_demands and not (
            self._rejected_calls and self._rejected_calls[-1][1].turn == self._turn_number - 1
        ):
            # said by the user, because many models' templates take no system message here
            messages.append(Message(role="user", content=self._toolbox.choice_policy(choice).reminder_message()))
        return self.chat.model_copy(
            update={
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice if tools else None,
                "parallel_tool_calls": self._toolbox.parallel_tool_calls if tools else None,
                "max_completion_tokens": self._remaining_tokens(),
            }
        )

    def _listing_errors(self) -> Mapping[str, str]:
        """Why the tools of servers could not be listed, by label."""
        items = [item for item in self._output.items if isinstance(item, McpListTools)]
        return {item.server_label: item.error for item in items if item.error}

    def _messages(self) -> list[Message]:
        made: list[Item | ToolResultRecord] = [
            *ITEM_LIST_ADAPTER.validate_json(items_to_json(self._output.finished_items()))
        ]
        for position, told in reversed(self._rejected_calls):
            made.insert(position, told)
        return self._conversation.messages(made, supports_namespaces=self._toolbox.supports_namespaces)

    def _is_repeating(self) -> bool:
        """Whether the model has made one and the same call over and over."""
        last = self._requested_calls[-_MAX_REPEATS:]
        return len(last) == _MAX_REPEATS and len(set(last)) == 1


def _call_signature(call: HostedCall) -> tuple[str, str]:
    """Equal where one and the same call is made again."""
    return call.name, call.text
