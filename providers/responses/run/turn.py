"""One answer of the model: its deltas in, typed events out. Synchronous, and no I/O.

What a delta does depends only on its type and on what is open:

    open \\ delta   Text             Reasoning         Refusal          ToolCallStart   ToolArguments
    nothing        open a message   open a reasoning  open a message   open a call     grow that call
    message        grow it *        close, open one   grow it          close, open     grow that call
    reasoning      close, open one  grow it **        close, open one  close, open     grow that call

    * a delta of another phase closes the message and opens another
    ** a ReasoningSummaryDelta ends the open reasoning's text and grows its summary; reasoning after it opens another

Calls stay open until the turn ends, because parallel calls may interleave; deltas name them by call id. Their events
never interleave, since some clients add each delta to the newest call: a call that begins while the item of another one
grows waits until other output or the end of the turn. The item of a call opens at once, or when its arguments are
complete or valid, as its `opens` says. The output grows exactly when an item opens, and an item's output_index is its
position there. Opening and closing are one method each, so that no kind of item can miss its `added` or its `done`
event.
"""

from collections.abc import Container
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
from apis.wire.item_types import id_prefix
from providers.responses.events.citations import CitationScanner
from providers.responses.events.open_items import FinalItemStatus, GrowingText, OpenMessage, OpenReasoning
from providers.responses.events.output import ResponseOutput, count_chars
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import Call, ClientCall, HostedCall, ItemCall
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.functions import ClientToolName, CustomToolCall
from providers.responses.tools.offered import OfferedTools

NO_CALLS_LEFT: Final = "no more tool calls are allowed in this response. Answer with what you have."
"""Reason that the model reads for a hosted call beyond `max_tool_calls`, which becomes no item."""
_BURST_DELTAS: Final = 8
"""A batch of more deltas is a burst: its tokens have waited for each other, and reach the client at once."""
_TEXT_TYPES: Final = (TextDelta, ReasoningDelta, ReasoningSummaryDelta, RefusalDelta, ToolArgumentsDelta)


