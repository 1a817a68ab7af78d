"""AgentLoop: the turns of one response. The model answers, the server runs its own tools, the model continues with
their results, until it ends its answer or calls a tool of the client."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import msgspec
from openai.types.responses import ResponseOutputItem

from apis.chat import ChatRequest, Message, share_of_salt
from apis.deltas import Finish, Usage
from apis.errors import ExternalConnectorError, StackError, ToolFailed, UpstreamError
from apis.events import EventBatch, ResponseStreamEvent
from apis.inference import Inference
from apis.sink import ReceivingSink, Sink
from apis.wire.item_types import LISTING_TYPES
from apis.wire.items import Item, output_to_input
from providers.common.chat_tokens import measure_chat
from providers.responses.context.compaction import ResponseCompaction
from providers.responses.context.conversation import Conversation, ResponseProgress
from providers.responses.events.output import ResponseOutput
from providers.responses.events.response_object import IncompleteReason
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.run.checkpoint import Checkpoint, lost_call_result
from providers.responses.run.hosted_calls import run_hosted_calls
from providers.responses.run.turn import NO_CALLS_LEFT, TurnStream
from providers.responses.settings import LoopSettings
from providers.responses.tools.call import HostedCall
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.offered import OfferedTools

_MAX_REPEATS: Final = 5
"""Number of equal hosted calls in a row after which the next one is refused."""
_MAX_REJECTED_TURNS: Final = 3
"""Number of turns without a valid call after which the model gets one last turn without tools."""
_MAX_UNMET_DEMANDS: Final = 2
"""Number of turns in a row without the call that `tool_choice` requires after which the response fails."""
_MAX_CALLS_PER_TURN: Final = 64
"""Number of hosted calls of one turn; further ones are refused."""
_COUNT_TIMEOUT_S: Final = 0.5
"""Seconds that the end of a failed response waits for the length of its prompt."""
_NOT_CONVERTED: Final = (None, None)
_INCOMPLETE_REASONS: Final[Mapping[str, IncompleteReason]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


class AgentLoop:
    """The turns of one response. `state`, `chat` (the current turn's) and `incomplete_reason` are valid whenever `run`
    is suspended or has ended."""

    _sink: Sink[ResponseStreamEvent]

    def __init__(  # noqa: PLR0913 - everything that the turns of one response run on
        self,
        config: LoopSettings,
        inference: Inference,
        chat: ChatRequest,
        conversation: Conversation,
        toolbox: OfferedTools,
        output: ResponseOutput,
        checkpoint: Checkpoint | None = None,
        *,
        max_calls: int,
        compaction: ResponseCompaction | None = None,
        record_usage: Callable[[ChatRequest, Usage], None] | None = None,
    ) -> None:
        """Start with the first turn, whose chat is `chat`, or resume from `checkpoint`, whose items are in `output`.
        `max_calls` hosted calls run in all. `compaction` keeps the chat within its threshold, or is the whole response.
        `record_usage` is called with the chat and the usage of each turn."""
        self.state = checkpoint or Checkpoint(
            turn=0,
            usage=Usage(),
            token_budget=chat.max_completion_tokens,
            tool_results=conversation.input_tool_results(),
            running_indexes=[],
            calls_left=max_calls,
            requested_calls=[],
            rejected_calls=[],
            rejected_turn_count=0,
        )
        self.incomplete_reason: IncompleteReason | None = None
        self.stop_sequence: str | None = None
        """The text of the request's `stop` that ended the last turn."""
        self._is_steered = False
        self._config = config
        self._inference = inference
        self._first_chat = chat
        self._conversation = conversation
        self._toolbox = toolbox
        self._compaction = compaction
        self._record_usage = record_usage
        self._output = output
        self._turn: TurnStream | None = None
        self._on_checkpoint: Callable[[Checkpoint], None] | None = None
        self._checkpointed_result_count = len(checkpoint.tool_results) if checkpoint is not None else 0
        self._running_calls: Sequence[HostedCall] = ()
        self._server_initiated_calls: list[HostedCall] = []
        self._executed_call_count = 0
        self._converted: dict[int, tuple[ResponseOutputItem, Item]] = {}
        self.chat = chat if checkpoint is None else self._next_chat()

    @property
    def requires_tool_lists(self) -> bool:
        """An MCP server that cannot list its tools fails the response."""
        return not self._config.continue_without_mcp_servers

    async def run(
        self, sink: Sink[ResponseStreamEvent], *, on_checkpoint: Callable[[Checkpoint], None] | None = None
    ) -> None:
        """Put the events of all turns into `sink`, as batches that became ready together. Where they have no readers,
        some are left out, and batches may be empty. `on_checkpoint` is called with each state from which another worker
        can resume, once all events before it have been put."""
        self._sink = sink
        self._on_checkpoint = on_checkpoint
        for result in (*self._conversation.tool_results.values(), *self.state.tool_results.values()):
            self._output.sources.update(result.sources)
            self._output.files.update(result.files)
        try:
            if self._compaction is not None and self._compaction.is_whole_response:
                await self._compact(self._compaction)
            else:
                await self._run_turns()
        finally:  # both may have this loop: all of the request would be held until a full collection of garbage
            del self._sink
            self._on_checkpoint = None

    async def _run_turns(self) -> None:
        state = self.state
        while True:
            self._output.ids.turn = state.turn
            if self._toolbox.typed_tools or self._compaction is not None:
                await self._prepare_turn()
            policy = (
                ToolChoicePolicy(frozenset())
                if self._is_last_turn
                else self._toolbox.choice_policy(self.chat.tool_choice)
            )
            self._turn = turn = TurnStream(self._output, self._toolbox, policy, hosted_calls_left=state.calls_left)
            sink = ReceivingSink(self._sink, turn.feed, passes_empty=not self._output.has_readers)
            await self._inference.stream(self.chat, sink)
            if turn.finish is None:
                raise UpstreamError("The inference server ended its answer without saying why.")
            if turn.grammar_calls:
                await self._place_matched_calls(turn)
            state.usage = state.usage.plus(turn.count_usage(turn.finish))
            if self._record_usage is not None:
                self._record_usage(self.chat, turn.finish.usage)
            if turn.hosted_calls:
                await self._run_requested_calls(turn.hosted_calls)
            if self._finish_turn(turn, turn.finish):
                return
            if self._is_steered:
                self.incomplete_reason = "steered"
                return
            state.turn += 1
            self._emit_checkpoint(state.turn)
            self.chat = self._next_chat()

    def end_after_turn(self) -> None:
        """End the response after its present turn and the calls of that turn: input was sent to it, which another
        response reads."""
        self._is_steered = True

    async def _prepare_turn(self) -> None:
        """Run the calls of tools before the model's turn, and compact a chat that is too long; `chat` is then ready."""
        await self._run_calls_before_turn()
        if self._compaction is not None:
            await self._compact(self._compaction)

    async def _place_matched_calls(self, turn: TurnStream) -> None:
        """Match the inputs of custom tools with their grammars, and place these calls."""
        for call in turn.grammar_calls:
            await call.match_input(share_of_salt(self.chat.cache_salt))
        if events := turn.place_client_calls({result.name for _, result in self.state.rejected_calls}):
            await self._sink.put(events)

    async def _run_calls_before_turn(self) -> None:
        """Run the calls that tools make themselves before the model's turn; `chat` then has their results."""
        iterators = [iter(tool.calls_before_turn(self.state.turn)) for tool in self._toolbox.typed_tools]
        ran = False
        while calls := [call for iterator in iterators if (call := next(iterator, None)) is not None]:
            ran = True
            self._server_initiated_calls += calls
            for call in calls:
                await self._sink.put(call.place(self._output))
            await self._run_calls([call for call in calls if not call.counts_toward_limit])
            if self.requires_tool_lists:
                _require_tool_lists(self._listing_errors())
            await self._run_requested_calls([call for call in calls if call.counts_toward_limit])
        if ran:
            self._emit_checkpoint(self.state.turn)
            self._toolbox.refresh_names()
            self.chat = self._next_chat()

    async def _compact(self, compaction: ResponseCompaction) -> None:
        """Compact the conversation if its chat is longer than the threshold."""
        await compaction.run(self.chat, ResponseProgress(tool_results=self.state.tool_results), self._sink)
        if compaction.last_usage is not None:
            self.state.usage = self.state.usage.plus(compaction.last_usage)
            if self.state.token_budget is not None:  # the client's limit is for the answer, not for the summary
                self.state.token_budget += compaction.last_usage.output_tokens
            self._emit_checkpoint(self.state.turn)
            self.chat = self._next_chat()

    def close_open_items(self) -> EventBatch:
        """Return the events that close the open items of a response that ends early. The model's usage is unknown for
        a turn without a finish, and estimated."""
        events: list[ResponseStreamEvent] = []
        if self._turn is not None:
            events += self._turn.close_open_items()
            if self._turn.finish is None:
                self.state.usage = self.state.usage.plus(Usage(output_tokens=self._turn.take_estimate()))
        if self._compaction is not None:
            events += self._compaction.close_open_items()
            self.state.usage = self.state.usage.plus(self._compaction.take_estimate())
        for call in self._server_initiated_calls:
            if self._output.items[call.index] is None:
                events += call.close("incomplete")
                self._output.items[call.index] = call.item("incomplete")
        return events

    async def count_unfinished_prompt(self) -> None:
        """Add the prompt's tokens of a turn that generated something and ended without a finish: an estimate, where the
        provider cannot count them at once. Call it before `close_open_items`."""
        if self._turn is None or self._turn.finish is not None or not self._turn.delta_count:
            return
        count = None
        with suppress(StackError, TimeoutError, RuntimeError):  # RuntimeError: the provider is closed
            async with asyncio.timeout(_COUNT_TIMEOUT_S):
                count = await self._inference.count_tokens(self.chat)
        count = measure_chat(self.chat) if count is None else count
        self.state.usage = self.state.usage.plus(Usage(input_tokens=count))

    async def _run_requested_calls(self, calls: Sequence[HostedCall]) -> None:
        """Run the model's calls as far as the limits allow; the others fail with the reason. The model reads the
        results in the order of the calls."""
        state = self.state
        reasons = self._refusal_reasons(calls)
        allowed_calls = [call for call, reason in zip(calls, reasons, strict=True) if not reason]
        self._executed_call_count = len(allowed_calls)
        state.calls_left -= len(allowed_calls)
        state.requested_calls = [*state.requested_calls, *map(_call_signature, calls)][-_MAX_REPEATS:]
        if self._turn is not None and self._turn.continues and self._remaining_tokens() != 0:
            self._running_calls = calls
            self._emit_checkpoint(state.turn + 1)
        await self._run_calls(allowed_calls)
        for call, reason in zip(calls, reasons, strict=True):
            if reason:
                events = call.fail(ToolFailed(f"Not run: {reason}"))
                self._output.record_done_items(events)
                self._record_tool_result(call)
                await self._sink.put(events)
        self._running_calls = ()

    def _refusal_reasons(self, calls: Sequence[HostedCall]) -> Sequence[str]:
        """Return for each call why it may not run; an empty text where it may."""
        signatures, reasons, allowed_count = [*self.state.requested_calls], list[str](), 0
        for call in calls:
            if self._turn is not None and signatures[-_MAX_REPEATS:] == [_call_signature(call)] * _MAX_REPEATS:
                reasons.append(f"this very call was made {_MAX_REPEATS} times. Answer with what it gave.")
            elif allowed_count >= self.state.calls_left:
                reasons.append(NO_CALLS_LEFT)
            elif allowed_count >= _MAX_CALLS_PER_TURN:
                reasons.append(f"only {_MAX_CALLS_PER_TURN} tools can be called at a time.")
            else:
                reasons.append("")
                allowed_count += 1
            signatures.append(_call_signature(call))
        return reasons

    async def _run_calls(self, calls: Sequence[HostedCall]) -> None:
        await run_hosted_calls(calls, self._output, self._config, self._record_tool_result, self._put_call_events)

    async def _put_call_events(self, events: EventBatch) -> None:
        is_done = self._output.record_done_items(events)
        await self._sink.put(events)
        if is_done and self._running_calls:
            self._emit_checkpoint(self.state.turn + 1)

    def _record_tool_result(self, call: HostedCall) -> None:
        if call.tool_result is not None:
            text = self._output.truncate_text(call.tool_result.output)
            self.state.tool_results[call.id] = replace(call.tool_result, output=text, turn=self.state.turn)

    def _emit_checkpoint(self, turn: int) -> None:
        """Hand out the state to resume from with this turn, and with the results since the checkpoint before it."""
        if self._on_checkpoint is None:
            return
        state = self.state
        items = self._output.items
        running_calls = [call for call in self._running_calls if call.last_index < 0 or items[call.last_index] is None]
        results = dict(islice(state.tool_results.items(), self._checkpointed_result_count, None))
        results |= {call.id: lost_call_result(call, state.turn) for call in running_calls}
        self._checkpointed_result_count = len(state.tool_results)
        self._on_checkpoint(
            msgspec.structs.replace(
                state,
                turn=turn,
                tool_results=results,
                running_indexes=[max(call.index, call.last_index) for call in running_calls],
            )
        )

    def _finish_turn(self, turn: TurnStream, finish: Finish) -> bool:
        """Return whether the response has ended with this turn. Raises UpstreamError for a model that does not make
        the call that is required."""
        state = self.state
        state.tool_results |= {call.id: call.tool_result for call in turn.client_calls if call.tool_result is not None}
        self.incomplete_reason = _INCOMPLETE_REASONS.get(finish.reason)
        self.stop_sequence = finish.stop_sequence
        if self.incomplete_reason or turn.client_calls:
            return True
        state.calls_left = max(0, state.calls_left - len(turn.async_calls))
        is_unmet = turn.tool_choice_policy.requires_call and not (turn.hosted_calls or turn.async_calls)
        state.unmet_demands = state.unmet_demands + 1 if is_unmet else 0
        if state.unmet_demands >= _MAX_UNMET_DEMANDS:
            raise UpstreamError(turn.tool_choice_policy.failure_message())
        if not (turn.hosted_calls or turn.async_calls or turn.rejected_calls or state.unmet_demands):
            return True
        if turn.async_calls and not state.calls_left:  # the model may call them over and over
            return True
        position = len(self._output.items)
        rejected = [(position, replace(result, turn=state.turn)) for result in turn.rejected_calls]
        state.rejected_calls = [*state.rejected_calls, *rejected]
        if turn.rejected_calls or (turn.hosted_calls and not self._executed_call_count):
            state.rejected_turn_count += 1
        if state.rejected_turn_count > _MAX_REJECTED_TURNS:  # the model repeats its mistake and would never end
            self.incomplete_reason = None if turn.has_message else "max_messages"
            return True
        if self._remaining_tokens() == 0:
            self.incomplete_reason = "max_output_tokens"
        return self.incomplete_reason is not None

    def _remaining_tokens(self) -> int | None:
        """Return how many tokens the model may still generate; None where there is no limit."""
        budget = self.state.token_budget
        return None if budget is None else max(0, budget - self.state.usage.output_tokens)

    @property
    def _is_last_turn(self) -> bool:
        """The model made invalid calls so often that it gets no tools any more."""
        return self.state.rejected_turn_count >= _MAX_REJECTED_TURNS

    def _next_chat(self) -> ChatRequest:
        """Return the chat of the next turn."""
        state = self.state
        is_forced = state.turn == 0 or state.unmet_demands > 0
        tools = self._toolbox.offered_tools(
            include_hosted=state.calls_left > 0 and (is_forced or not self._is_repeating())
        )
        if self._is_last_turn:
            tools = []
        choice = (
            self._toolbox.tool_choice(listing_errors=self._listing_errors())
            if is_forced
            else self._toolbox.tool_choice_after_call(tools)
        )
        messages = self._messages()
        if state.unmet_demands and not (state.rejected_calls and state.rejected_calls[-1][1].turn == state.turn - 1):
            # as the user, because the templates of many models take no system message here
            messages.append(Message(role="user", content=self._toolbox.choice_policy(choice).reminder_message()))
        return self._first_chat.model_copy(
            update={
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice if tools else None,
                "parallel_tool_calls": self._toolbox.parallel_tool_calls if tools else None,
                "max_completion_tokens": self._remaining_tokens(),
            }
        )

    def _listing_errors(self) -> Mapping[str, str]:
        """Return the errors of servers whose tools could not be listed, by server label."""
        items: list[Any] = [item for item in self._output.finished_items() if item.type in LISTING_TYPES]
        return {item.server_label: item.error for item in items if item.error}

    def _messages(self) -> list[Message]:
        items: list[Item | ToolResultRecord] = [*self._finished_input_items()]
        for position, result in reversed(self.state.rejected_calls):
            items.insert(position, result)
        compactions = self._compaction.contents if self._compaction is not None else {}
        return self._conversation.messages(
            ResponseProgress(items, self.state.tool_results, compactions),
            supports_namespaces=self._toolbox.supports_namespaces,
        )

    def _finished_input_items(self) -> list[Item]:
        """Return the finished items of the output as the next turn reads them. Each is converted once."""
        finished = [(index, item) for index, item in enumerate(self._output.items) if item is not None]
        new = [(index, item) for index, item in finished if self._converted.get(index, _NOT_CONVERTED)[0] is not item]
        for (index, item), converted in zip(new, output_to_input(item for _, item in new), strict=True):
            self._converted[index] = item, converted
        return [self._converted[index][1] for index, _ in finished]

    def _is_repeating(self) -> bool:
        """Return whether the model has made one call over and over."""
        newest = self.state.requested_calls[-_MAX_REPEATS:]
        return len(newest) == _MAX_REPEATS and len(set(newest)) == 1


def _require_tool_lists(listing_errors: Mapping[str, str]) -> None:
    """Raise ExternalConnectorError for the first MCP server whose tools could not be listed."""
    for label, error in listing_errors.items():
        raise ExternalConnectorError(f"Error retrieving tool list from MCP server: '{label}'. {error}", param="tools")


def _call_signature(call: HostedCall) -> tuple[str, str]:
    """Return the name and the arguments, which are equal for repeated calls."""
    return call.name, call.text
