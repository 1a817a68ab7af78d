"""One answer of the model: its deltas in, typed events out. Synchronous, and no I/O.

What a delta does depends only on its type and on what is open:

    open \\ delta   Text             Reasoning         Refusal          ToolCallStart   ToolArguments
    nothing        open a message   open a reasoning  open a message   open a call     grow that call
    message        grow it *        close, open one   grow it          close, open     grow that call
    reasoning      close, open one  grow it **        close, open one  close, open     grow that call

    * a delta of another phase closes the message and opens another
    ** a ReasoningSummaryDelta ends the open reasoning's text and grows its summary; reasoning after it opens another

Calls stay open until the turn ends, because parallel calls may interleave; deltas name them by call id. Calls of typed
tools that the client runs open only at the end, because the item needs complete, valid arguments; so do searches of the
web, whose item shows the query from its beginning. The output grows
exactly when an item opens, and an item's output_index is its position there. Opening and closing are one method each,
so that no kind of item can miss its `added` or its `done` event.
"""

from collections.abc import Container, Sequence
from typing import Final, assert_never

import msgspec

from apis.deltas import (
    DelayedOutput,
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    ReasoningSummaryDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    Usage,
    estimate_tokens,
)
from apis.errors import ToolFailed, UpstreamError
from apis.events import EventList
from apis.wire.base import Phase
from providers.responses.events.citations import CitationScanner
from providers.responses.events.ids import generate_call_id
from providers.responses.events.open_items import (
    FinalItemStatus,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenReasoning,
)
from providers.responses.events.open_message import OpenMessage
from providers.responses.events.output import ResponseOutput, count_chars
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ClientCall, HostedCall, RejectedCall
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.grammars import GrammarCall
from providers.responses.tools.item_types import id_prefix
from providers.responses.tools.offered import ClientToolName, OfferedTools

NO_CALLS_LEFT: Final = "no more tool calls are allowed in this response. Answer with what you have."
"""Reason that the model reads for a hosted call beyond `max_tool_calls`, which becomes no item."""


