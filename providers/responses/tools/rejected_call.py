"""A call of a tool that does not exist, or may not be called now. It never becomes an item: the model is told."""

from openai.types.responses import ResponseOutputItem

from apis.deltas import ToolCallStart
from apis.errors import ToolFailed
from providers.responses.tools.call import ClientCall


class RejectedCall(ClientCall):
    """Never made. `why` is what the model is told."""

    prefix = "fc"

    def __init__(self, start: ToolCallStart, reason: str | None = None) -> None:
        super().__init__(start)
        self._reason = reason or f"There is no tool named '{self.name}'. Call only tools that you were given."

    def validate_arguments(self) -> None:
        raise ToolFailed(self._reason)

    def item(self, status: str) -> ResponseOutputItem:
        raise AssertionError("a call of a tool that does not exist has no item")
