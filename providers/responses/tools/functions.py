"""Calls of the client's functions and custom tools, whose items grow with their arguments."""

from dataclasses import dataclass
from typing import Any, Final

from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall, ResponseOutputItem

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.wire.text_format import Grammar
from providers.common.grammars.checks import matches
from providers.responses.events.open_items import EMPTY_ARGUMENTS
from providers.responses.events.response_events import arguments_delta_event, input_delta_event
from providers.responses.tools.call import ClientCall

_FORMAT_ERROR: Final = "The input does not match the tool's grammar."


@dataclass(frozen=True, slots=True)
class ClientToolName:
    """The name by which the client knows its function or custom tool. `grammar` is that of its input where the engine
    does not enforce it. The model goes on without the output of a call that `is_async`: it may come with a later
    request."""

    name: str
    namespace: str | None = None
    grammar: Grammar | None = None
    is_async: bool = False

    def create_call(self, start: ToolCallStart) -> "FunctionToolCall | CustomToolCall":
        """Return the call that the model has begun."""
        return CustomToolCall(start, self) if start.custom else FunctionToolCall(start, self)


class _NamedCall(ClientCall):
    """A call of a tool of the client's by the name that the client knows."""

    def __init__(self, start: ToolCallStart, client_tool: ClientToolName) -> None:
        super().__init__(start)
        self._client_tool = client_tool
        self.is_async = client_tool.is_async

    def _fields(self, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id,
            "type": self.item_type,
            "call_id": self.call_id,
            "name": self._client_tool.name,
        }
        if self._client_tool.namespace is not None:
            fields["namespace"] = self._client_tool.namespace
        if self.is_async:
            fields["async"] = True
        return {**fields, "status": status}


class FunctionToolCall(_NamedCall):
    """A call of a function. Arguments of nothing but blanks are an object: no JSON parser of a client reads an empty
    text."""

    item_type = "function_call"
    opens = "at once"
    _leading_blanks = ""
    _has_text = False

    def append(self, text: str, events: EventList) -> None:
        if not self._has_text:
            self._leading_blanks = text = self._leading_blanks + text
            if not text.strip():  # blanks may be all that the model writes
                return
            self._has_text = True
        super().append(text, events)
        events.append(arguments_delta_event(self.id, self.index, text))

    def end_arguments(self, events: EventList) -> None:
        if not self._has_text:
            self._leading_blanks = ""
            self.append(EMPTY_ARGUMENTS, events)

    def close(self, status: str) -> EventList:
        events: EventList = []
        if status == "completed":
            self.end_arguments(events)
        # some clients read the name, which older SDKs require
        done_event = self.text_event("done", name=self._client_tool.name, arguments=self.text)
        return [*events, done_event, *super().close(status)]

    def item(self, status: str) -> ResponseOutputItem:
        return ResponseFunctionToolCall.model_validate({**self._fields(status), "arguments": self.text})


class CustomToolCall(_NamedCall):
    """A call of a custom tool, whose input is free text. One with a grammar opens when the finished input has been
    matched; `is_match` is False where the input breaks the grammar."""

    item_type = "custom_tool_call"
    is_match = True
    _must_deliver = False

    def __init__(self, start: ToolCallStart, client_tool: ClientToolName) -> None:
        super().__init__(start, client_tool)
        self.opens = "at once" if client_tool.grammar is None else "when valid"

    async def match_input(self, tenant: str) -> None:
        """Match the input with the grammar, if there is one."""
        if self._client_tool.grammar is not None:
            self.is_match = await matches(self._client_tool.grammar, self.text, tenant)

    def deliver_mismatch(self) -> None:
        """Have the call delivered in spite of its input; its item then says so in `format_error`."""
        self._must_deliver = True

    def validate_arguments(self) -> None:
        if not self.is_match and not self._must_deliver:
            raise ToolFailed(
                f"Not run: the input of `{self.name}` does not match the grammar in its description. Call it again "
                "with an input that does."
            )

    def append(self, text: str, events: EventList) -> None:
        super().append(text, events)
        if self.index >= 0:
            events.append(input_delta_event(self.id, self.index, text))

    def close(self, status: str) -> EventList:
        text = self.text
        delta = [input_delta_event(self.id, self.index, text)] if self.opens == "when valid" and text else []
        return [*delta, self.text_event("done", input=text), *super().close(status)]

    def item(self, status: str) -> ResponseOutputItem:
        text = {"input": "" if status == "in_progress" else self.text}
        error = {} if self.is_match or status == "in_progress" else {"format_error": _FORMAT_ERROR}
        return ResponseCustomToolCall.model_validate({**self._fields(status), **text, **error})
