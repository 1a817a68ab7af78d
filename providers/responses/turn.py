"""One answer of the model: its deltas in, typed events out. Synchronous, and no I/O.

What a delta does depends only on its type and on what is open:

    open \\ delta   Text             Reasoning         Refusal          ToolCallStart   ToolArguments
    nothing        open a message   open a reasoning  open a message   open a call     grow that call
    message        grow it *        close, open one   grow it          close, open     grow that call
    reasoning      close, open one  grow it           close, open one  close, open     grow that call

    * a change of phase closes it and opens another

Calls stay open beside the rest until the turn ends, because parallel calls may interleave; they are found by call id.
`output` grows exactly when an item opens, and an item's output_index is its position there. Opening and closing are one
method each, so that no kind of item can miss its `added` or its `done`.
"""

from collections.abc import Mapping
from typing import assert_never

from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from apis.errors import UpstreamError
from apis.inference import Finish, Reasoning, Refusal, Step, Text, ToolArguments, ToolCallStart
from apis.tool_runtime import Source
from providers.responses.citations import CitationScanner
from providers.responses.hosted.call import HostedCall, HostedTool
from providers.responses.ids import Ids, call_id
from providers.responses.open_items import (
    Events,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    Status,
)


class Output:
    """The items of a response so far, over all its turns, and the sources its tools have shown the model."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.items: list[ResponseOutputItem | None] = []
        self.sources: dict[int, Source] = {}

    def grow(self) -> int:
        """A new item opens: its output_index."""
        self.items.append(None)
        return len(self.items) - 1

    def finished(self) -> list[ResponseOutputItem]:
        return [item for item in self.items if item is not None]


class Turn:
    """Feed it one chat's steps; then `calls` and `hosted` are what the model wants done, and `finish` how it ended."""

    def __init__(self, output: Output, hosted: Mapping[str, HostedTool]) -> None:
        self.finish: Finish | None = None
        self.calls: dict[str, OpenCall] = {}
        self.hosted: dict[str, HostedCall] = {}
        self._tools = hosted
        self._output = output
        self._open: OpenMessage | OpenReasoning | None = None
        self._growing: set[str] = set()

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

    def _message_for(self, delta: Text | Refusal, events: Events) -> OpenMessage:
        phase = delta.phase if isinstance(delta, Text) else None
        current = self._open
        if isinstance(current, OpenMessage) and (current.phase == phase or isinstance(delta, Refusal)):
            return current
        self._close(events)
        citations = CitationScanner(self._output.sources) if self._output.sources else None
        message = OpenMessage(self._output.ids.item("msg"), self._output.grow(), phase, citations)
        self._open = message
        events += message.open()
        return message

    def _reasoning(self, events: Events) -> OpenReasoning:
        if not isinstance(self._open, OpenReasoning):
            self._close(events)
            self._open = OpenReasoning(self._output.ids.item("rs"), self._output.grow())
            events += self._open.open()
        return self._open

    def _call(self, start: ToolCallStart, events: Events) -> None:
        identity = start.id or call_id()
        self._growing = {identity}
        if identity in self.calls or identity in self.hosted:
            raise UpstreamError("The inference server began two tool calls with one id.")
        tool = self._tools.get(start.name)
        if tool is not None:
            index = self._output.grow()
            call = tool.begin(self._output.ids.item(tool.prefix), index, identity, start.name)
            self.hosted[identity] = call
        else:
            kind, prefix = (OpenCustomCall, "ctc") if start.custom else (OpenCall, "fc")
            index = self._output.grow()
            call = self.calls[identity] = kind(self._output.ids.item(prefix), index, identity, start.name)
        events += call.open()

    def _find(self, identity: str) -> OpenCall | HostedCall:
        call = self.calls.get(identity) or self.hosted.get(identity)
        if call is None:
            raise UpstreamError("The inference server sent arguments of a tool call that had not begun.")
        return call

    def _close(self, events: Events, status: Status = "completed") -> None:
        if self._open is not None:
            self._finish_item(self._open, status, events)
            self._open = None

    def _finish_item(self, item: OpenItem | HostedCall, status: Status, events: list[ResponseStreamEvent]) -> None:
        events += item.close(status)
        self._output.items[item.index] = item.item(status)