class TurnStream:
    """Turns the delta batches of one chat into events. After the last batch, `finish` says how the turn ended, and the
    calls are sorted by who acts on them: the client runs `function_calls` and `client_calls`, this server
    `hosted_calls`, and the model reads why its `rejected_calls` were not run. `has_message` is true once a message
    opened; `delta_count` is the number of deltas, with those that are delayed before they come here. Hosted calls
    beyond `hosted_calls_left` are rejected."""

    __slots__ = (
        "_delayed_chars",
        "_first_index",
        "_growing_call_ids",
        "_hosted_calls_left",
        "_open_item",
        "_output",
        "_pending_client_calls",
        "_toolbox",
        "client_calls",
        "delta_count",
        "finish",
        "function_calls",
        "has_message",
        "hosted_calls",
        "rejected_calls",
        "tool_choice_policy",
    )

    def __init__(
        self,
        output: ResponseOutput,
        toolbox: OfferedTools,
        tool_choice_policy: ToolChoicePolicy | None = None,
        *,
        hosted_calls_left: int | None = None,
    ) -> None:
        self.finish: Finish | None = None
        self.tool_choice_policy = tool_choice_policy or ToolChoicePolicy()
        self.function_calls: dict[str, OpenFunctionCall] = {}
        self.hosted_calls: dict[str, HostedCall] = {}
        self.client_calls: list[ClientCall] = []
        self.rejected_calls: list[ToolResultRecord] = []
        self.has_message = False
        self.delta_count = 0
        self._delayed_chars = 0
        self._pending_client_calls: dict[str, ClientCall] = {}
        self._toolbox = toolbox
        self._output = output
        self._first_index = len(output.items)
        self._hosted_calls_left = hosted_calls_left
        self._open_item: OpenMessage | OpenReasoning | None = None
        self._growing_call_ids = set[str]()

    @property
    def continues(self) -> bool:
        """Another turn follows as soon as the hosted calls have run: no call of the client's ends the response, and no
        rejected call is still to be recorded."""
        return not (self.function_calls or self.client_calls or self.rejected_calls)

    def feed(self, batch: DeltaBatch) -> EventList:
        """Return the events of one batch of deltas, in order."""
        self.delta_count += len(batch)
        events: EventList = []
        for delta in batch:
            match delta:
                case TextDelta(text, logprobs, phase):
                    message = self._open_item
                    if not isinstance(message, OpenMessage) or message.phase != phase or delta.begins_message:
                        message = self._open_message(phase, events)
                    message.append_text(text, logprobs, events)
                case RefusalDelta(text):
                    self._append_refusal(text, events)
                case ReasoningDelta(text):
                    self._current_reasoning(events, is_new=delta.begins_message).append(text, events)
                case ReasoningSummaryDelta(text):
                    if isinstance(self._open_item, OpenReasoning):
                        self._open_item.append_summary(text, events)
                case ToolCallStart():
                    self._close_open_item(events)
                    self._open_call(delta, events)
                case ToolArgumentsDelta(id, text):
                    self._find_call(id).append(text, events)
                    self._growing_call_ids.add(id)
                case DelayedOutput(deltas, chars):
                    self.delta_count += deltas - 1
                    self._delayed_chars += chars
                case Finish():
                    self.finish = delta
                    self._end_turn(delta, events)
                case _:
                    assert_never(delta)
        return events

    def feed_joined(self, batch: DeltaBatch) -> EventList:
        """Return the events of one batch, with adjacent deltas of one text joined to one event: for a response whose
        events have no readers."""
        joined = join_deltas(batch)
        self.delta_count += len(batch) - len(joined)
        return self.feed(joined)

    def close_open_items(self) -> EventList:
        """Return the events that close the open items of a turn without a finish, as incomplete."""
        events: EventList = []
        self._close_open_item(events, "incomplete")
        self._open_complete_calls(events)
        for call in (*self.function_calls.values(), *self.hosted_calls.values()):
            if self._output.items[call.index] is None:
                self._finish_item(call, "incomplete", events)
            elif isinstance(call, HostedCall) and call.last_index >= 0 and self._output.items[call.last_index] is None:
                closing_events = call.close_result("incomplete")
                events += closing_events
                self._output.record_done_items(closing_events)
        return events

    def take_estimate(self) -> int:
        """Return an estimate of the tokens of a turn without a finish, once. Its items have to be closed."""
        if not self.delta_count:
            return 0
        calls = (*self.hosted_calls.values(), *self._pending_client_calls.values())
        chars = sum(map(count_chars, self._output.items[self._first_index :])) + sum(len(call.text) for call in calls)
        count = estimate_tokens(self.delta_count, chars + self._delayed_chars)
        self.delta_count = 0
        return count

    def count_usage(self, finish: Finish) -> Usage:
        """Return the usage of the ended turn. Where the server does not count the tokens of the reasoning that it sent,
        they are estimated: its share of the output's characters."""
        usage = finish.usage
        items = [item for item in self._output.items[self._first_index :] if item is not None]
        reasoning = sum(count_chars(item) for item in items if item.type == "reasoning")
        if usage.reasoning_tokens or not usage.output_tokens or not reasoning:
            return usage
        calls = (*self.hosted_calls.values(), *self.client_calls)
        others = sum(count_chars(item) for item in items if item.type != "reasoning")
        others += sum(len(call.text) for call in calls)
        share = max(1, round(usage.output_tokens * reasoning / (reasoning + others)))
        return msgspec.structs.replace(usage, reasoning_tokens=share)

    def _end_turn(self, finish: Finish, events: EventList) -> None:
        cut = finish.reason in ("length", "content_filter")
        last = len(self._output.items) - 1
        if self._open_item is not None:
            self._close_open_item(events, "incomplete" if cut and self._open_item.index == last else "completed")
        if (newest := self._open_complete_calls(events)) is not None:
            last = newest
        # a cut leaves the last item incomplete and the calls that grew in parallel with it: a client would run them
        for call_id, call in self.function_calls.items():
            incomplete = cut and (
                call.index == last or (len(self._growing_call_ids) > 1 and call_id in self._growing_call_ids)
            )
            self._finish_item(call, "incomplete" if incomplete else "completed", events)
        if cut:
            for call in self.hosted_calls.values():  # none of them runs
                status = "incomplete" if call.index == last else "failed"
                events += call.close(status)
                self._output.items[call.index] = call.item(status)
            self.hosted_calls.clear()
        else:
            if not self.grammar_calls:
                events += self.place_client_calls()
            return
        self._pending_client_calls.clear()

    @property
    def grammar_calls(self) -> Sequence[GrammarCall]:
        """The calls whose input is to be matched with a grammar, before `place_client_calls`."""
        return [call for call in self._pending_client_calls.values() if isinstance(call, GrammarCall)]

    def place_client_calls(self, corrected_tools: Container[str] = ()) -> EventList:
        """Return the events of the typed calls that the client runs; the turn has ended. A call with an input that
        breaks its grammar is rejected once: not for one of the `corrected_tools`, whose calls were rejected before, and
        not next to another call, with which the response ends."""
        events: EventList = []
        calls = [*self._pending_client_calls.values()]
        are_matches = [call.is_match if isinstance(call, GrammarCall) else True for call in calls]
        has_others = bool(self.function_calls) or any(are_matches)
        for call in calls:
            if isinstance(call, GrammarCall) and (has_others or call.name in corrected_tools):
                call.deliver_mismatch()
            self._place_client_call(call, events)
        self._pending_client_calls.clear()
        return events

    def _open_complete_calls(self, events: EventList, *, are_all_complete: bool = True) -> int | None:
        """Open the calls that open when they are complete; return the index of the one that the model wrote last, if
        it was writing one. Unless `are_all_complete`, their arguments must be an object."""
        newest = None
        for call_id, call in self.hosted_calls.items():
            if call.index < 0 and (are_all_complete or call.has_arguments):
                call.place(self._output)
                events += call.open()
                newest = call.index if call_id in self._growing_call_ids else newest
        return newest

    def _open_message(self, phase: Phase | None, events: EventList) -> OpenMessage:
        self._close_open_item(events)
        self._open_complete_calls(events)
        citable = (self._output.sources, self._output.files)
        citations = CitationScanner(*citable, is_json=self._output.is_json) if any(citable) else None
        item_id = self._output.ids.new_item_id(id_prefix("message"))
        index, has_readers = self._output.reserve_index(), self._output.has_readers
        message = OpenMessage(item_id, index, phase, citations, has_readers=has_readers)
        self._open_item, self.has_message = message, True
        events += message.open()
        return message

    def _append_refusal(self, text: str, events: EventList) -> None:
        message = self._open_item
        if not isinstance(message, OpenMessage):
            message = self._open_message(None, events)
        message.append_refusal(text, events)

    def _current_reasoning(self, events: EventList, *, is_new: bool) -> OpenReasoning:
        if is_new or not isinstance(self._open_item, OpenReasoning) or self._open_item.is_summarized:
            self._close_open_item(events)
            self._open_complete_calls(events)
            self._open_item = OpenReasoning(
                self._output.ids.new_item_id(id_prefix("reasoning")),
                self._output.reserve_index(),
                self._output.reasoning_sealer,
                is_hidden=self._output.hides_reasoning,
            )
            events += self._open_item.open()
        return self._open_item

    def _open_call(self, start: ToolCallStart, events: EventList) -> None:
        self._open_complete_calls(events, are_all_complete=False)
        call_id = start.id or generate_call_id()
        self._growing_call_ids = {call_id}
        if call_id in self.function_calls or call_id in self.hosted_calls or call_id in self._pending_client_calls:
            raise UpstreamError("The inference server began two tool calls with one id.")
        resolved = self._resolve_call(msgspec.structs.replace(start, id=call_id))
        if isinstance(resolved, ClientCall):
            self._pending_client_calls[call_id] = resolved
            return
        if isinstance(resolved, HostedCall):
            call = self.hosted_calls[call_id] = resolved
            if call.opens_when_complete:
                return
            call.place(self._output)
        else:
            call_type = OpenCustomCall if start.custom else OpenFunctionCall
            index = self._output.reserve_index()
            item_id = self._output.ids.new_item_id(id_prefix(call_type.item_type))
            call = self.function_calls[call_id] = call_type(item_id, index, call_id, resolved.name, resolved.namespace)
        events += call.open()

    def _resolve_call(self, start: ToolCallStart) -> HostedCall | ClientCall | ClientToolName:
        tool = self._toolbox.find_tool(start.name)
        if tool is None:
            return RejectedCall(start)
        if not self.tool_choice_policy.allows(start.name):
            return RejectedCall(start, self.tool_choice_policy.refusal_message(start.name))
        if isinstance(tool, ClientToolName):
            if tool.grammar is None or not start.custom:
                return tool
            return GrammarCall(start, tool.grammar, tool.name, tool.namespace)
        call = tool.create_call(start)
        call.tool = tool
        is_beyond_limit = self._hosted_calls_left is not None and len(self.hosted_calls) >= self._hosted_calls_left
        return (
            RejectedCall(start, f"Not run: {NO_CALLS_LEFT}")
            if is_beyond_limit and isinstance(call, HostedCall)
            else call
        )

    def _place_client_call(self, call: ClientCall, events: EventList) -> None:
        """Open and close the item of a client's typed call that is complete; reject one with invalid arguments."""
        try:
            call.validate_arguments()
        except ToolFailed as exc:
            self.rejected_calls.append(
                ToolResultRecord(call.call_id, call.name, call.text, exc.message, custom=call.is_custom)
            )
            return
        call.place(self._output)
        self.client_calls.append(call)
        events += call.open()
        self._finish_item(call, "completed", events)

    def _find_call(self, call_id: str) -> OpenFunctionCall | HostedCall | ClientCall:
        call = (
            self.function_calls.get(call_id)
            or self.hosted_calls.get(call_id)
            or self._pending_client_calls.get(call_id)
        )
        if call is None:
            raise UpstreamError("The inference server sent arguments of a tool call that had not begun.")
        return call

    def _close_open_item(self, events: EventList, status: FinalItemStatus = "completed") -> None:
        if self._open_item is not None:
            self._finish_item(self._open_item, status, events)
            self._open_item = None

    def _finish_item(
        self, item: OpenItem | HostedCall | ClientCall, status: FinalItemStatus, events: EventList
    ) -> None:
        closing_events = item.close(status)
        events += closing_events
        self._output.record_done_items(closing_events)


def join_deltas(batch: DeltaBatch) -> DeltaBatch:
    """Return the batch with adjacent deltas of one text, or of one reasoning, joined to one delta."""
    if len(batch) == 1:
        return batch
    deltas: list[Delta] = []
    last: Delta | None = None
    texts: list[str] = []  # those that are joined to the last delta
    for delta in batch:
        if (
            isinstance(delta, TextDelta)
            and isinstance(last, TextDelta)
            and last.phase == delta.phase
            and not (last.logprobs or delta.logprobs or delta.begins_message)
        ) or (isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta) and not delta.begins_message):
            texts.append(delta.text)
        else:
            _extend_last(deltas, texts)
            deltas.append(delta)
            last, texts = delta, []
    _extend_last(deltas, texts)
    return deltas


def _extend_last(deltas: list[Delta], texts: list[str]) -> None:
    if texts and isinstance(last := deltas[-1], TextDelta | ReasoningDelta):
        deltas[-1] = msgspec.structs.replace(last, text=last.text + "".join(texts))
