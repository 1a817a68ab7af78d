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

from apis.deltas import Delta, Finish, Reasoning, Refusal, Step, Text, ToolArguments, ToolCallStart
from apis.errors import ToolFailed, UpstreamError
from providers.responses.events.citations import CitationScanner
from providers.responses.events.ids import call_id
from providers.responses.events.open_items import (
    Events,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    Status,
)
from providers.responses.events.output import Output
from providers.responses.events.tool_result import Told
from providers.responses.tools.call import ClientCall, HostedCall
from providers.responses.tools.choice_policy import Demand
from providers.responses.tools.offered import ClientName, Toolbox
from providers.responses.tools.rejected_call import Undeclared


class Turn:
    """Feed it one chat's steps; then `finish` is how it ended, and what the model wants done is told apart: `calls` and
    `typed` by the client, `hosted` here. `rejected` are calls that cannot be made, or are not what is demanded: the
    model is to be told why. `spoke` is whether there was a message; `deltas` is for whoever feeds it to count them."""

    def __init__(self, output: Output, toolbox: Toolbox, demand: Demand | None = None) -> None:
        self.finish: Finish | None = None
        self.demand = demand or Demand()
        self.calls: dict[str, OpenCall] = {}
        self.hosted: dict[str, HostedCall] = {}
        self.typed: list[ClientCall] = []
        self.rejected: list[Told] = []
        self.spoke = False
        self.deltas = 0
        self._waiting: dict[str, ClientCall] = {}
        self._toolbox = toolbox
        self._output = output
        self._open: OpenMessage | OpenReasoning | None = None
        self._growing: set[str] = set()

    @property
    def goes_on(self) -> bool:
        """Whether another turn follows once the hosted calls have been run: nothing ends the response, and nothing is
        left to be said of this turn."""
        return not (self.calls or self.typed or self.rejected)

    def feed(self, step: Step) -> Events:
        """The events of one step, in order."""
        events: Events = []
        for delta in step:
            match delta:
                case Text() | Refusal():
                    self._message_for(delta, events).append(delta, events)
                case Reasoning(text):
                    self._reasoning(events).append(text, events)
                case ToolCallStart():
                    self._close(events)
                    self._call(delta, events)
                case ToolArguments(id, text):
                    self._find(id).append(text, events)
                    self._growing.add(id)
                case Finish():
                    self.finish = delta
                    self._end(delta, events)
                case _:
                    assert_never(delta)
        return events

    def break_off(self) -> Events:
        """The turn ended before its finish: everything that is open becomes incomplete, whole as far as it got."""
        events: Events = []
        self._close(events, "incomplete")
        for call in (*self.calls.values(), *self.hosted.values()):
            if self._output.items[call.index] is None:
                self._finish_item(call, "incomplete", events)
        return events

    def _end(self, finish: Finish, events: Events) -> None:
        cut = finish.reason in ("length", "content_filter")
        last = len(self._output.items) - 1
        if self._open is not None:
            self._close(events, "incomplete" if cut and self._open.index == last else "completed")
        # a cut leaves the last item incomplete, and every call that had grown beside it: a client would run them
        for identity, call in self.calls.items():
            broken = cut and (call.index == last or (len(self._growing) > 1 and identity in self._growing))
            self._finish_item(call, "incomplete" if broken else "completed", events)
        if cut:
            for call in self.hosted.values():  # none is run
                status = "incomplete" if call.index == last else "failed"
                events += call.close(status)
                self._output.items[call.index] = call.item(status)
            self.hosted.clear()
        else:
            for call in self._waiting.values():
                self._place(call, events)
        self._waiting.clear()

    def _message_for(self, delta: Text | Refusal, events: Events) -> OpenMessage:
        phase = delta.phase if isinstance(delta, Text) else None
        current = self._open
        if isinstance(current, OpenMessage) and (current.phase == phase or isinstance(delta, Refusal)):
            return current
        self._close(events)
        shown = (self._output.sources, self._output.files)
        citations = CitationScanner(*shown, in_json=self._output.in_json) if any(shown) else None
        message = OpenMessage(self._output.ids.item("msg"), self._output.grow(), phase, citations)
        self._open, self.spoke = message, True
        events += message.open()
        return message

    def _reasoning(self, events: Events) -> OpenReasoning:
        if not isinstance(self._open, OpenReasoning):
            self._close(events)
            self._open = OpenReasoning(self._output.ids.item("rs"), self._output.grow(), self._output.seal)
            events += self._open.open()
        return self._open

    def _call(self, start: ToolCallStart, events: Events) -> None:
        identity = start.id or call_id()
        self._growing = {identity}
        if identity in self.calls or identity in self.hosted or identity in self._waiting:
            raise UpstreamError("The inference server began two tool calls with one id.")
        typed = self._typed(replace(start, id=identity))
        if isinstance(typed, ClientCall):
            self._waiting[identity] = typed
            return
        if isinstance(typed, HostedCall):
            call = self.hosted[identity] = typed
            self._output.place(call)
        else:
            kind, prefix = (OpenCustomCall, "ctc") if start.custom else (OpenCall, "fc")
            index = self._output.grow()
            of = self._output.ids.item(prefix)
            call = self.calls[identity] = kind(of, index, identity, typed.name, typed.namespace)
        events += call.open()

    def _typed(self, start: ToolCallStart) -> HostedCall | ClientCall | ClientName:
        found = self._toolbox.find(start.name)
        if found is None:
            return Undeclared(start)
        if not self.demand.allows(start.name):
            return Undeclared(start, self.demand.refusal(start.name))
        return found if isinstance(found, ClientName) else found.begin(start)

    def _place(self, call: ClientCall, events: Events) -> None:
        """A typed call of the client's is whole: it becomes an item, or the model is told why it cannot."""
        try:
            call.take()
        except ToolFailed as exc:
            self.rejected.append(Told(call.call_id, call.name, call.text, exc.message, custom=call.custom))
            return
        self._output.place(call)
        self.typed.append(call)
        events += call.open()
        self._finish_item(call, "completed", events)

    def _find(self, identity: str) -> OpenCall | HostedCall | ClientCall:
        call = self.calls.get(identity) or self.hosted.get(identity) or self._waiting.get(identity)
        if call is None:
            raise UpstreamError("The inference server sent arguments of a tool call that had not begun.")
        return call

    def _close(self, events: Events, status: Status = "completed") -> None:
        if self._open is not None:
            self._finish_item(self._open, status, events)
            self._open = None

    def _finish_item(self, item: OpenItem | HostedCall | ClientCall, status: Status, events: Events) -> None:
        events += item.close(status)
        self._output.items[item.index] = item.item(status)


def joined(step: Step) -> Step:
    """The step with each run of deltas of one text, or of one thought, as one delta."""
    deltas: list[Delta] = []
    for kind, run in groupby(step, _kind):
        same = [*run]
        if len(same) == 1 or kind is None:
            deltas += same
        else:
            text = "".join([delta.text for delta in same if isinstance(delta, Text | Reasoning)])
            deltas.append(replace(same[0], text=text) if isinstance(same[0], Text) else Reasoning(text))
    return deltas


def _kind(delta: Delta) -> Hashable:
    """The same for deltas that may be joined; None for those that may not."""
    if isinstance(delta, Text):
        return None if delta.logprobs else ("text", delta.phase)
    return "reasoning" if isinstance(delta, Reasoning) else None
