"""Calls of custom tools with a grammar, on engines that do not enforce it: their finished input is matched."""

from typing import Any, Final

from openai.types.responses import ResponseOutputItem

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from apis.events import EventList
from apis.wire.text_format import Grammar
from providers.common.grammars.checks import matches
from providers.responses.events.open_items import OpenCustomCall
from providers.responses.tools.call import ClientCall

_FORMAT_ERROR: Final = "The input does not match the tool's grammar."


class GrammarCall(ClientCall):
    """A call of a custom tool with a grammar, on an engine that does not enforce it. `is_match` is False once the
    finished input was matched and breaks the grammar."""

    item_type = "custom_tool_call"

    def __init__(self, start: ToolCallStart, grammar: Grammar, client_name: str, namespace: str | None) -> None:
        super().__init__(start)
        self.is_match = True
        self._grammar = grammar
        self._client_name = client_name
        self._namespace = namespace
        self._must_deliver = False

    async def match_input(self, tenant: str) -> None:
        self.is_match = await matches(self._grammar, self.text, tenant)

    def deliver_mismatch(self) -> None:
        """Have the call delivered in spite of its input; its item then says so in `format_error`."""
        self._must_deliver = True

    def validate_arguments(self) -> None:
        if not self.is_match and not self._must_deliver:
            raise ToolFailed(
                f"Not run: the input of `{self.name}` does not match the grammar in its description. Call it again "
                "with an input that does."
            )

    def open(self) -> EventList:
        return self._build_item().open()

    def close(self, status: str) -> EventList:
        item, events = self._build_item(), list[Any]()
        if self.text:
            item.append(self.text, events)
        *done, item_done = item.close("completed")
        return [*events, *done, item_done.model_copy(update={"item": self.item(status)})]

    def item(self, status: str) -> ResponseOutputItem:
        built = self._build_item()
        if self.text:
            built.append(self.text, [])
        item = built.item("completed")
        return item if self.is_match else item.model_copy(update={"format_error": _FORMAT_ERROR})

    def _build_item(self) -> OpenCustomCall:
        return OpenCustomCall(self.id, self.index, self.call_id, self._client_name, self._namespace)
