"""A call of a tool that does not exist. It never becomes an item: the model is told."""

from openai.types.responses import ResponseOutputItem

from apis.errors import ToolFailed
from providers.responses.hosted.call import ClientCall


class Undeclared(ClientCall):
    """Never made."""

    prefix = "fc"

    def take(self) -> None:
        raise ToolFailed(f"There is no tool named '{self.name}'. Call only tools that you were given.")

    def item(self, status: str) -> ResponseOutputItem:
        raise AssertionError("a call of a tool that does not exist has no item")
