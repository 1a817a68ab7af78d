"""Tools that any chat model can use: functions and free-text tools, each by one plain name."""

from collections.abc import Sequence

from apis.chat import ChatCustomTool, ChatFunctionTool, ChatTool, NativeTool
from apis.errors import Unsupported

PlainTool = ChatFunctionTool | ChatCustomTool


def require_plain_tools(tools: Sequence[ChatTool] | None) -> list[PlainTool]:
    """Return the tools unchanged. Raises Unsupported naming the first one that needs a model trained on it."""
    plain: list[PlainTool] = []
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, NativeTool):
            raise Unsupported(f"This model was not trained on the tool '{tool.type}'.", param=f"tools[{index}].type")
        if isinstance(tool, ChatFunctionTool) and tool.function.namespace is not None:
            raise Unsupported(
                "This model knows no namespaces of functions.", param=f"tools[{index}].function.namespace"
            )
        plain.append(tool)
    return plain
