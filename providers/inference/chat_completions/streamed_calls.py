"""Tool calls as an upstream streams them, keyed by index, as ToolCallStart and ToolArgumentsDelta."""

import secrets
from functools import cached_property
from typing import Final

from apis.chat import ChatCustomTool, ChatRequest
from apis.deltas import ToolArgumentsDelta, ToolCallStart
from apis.errors import UpstreamError
from providers.inference.chat_completions.answer_limits import text_bytes
from providers.inference.chat_completions.custom_tools import CustomInputReader
from providers.inference.chat_completions.text_repair import SurrogateJoiner

MAX_CALLS: Final = 1024
MAX_ID_CHARS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_UNNAMED_CHARS: Final = 64 * 1024
"""Characters of arguments that a call may have before its name."""

ToolCallDelta = ToolCallStart | ToolArgumentsDelta


class _StreamedCall:
    __slots__ = ("custom_input", "id", "is_started", "name", "pending_arguments", "surrogate_joiner", "upstream_id")

    def __init__(self, upstream_id: str) -> None:
        self.upstream_id = upstream_id
        self.id = self.name = self.pending_arguments = ""
        self.is_started = False
        self.custom_input: CustomInputReader | None = None
        self.surrogate_joiner = SurrogateJoiner()


class StreamedCalls:
    """Calls of one response. A call starts once its name is complete: at a declared name, or when arguments follow.

    Every call gets an id that is unique in the chat: the upstream's if it is usable, a new one otherwise. `size_bytes`
    counts ids, names and arguments: a delta that leaves it unchanged says nothing.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._allows_one_call = request.parallel_tool_calls is False
        self._calls_by_index: dict[int, _StreamedCall] = {}
        self._calls: list[_StreamedCall] = []
        self.size_bytes = 0

    # built at the first call: most answers have none

    @cached_property
    def _custom_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self._request.tools or () if isinstance(tool, ChatCustomTool))

    @cached_property
    def _tool_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self._request.tools or ())

    @cached_property
    def _used_ids(self) -> set[str]:
        return {call.id for message in self._request.messages for call in message.tool_calls or ()}

    def __len__(self) -> int:
        return len(self._calls)

    def add_delta(self, index: int, call_id: str, name: str, arguments: str) -> list[ToolCallDelta]:
        """Return the deltas of one upstream delta; the parameters are empty strings where it has no value. Raises
        UpstreamError for too many calls and too long names."""
        self.size_bytes += text_bytes(arguments)
        call = self._calls_by_index.get(index)
        # Some servers number every call 0: a new id together with a name is a new call.
        if call is None or (name and call_id and call.upstream_id and call_id != call.upstream_id):
            if self._allows_one_call and self._calls:
                self._calls_by_index.pop(index, None)
                return []
            call = self._calls_by_index[index] = self._open_call(call_id)
        out: list[ToolCallDelta] = []
        if not call.is_started:
            call.upstream_id = call.upstream_id or call_id
            call.name += name
            self.size_bytes += len(name)
            call.pending_arguments += arguments
            if len(call.name) > MAX_NAME_CHARS:
                raise UpstreamError("The inference server sent a tool name that is longer than allowed.")
            if not call.name and len(call.pending_arguments) > MAX_UNNAMED_CHARS:
                raise UpstreamError("The inference server sent a tool call without a name.")
            if not call.name or not (call.pending_arguments or self._is_complete_name(call.name)):
                return out
            out.append(self._start_call(call))
            arguments, call.pending_arguments = call.pending_arguments, ""
        if arguments:
            self._append_arguments(out, call, arguments)
        return out

    def finish(self) -> list[ToolCallDelta]:
        """Return the deltas buffered until the end. Raises UpstreamError for a call without a name."""
        out: list[ToolCallDelta] = []
        for call in self._calls:
            if not call.is_started:
                if not call.name:
                    raise UpstreamError("The inference server sent a tool call without a name.")
                out.append(self._start_call(call))
            remainder = call.surrogate_joiner.flush()
            if call.custom_input is not None:
                remainder = call.custom_input.feed(remainder) + call.custom_input.finish()
            if remainder:
                out.append(ToolArgumentsDelta(call.id, remainder))
        return out

    def _open_call(self, upstream_id: str) -> _StreamedCall:
        if len(self._calls) >= MAX_CALLS:
            raise UpstreamError(f"The inference server sent more than {MAX_CALLS} tool calls.")
        call = _StreamedCall(upstream_id)
        self.size_bytes += 1 + len(upstream_id)
        self._calls.append(call)
        return call

    def _is_complete_name(self, name: str) -> bool:
        return name in self._tool_names and not any(
            other != name and other.startswith(name) for other in self._tool_names
        )

    def _start_call(self, call: _StreamedCall) -> ToolCallStart:
        usable = (
            0 < len(call.upstream_id) <= MAX_ID_CHARS and call.upstream_id.isascii() and call.upstream_id.isprintable()
        )
        call.id = (
            call.upstream_id if usable and call.upstream_id not in self._used_ids else f"call_{secrets.token_hex(16)}"
        )
        self._used_ids.add(call.id)
        call.is_started = True
        if call.name in self._custom_names:
            call.custom_input = CustomInputReader()
        return ToolCallStart(
            call.id,
            call.surrogate_joiner.feed(call.name) + call.surrogate_joiner.flush(),
            call.custom_input is not None,
        )

    def _append_arguments(self, deltas: list[ToolCallDelta], call: _StreamedCall, arguments: str) -> None:
        text = call.surrogate_joiner.feed(arguments)
        if call.custom_input is not None:
            text = call.custom_input.feed(text)
        if text:
            deltas.append(ToolArgumentsDelta(call.id, text))