class TurnStream:
    """Turns the delta batches of one chat into events. After the last batch, `finish` says how the turn ended, and the
    calls are sorted by who acts on them: the client runs `client_calls`, and while the model goes on `async_calls`,
    this server runs `hosted_calls`, and the model reads why its `rejected_calls` were not run; `grammar_calls` wait for
    `place_client_calls`. `has_message` is true once a message opened, and `has_reasoning` once reasoning did.
    `delta_count` is the number of deltas, with those that are delayed before they come here.
    Hosted calls beyond `hosted_calls_left` are rejected."""

    __slots__ = (
        "_calls",
        "_delayed_chars",
        "_first_index",
        "_growing_call_ids",
        "_growing_item",
        "_hosted_calls_left",
        "_open_item",
        "_output",
        "_toolbox",
        "_waiting_calls",
        "async_calls",
        "client_calls",
        "delta_count",
        "finish",
        "grammar_calls",
        "has_message",
        "has_reasoning",
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
        self.hosted_calls: list[HostedCall] = []
        self.client_calls: list[ClientCall] = []
        self.async_calls: list[ClientCall] = []
        self.grammar_calls: list[CustomToolCall] = []
        self.rejected_calls: list[ToolResultRecord] = []
        self.has_message = self.has_reasoning = False
        self.delta_count = 0
        self._delayed_chars = 0
        self._calls: dict[str, Call] = {}
        self._toolbox = toolbox
        self._output = output
        self._first_index = len(output.items)
        self._hosted_calls_left = hosted_calls_left
        self._open_item: OpenMessage | OpenReasoning | None = None
        self._growing_call_ids: set[str] = set()
        self._growing_item: Call | None = None
        self._waiting_calls: dict[str, tuple[ToolCallStart, GrowingText]] = {}

    @property
    def continues(self) -> bool:
        """Another turn follows as soon as the hosted calls have run: no call of the client's ends the response, and no
        rejected call is still to be recorded."""
        return not (self.client_calls or self.rejected_calls)

    def feed(self, batch: DeltaBatch) -> EventList:
        """Return the events of one batch of deltas, in order. Adjacent deltas of one text become one event in a burst,
        and where events have no readers."""
        self.delta_count += len(batch)
        events: EventList = []
        is_joined = len(batch) > _BURST_DELTAS or not self._output.has_readers
        for delta in join_deltas(batch) if is_joined else batch:
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
                    self._growing_call_ids = {delta.id}
                    self._begin_call(delta, events)
                case ToolArgumentsDelta(id, text):
                    self._append_arguments(id, text, events)
                case DelayedOutput(deltas, chars):
                    self.delta_count += deltas - 1
                    self._delayed_chars += chars
                case Finish():
                    self.finish = delta
                    self._end_turn(delta, events)
                case _:
                    assert_never(delta)
        return events

    def close_open_items(self) -> EventList:
        """Return the events that close the open items of a turn without a finish, as incomplete."""
        events: EventList = []
        self._close_open_item(events, "incomplete")
        self._open_complete_calls(events)
        for call in self._calls.values():
            if not isinstance(call, ItemCall) or call.index < 0:
                continue
            if self._output.items[call.index] is None:
                self._end_item(call.close("incomplete"), events)
            elif isinstance(call, HostedCall) and call.last_index >= 0 and self._output.items[call.last_index] is None:
                self._end_item(call.close_result("incomplete"), events)
        return events

    def take_estimate(self) -> int:
        """Return an estimate of the tokens of a turn without a finish, once. Its items have to be closed."""
        if not self.delta_count:
            return 0
        count = estimate_tokens(self.delta_count, sum(self._count_chars()) + self._delayed_chars)
        self.delta_count = 0
        return count

    def count_usage(self, finish: Finish) -> Usage:
        """Return the usage of the ended turn. Where the server does not count the tokens of the reasoning that it sent,
        they are estimated: its share of the output's characters."""
        usage = finish.usage
        if usage.reasoning_tokens or not usage.output_tokens or not self.has_reasoning:
            return usage
        reasoning, others = self._count_chars()
        if not reasoning:
            return usage
        share = max(1, round(usage.output_tokens * reasoning / (reasoning + others)))
        return msgspec.structs.replace(usage, reasoning_tokens=share)

    def _count_chars(self) -> tuple[int, int]:
        """Return how many characters the model has written: of reasoning, and of messages and calls."""
        call_indexes = {call.index for call in self._calls.values()}
        counts = [0, sum(len(call.text) for call in self._calls.values())]
        for index, item in enumerate(self._output.items[self._first_index :], self._first_index):
            if item is not None and index not in call_indexes:
                counts[item.type != "reasoning"] += count_chars(item)
        return counts[0], counts[1]

    def _end_turn(self, finish: Finish, events: EventList) -> None:
        cut = finish.reason in ("length", "content_filter")
        self._open_waiting_calls(events, is_cut=cut)
        last = len(self._output.items) - 1
        if self._open_item is not None:
            self._close_open_item(events, "incomplete" if cut and self._open_item.index == last else "completed")
        if (newest := self._open_complete_calls(events)) is not None:
            last = newest
        # a cut leaves the last item incomplete and the calls that grew in parallel with it: a client would run them
        for call in self._calls.values():
            is_last = call.index == last
            if cut and isinstance(call, HostedCall):
                self._end_item(call.close("incomplete" if is_last else "failed"), events)
            elif isinstance(call, ClientCall) and call.index >= 0:
                grew_last = len(self._growing_call_ids) > 1 and call.call_id in self._growing_call_ids
                self._end_item(call.close("incomplete" if cut and (is_last or grew_last) else "completed"), events)
                (self.async_calls if call.is_async else self.client_calls).append(call)
            elif isinstance(call, CustomToolCall):
                self.grammar_calls.append(call)
        if cut:
            self.hosted_calls, self.grammar_calls = [], []
        elif self._calls and not self.grammar_calls:
            events += self.place_client_calls()

    def place_client_calls(self, corrected_tools: Container[str] = ()) -> EventList:
        """Return the events of the client's calls that open when they are valid; the turn has ended. A call with an
        input that breaks its grammar is rejected once: not for one of the `corrected_tools`, whose calls were rejected
        before, and not next to another call, with which the response ends."""
        calls = [call for call in self._calls.values() if call.index < 0 and not isinstance(call, HostedCall)]
        has_others = bool(self.client_calls) or any(
            not isinstance(call, CustomToolCall) or call.is_match for call in calls
        )
        events: EventList = []
        for call in calls:
            if isinstance(call, CustomToolCall) and (has_others or call.name in corrected_tools):
                call.deliver_mismatch()
            if isinstance(call, ClientCall):
                self._place_client_call(call, events)
            if call.rejection is not None:
                self.rejected_calls.append(
                    ToolResultRecord(call.call_id, call.name, call.text, call.rejection, custom=call.is_custom)
                )
        self.grammar_calls = []
        return events

    def _open_complete_calls(self, events: EventList, *, are_all_complete: bool = True) -> int | None:
        """Open the calls that open when they are complete; return the index of the one that the model wrote last, if
        it was writing one. Unless `are_all_complete`, their arguments must be an object."""
        newest = None
        if are_all_complete:
            self._open_waiting_calls(events)
        for call in self.hosted_calls:
            if call.index < 0 and (are_all_complete or call.has_arguments):
                events += call.place(self._output)
                newest = call.index if call.call_id in self._growing_call_ids else newest
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
            self.has_reasoning = True
            self._open_item = OpenReasoning(
                self._output.ids.new_item_id(id_prefix("reasoning")),
                self._output.reserve_index(),
                self._output.reasoning_sealer,
                is_hidden=self._output.hides_reasoning,
            )
            events += self._open_item.open()
        return self._open_item

    def _begin_call(self, start: ToolCallStart, events: EventList) -> None:
        """Open the call, or let it wait for one whose item grows: whose arguments are not a whole object yet, or are
        free text, which has no end of its own."""
        growing = self._growing_item
        if growing is not None and not growing.is_custom and growing.has_arguments:
            growing = self._growing_item = None
        if start.id in self._calls or start.id in self._waiting_calls:
            raise UpstreamError("The inference server began two tool calls with one id.")
        if growing is not None:
            self._waiting_calls[start.id] = start, GrowingText()
        else:
            self._close_open_item(events)
            self._open_call(start, events)

    def _append_arguments(self, call_id: str, text: str, events: EventList) -> None:
        self._growing_call_ids.add(call_id)
        if call_id in self._waiting_calls:
            self._waiting_calls[call_id][1].append(text)
        elif (call := self._calls.get(call_id)) is not None:
            call.append(text, events)
        else:
            raise UpstreamError("The inference server sent arguments of a tool call that had not begun.")

    def _open_waiting_calls(self, events: EventList, *, is_cut: bool = False) -> None:
        """Open the calls that waited, in their order: the model goes on after all calls, or has ended its turn."""
        waiting, self._waiting_calls = self._waiting_calls, {}
        for start, arguments in waiting.values():
            growing = self._growing_item
            if growing is not None and not (is_cut and growing.call_id in self._growing_call_ids):
                growing.end_arguments(events)
            self._open_call(start, events)
            if text := str(arguments):
                self._calls[start.id].append(text, events)
        self._growing_item = None

    def _open_call(self, start: ToolCallStart, events: EventList) -> None:
        self._open_complete_calls(events, are_all_complete=False)
        call = self._calls[start.id] = self._create_call(start)
        if isinstance(call, HostedCall):
            self.hosted_calls.append(call)
        if isinstance(call, ItemCall) and call.opens == "at once":
            events += call.place(self._output)
            self._growing_item = call

    def _create_call(self, start: ToolCallStart) -> Call:
        """Return the call, which is rejected where it may not be run."""
        tool = self._toolbox.find_tool(start.name)
        if tool is None:
            return Call(start, f"There is no tool named '{start.name}'. Call only tools that you were given.")
        if not self.tool_choice_policy.allows(start.name):
            return Call(start, self.tool_choice_policy.refusal_message(start.name))
        call = tool.create_call(start)
        if not isinstance(tool, ClientToolName):
            call.tool = tool
        is_beyond_limit = self._hosted_calls_left is not None and len(self.hosted_calls) >= self._hosted_calls_left
        return Call(start, f"Not run: {NO_CALLS_LEFT}") if is_beyond_limit and isinstance(call, HostedCall) else call

    def _place_client_call(self, call: ClientCall, events: EventList) -> None:
        """Open and close the item of a client's call that is complete; reject one with invalid arguments."""
        try:
            call.validate_arguments()
        except ToolFailed as exc:
            call.rejection = exc.message
            return
        events += call.place(self._output)
        self._end_item(call.close("completed"), events)
        (self.async_calls if call.is_async else self.client_calls).append(call)

    def _close_open_item(self, events: EventList, status: FinalItemStatus = "completed") -> None:
        if self._open_item is not None:
            self._end_item(self._open_item.close(status), events)
            self._open_item = None

    def _end_item(self, closing_events: EventList, events: EventList) -> None:
        events += closing_events
        self._output.record_done_items(closing_events)


def join_deltas(batch: DeltaBatch) -> DeltaBatch:
    """Return the batch with adjacent deltas of one text joined to one delta. Those with logprobs stay apart."""
    deltas: list[Delta] = []
    last: Delta | None = None
    texts: list[str] = []  # those that are joined to the last delta
    for delta in batch:
        if last is not None and isinstance(delta, _TEXT_TYPES) and type(delta) is type(last) and _goes_on(last, delta):
            texts.append(delta.text)
        else:
            _extend_last(deltas, texts)
            deltas.append(delta)
            last, texts = delta, []
    _extend_last(deltas, texts)
    return deltas


def _goes_on(last: Delta, delta: Delta) -> bool:
    """Return true if `delta` has more of the text of `last`, a delta of the same type."""
    match last, delta:
        case TextDelta(), TextDelta():
            return last.phase == delta.phase and not (last.logprobs or delta.logprobs or delta.begins_message)
        case ToolArgumentsDelta(), ToolArgumentsDelta():
            return last.id == delta.id
        case _:
            return not getattr(delta, "begins_message", False)


def _extend_last(deltas: list[Delta], texts: list[str]) -> None:
    if texts and isinstance(last := deltas[-1], _TEXT_TYPES):
        deltas[-1] = msgspec.structs.replace(last, text=last.text + "".join(texts))
