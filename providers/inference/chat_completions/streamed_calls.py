"""Tool calls as an upstream streams them, keyed by index -> ToolCallStart and ToolArguments."""

import secrets
from typing import Final

from apis.chat import ChatRequest, CustomTool
from apis.deltas import ToolArguments, ToolCallStart
from apis.errors import UpstreamError
from providers.inference.chat_completions.custom_tools import CustomInput
from providers.inference.chat_completions.text_repair import SurrogateJoiner

MAX_CALLS: Final = 1024
MAX_ID_CHARS: Final = 256
MAX_NAME_CHARS: Final = 256

CallDelta = ToolCallStart | ToolArguments


class _Call:
    __slots__ = ("custom", "held", "id", "joiner", "name", "started", "upstream_id")

    def __init__(self, upstream_id: str) -> None:
        self.upstream_id = upstream_id
        self.id = self.name = self.held = ""
        self.started = False
        self.custom: CustomInput | None = None
        self.joiner = SurrogateJoiner()


class StreamedCalls:
    """The calls of one answer. A call begins once its name is whole: at a declared name, or when arguments follow.

    Every call gets an id that no other call of the chat has: the upstream's where that is one.
    """

    def __init__(self, request: ChatRequest) -> None:
        tools = request.tools or ()
        self._custom = frozenset(tool.name for tool in tools if isinstance(tool, CustomTool))
        self._names = self._custom | {tool.name for tool in tools if not isinstance(tool, CustomTool)}
        self._used_ids = {call.id for message in request.messages for call in message.tool_calls or ()}
        self._only_one = request.parallel_tool_calls is False
        self._by_index: dict[int, _Call] = {}
        self._calls: list[_Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, index: int, call_id: str, name: str, arguments: str) -> list[CallDelta]:
        """What one upstream delta means; empty strings where it said nothing."""
        call = self._by_index.get(index)
        # Some servers number every call 0: a new id beside a name is a new call.
        if call is None or (name and call_id and call.upstream_id and call_id != call.upstream_id):
            if self._only_one and self._calls:
                self._by_index.pop(index, None)
                return []
            call = self._by_index[index] = self._open(call_id)
        out: list[CallDelta] = []
        if not call.started:
            call.upstream_id = call.upstream_id or call_id
            call.name += name
            call.held += arguments
            if not call.name or not (call.held or self._is_whole(call.name)):
                return out
            out.append(self._start(call))
            arguments, call.held = call.held, ""
        if arguments:
            self._append(out, call, arguments)
        return out

    def finish(self) -> list[CallDelta]:
        """What was held back till the end. Raises UpstreamError for a call that never got a name."""
        out: list[CallDelta] = []
        for call in self._calls:
            if not call.started:
                if not call.name:
                    raise UpstreamError("The inference server sent a tool call without a name.")
                out.append(self._start(call))
            rest = call.joiner.flush()
            if call.custom is not None:
                rest = call.custom.feed(rest) + call.custom.finish()
            if rest:
                out.append(ToolArguments(call.id, rest))
        return out

    def _open(self, upstream_id: str) -> _Call:
        if len(self._calls) >= MAX_CALLS:
            raise UpstreamError(f"The inference server sent more than {MAX_CALLS} tool calls.")
        call = _Call(upstream_id)
        self._calls.append(call)
        return call

    def _is_whole(self, name: str) -> bool:
        return name in self._names and not any(other != name and other.startswith(name) for other in self._names)

    def _start(self, call: _Call) -> ToolCallStart:
        if len(call.name) > MAX_NAME_CHARS:
            raise UpstreamError("The inference server sent a tool name that is longer than allowed.")
        usable = (
            0 < len(call.upstream_id) <= MAX_ID_CHARS and call.upstream_id.isascii() and call.upstream_id.isprintable()
        )
        call.id = (
            call.upstream_id if usable and call.upstream_id not in self._used_ids else f"call_{secrets.token_hex(16)}"
        )
        self._used_ids.add(call.id)
        call.started = True
        if call.name in self._custom:
            call.custom = CustomInput()
        return ToolCallStart(call.id, call.joiner.feed(call.name) + call.joiner.flush(), call.custom is not None)

    def _append(self, out: list[CallDelta], call: _Call, arguments: str) -> None:
        text = call.joiner.feed(arguments)
        if call.custom is not None:
            text = call.custom.feed(text)
        if text:
            out.append(ToolArguments(call.id, text))
