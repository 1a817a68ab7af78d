"""One answer of the model: its deltas in, typed events out. Synchronous, and no I/O.

What a delta does depends only on its type and on what is open:

    open \\ delta   Text             Reasoning         Refusal          ToolCallStart   ToolArguments
    nothing        open a message   open a reasoning  open a message   open a call     grow that call
    message        grow it *        close, open one   grow it          close, open     grow that call
    reasoning      close, open one  grow it           close, open one  close, open     grow that call

    * a change of phase closes it and opens another

Calls stay open beside the rest until the turn ends, because parallel calls may interleave; they are found by call id.
Calls of typed tools that the client runs open only then, because the item needs its arguments whole and good.
`output` grows exactly when an item opens, and an item's output_index is its position there. Opening and closing are one
method each, so that no kind of item can miss its `added` or its `done`.
"""

from collections.abc import Hashable
from dataclasses import replace
from itertools import groupby
from typing import assert_never

from apis.deltas import (
    Delta,
    DeltaBatch,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from apis.errors import ToolFailed, UpstreamError
from apis.events import EventList
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
from providers.responses.events.output import ResponseOutput
from providers.responses.events.tool_result import ToolResultRecord
from providers.responses.tools.call import ClientCall, HostedCall, RejectedCall
from providers.responses.tools.choice_policy import ToolChoicePolicy
from providers.responses.tools.item_types import id_prefix
from providers.responses.tools.offered import ClientToolName, OfferedTools


class TurnStream:
    """Feed it one chat's steps; then `finish` is how it ended, and what the model wants done is told apart: `calls` and
    `typed` by the client, `hosted` here. `rejected` are calls that cannot be made, or are not what is demanded: the
    model is to be told why. `spoke` is whether there was a message; `deltas` is for whoever feeds it to count them."""

    def __init__(
        self, output: ResponseOutput, toolbox: OfferedTools, tool_choice_policy: ToolChoicePolicy | None = None
    ) -> None:
        self.finish: Finish | None = None
        self.tool_choice_policy = tool_choice_policy or ToolChoicePolicy()
        self.function_calls: dict[str, OpenFunctionCall] = {}
        self.hosted_calls: dict[str, HostedCall] = {}
        self.client_calls: list[ClientCall] = []
        self.rejected_calls: list[ToolResultRecord] = []
        self.has_message = False
        self.delta_count = 0
        self._pending_client_calls: dict[str, ClientCall] = {}
        self._toolbox = toolbox
        self._output = output
        self._open_item: OpenMessage | OpenReasoning | None = None
        self._growing_call_ids: set[str] = set()

    @property
    def continues(self) -> bool:
        """Whether another turn follows once the hosted calls have been run: nothing ends the response, and nothing is
        left to be said of this turn."""
        return not (self.function_calls or self.client_calls or self.rejected_calls)

    def feed(self, batch: DeltaBatch) -> EventList:
        """The events of one step, in order."""
        events: EventList = []
        for delta in batch:
            match delta:
                case TextDelta() | RefusalDelta():
                    self._current_message(delta, events).append(delta, events)
                case ReasoningDelta(text):
                    self._current_reasoning(events).append(text, events)
                case ToolCallStart():
                    self._close_open_item(events)
                    self._open_call(delta, events)
                case ToolArgumentsDelta(id, text):
                    self._find_call(id).append(text, events)
                    self._growing_call_ids.add(id)
                case Finish():
                    self.finish = delta
                    self._end_turn(delta, events)
                case _:
                    assert_never(delta)
        return events

    def close_open_items(self) -> EventList:
        """The turn ended before its finish: everything that is open becomes incomplete, whole as far as it got."""
        events: EventList = []
        self._close_open_item(events, "incomplete")
        for call in (*self.function_calls.values(), *self.hosted_calls.values()):
            if self._output.items[call.index] is None:
                self._finish_item(call, "incomplete", events)
        return events

    def _end_turn(self, finish: Finish, events: EventList) -> None:
        cut = finish.reason in ("length", "content_filter")
        last = len(self._output.items) - 1
        if self._open_item is not None:
            self._close_open_item(events, "incomplete" if cut and self._open_item.index == last else "completed")
        # a cut leaves the last item incomplete, and every call that had grown beside it: a client would run them
        for identity, call in self.function_calls.items():
            broken = cut and (
                call.index == last or (len(self._growing_call_ids) > 1 and identity in self._growing_call_ids)
            )
            self._finish_item(call, "incomplete" if broken else "completed", events)
        if cut:
            for call in self.hosted_calls.values():  # none is run
                status = "incomplete" if call.index == last else "failed"
                events += call.close(status)
                self._output.items[call.index] = call.item(status)
            self.hosted_calls.clear()
        else:
            for call in self._pending_client_calls.values():
                self._place_client_call(call, events)
        self._pending_client_calls.clear()

    def _current_message(self, delta: TextDelta | RefusalDelta, events: EventList) -> OpenMessage:
        phase = delta.phase if isinstance(delta, TextDelta) else None
        current = self._open_item
        if isinstance(current, OpenMessage) and (current.phase == phase or isinstance(delta, RefusalDelta)):
            return current
        self._close_open_item(events)
        shown = (self._output.sources, self._output.files)
        citations = CitationScanner(*shown, is_json=self._output.is_json) if any(shown) else None
        message = OpenMessage(
            self._output.ids.new_item_id(id_prefix("message")), self._output.reserve_index(), phase, citations
        )
        self._open_item, self.has_message = message, True
        events += message.open()
        return message

    def _current_reasoning(self, events: EventList) -> OpenReasoning:
        if not isinstance(self._open_item, OpenReasoning):
            self._close_open_item(events)
            self._open_item = OpenReasoning(
                self._output.ids.new_item_id(id_prefix("reasoning")),
                self._output.reserve_index(),
                self._output.reasoning_sealer,
            )
            events += self._open_item.open()
        return self._open_item

    def _open_call(self, start: ToolCallStart, events: EventList) -> None:
        identity = start.id or generate_call_id()
        self._growing_call_ids = {identity}
        if identity in self.function_calls or identity in self.hosted_calls or identity in self._pending_client_calls:
            raise UpstreamError("The inference server began two tool calls with one id.")
        typed = self._resolve_call(replace(start, id=identity))
        if isinstance(typed, ClientCall):
            self._pending_client_calls[identity] = typed
            return
        if isinstance(typed, HostedCall):
            call = self.hosted_calls[identity] = typed
            self._output.place_item(call)
        else:
            kind = OpenCustomCall if start.custom else OpenFunctionCall
            item_id = self._output.ids.new_item_id(id_prefix(kind.item_type))
            index = self._output.reserve_index()
            call = self.function_calls[identity] = kind(item_id, index, identity, typed.name, typed.namespace)
        events += call.open()

    def _resolve_call(self, start: ToolCallStart) -> HostedCall | ClientCall | ClientToolName:
        found = self._toolbox.find_tool(start.name)
        if found is None:
            return RejectedCall(start)
        if not self.tool_choice_policy.allows(start.name):
            return RejectedCall(start, self.tool_choice_policy.refusal_message(start.name))
        return found if isinstance(found, ClientToolName) else found.create_call(start)

    def _place_client_call(self, call: ClientCall, events: EventList) -> None:
        """A typed call of the client's is whole: it becomes an item, or the model is told why it cannot."""
        try:
            call.validate_arguments()
        except ToolFailed as exc:
            self.rejected_calls.append(
                ToolResultRecord(call.call_id, call.name, call.text, exc.message, custom=call.is_custom)
            )
            return
        self._output.place_item(call)
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
        events += item.close(status)
        self._output.items[item.index] = item.item(status)


def join_deltas(batch: DeltaBatch) -> DeltaBatch:
    """The step with each run of deltas of one text, or of one thought, as one delta."""
    deltas: list[Delta] = []
    for kind, run in groupby(batch, _join_key):
        same = [*run]
        if len(same) == 1 or kind is None:
            deltas += same
        else:
            text = "".join([delta.text for delta in same if isinstance(delta, TextDelta | ReasoningDelta)])
            deltas.append(replace(same[0], text=text) if isinstance(same[0], TextDelta) else ReasoningDelta(text))
    return deltas


def _join_key(delta: Delta) -> Hashable:
    """The same for deltas that may be joined; None for those that may not."""
    if isinstance(delta, TextDelta):
        return None if delta.logprobs else ("text", delta.phase)
    return "reasoning" if isinstance(delta, ReasoningDelta) else None
