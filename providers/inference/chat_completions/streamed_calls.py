"""Tool calls as an upstream streams them, as ToolCallStart and ToolArgumentsDelta.

A server should number the calls and name each once. Many do not: numbers are missing, all 0 or count the pieces, ids
are missing, repeated or made for each piece, the name comes with each piece. So a piece belongs to the call with its
number, else to the one with its id, else to the newest; and a piece with a name begins another call once the arguments
of that call have begun, unless it only repeats what has been said.
"""

import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from apis.chat import ChatCustomTool, ChatRequest
from apis.deltas import ToolArgumentsDelta, ToolCallStart
from apis.errors import UpstreamError
from providers.inference.chat_completions.answer_limits import text_bytes
from providers.inference.chat_completions.arguments import JsonDepth, means_nothing, read_object
from providers.inference.chat_completions.custom_tools import CustomInputReader
from providers.inference.chat_completions.deviations import CallPart
from providers.inference.chat_completions.text_repair import SurrogateJoiner

MAX_CALLS: Final = 1024
MAX_ID_CHARS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_UNNAMED_CHARS: Final = 64 * 1024
"""Characters of arguments that a call may have before its name."""
MAX_DELAYED_CHARS: Final = 64 * 1024
"""Characters of arguments that wait for their end because they do not begin as an object does."""

ToolCallDelta = ToolCallStart | ToolArgumentsDelta


class _StreamedCall:
    """One call. `naming_chunk` is the number of the chunk that named it. `pieces` are its arguments as they came;
    `delayed` those that are not sent on, because they do not begin as an object does."""

    __slots__ = (
        "chars",
        "custom_input",
        "delayed",
        "depth",
        "has_arguments",
        "has_delayed_text",
        "id",
        "index",
        "is_dropped",
        "is_named_again",
        "is_repeating",
        "is_started",
        "name",
        "naming_chunk",
        "pieces",
        "sends_arguments",
        "surrogate_joiner",
        "upstream_id",
    )

    def __init__(self, part: CallPart, *, is_dropped: bool) -> None:
        self.index = part.index
        self.upstream_id = part.call_id
        self.is_dropped = is_dropped
        self.id = self.name = ""
        self.naming_chunk = self.chars = 0
        self.pieces: list[str] = []
        self.delayed: list[str] = []
        self.depth = JsonDepth()
        self.is_started = self.has_arguments = self.has_delayed_text = self.sends_arguments = False
        self.is_repeating = self.is_named_again = False
        self.custom_input: CustomInputReader | None = None
        self.surrogate_joiner = SurrogateJoiner()

    @property
    def is_complete(self) -> bool:
        """The arguments are a whole JSON value."""
        return self.depth.is_closed_by(self.pieces)

    @property
    def is_half(self) -> bool:
        """There are arguments, and they are not yet a whole JSON value."""
        return self.has_arguments and not self.is_complete

    def add_arguments(self, text: str) -> None:
        self.pieces.append(text)
        self.chars += len(text)
        self.has_arguments = self.has_arguments or not text.isspace()


class StreamedCalls:
    """Calls of one response. A call starts once its name is complete: at a declared name, or when arguments follow.

    Every call gets an id that is unique in the chat: the upstream's if it is usable, a new one otherwise. `size_bytes`
    counts ids, names and arguments: a delta that leaves it unchanged says nothing.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._allows_one_call = request.parallel_tool_calls is False
        self._calls: list[_StreamedCall] = []
        self._newest_by_index: dict[int, _StreamedCall] = {}
        self._newest_by_id: dict[str, _StreamedCall] = {}
        self._chunk_count = 0
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
        """Return the number of calls that say anything."""
        return len([call for call in self._calls if call.name or call.has_arguments])

    def add_entries(self, entries: Sequence[Any]) -> list[ToolCallDelta]:
        """Return the deltas of the `tool_calls` of one chunk. Raises UpstreamError for too many calls and too long
        names."""
        self._chunk_count += 1
        out: list[ToolCallDelta] = []
        for entry in entries:
            if self._add_next_arguments(entry, out):
                continue
            part = CallPart(entry)
            if part.name or part.call_id or part.arguments:
                self._add_part(part, out)
        return out

    def find_ends(self, entries: Sequence[Any]) -> list[Any]:
        """Return what the calls of a whole message say beyond the calls before it: further ones, and the end of
        arguments."""
        calls = [call for call in self._calls if call.name or call.has_arguments]
        ends: list[Any] = []
        for call, part in zip(calls, map(CallPart, entries), strict=False):
            arguments = "".join(call.pieces)
            if part.arguments.startswith(arguments) and len(part.arguments) > len(arguments) and not call.is_complete:
                function = {"arguments": part.arguments[len(arguments) :]}
                ends.append({"index": call.index, "id": call.upstream_id, "function": function})
        return [*ends, *entries[len(calls) :]]

    def finish(self, *, is_cut: bool) -> list[ToolCallDelta]:
        """Return the deltas buffered until the end. The arguments of an answer that `is_cut` stay as they are. Raises
        UpstreamError for a call without a name that has arguments."""
        out: list[ToolCallDelta] = []
        for call in self._calls:
            if call.is_dropped or not (call.name or call.has_arguments):
                continue
            if not call.name:
                raise UpstreamError("The inference server sent a tool call without a name.")
            if not call.is_started:
                self._start_call(out, call)
            self._finish_arguments(out, call, is_cut=is_cut)
        return out

    def _add_next_arguments(self, entry: Any, out: list[ToolCallDelta]) -> bool:
        """Send the arguments of an entry that has nothing else, and return true, if its call has begun to send them:
        the fast path of nearly all entries."""
        if entry.__class__ is not dict or entry.get("id") or (index := entry.get("index")).__class__ is not int:
            return False
        function, call = entry.get("function"), self._newest_by_index.get(index)
        if call is None or not call.sends_arguments or function.__class__ is not dict or function.get("name"):
            return False
        arguments = function.get("arguments")
        if arguments.__class__ is not str or not arguments.isascii() or call.is_named_again:
            return False
        if arguments.startswith(("{", "null")):  # it may repeat what has been said
            return False
        if arguments:
            self.size_bytes += len(arguments)
            call.add_arguments(arguments)
            out.append(ToolArgumentsDelta(call.id, call.surrogate_joiner.feed(arguments)))
        return True

    def _add_part(self, part: CallPart, out: list[ToolCallDelta]) -> None:
        self.size_bytes += text_bytes(part.arguments)
        call = self._find_call(part)
        if call is not None and _repeats(call, part):
            return
        if call is None:
            call = self._open_call(part)
        elif part.name and call.has_arguments:
            call.is_repeating, call.is_named_again = True, call.is_complete
            part.arguments = _find_growth(call, part.arguments)
        if not call.is_started and part.name:
            self._add_name(call, part.name)
        if part.call_id and not call.upstream_id:
            call.upstream_id = part.call_id
            self._newest_by_id[part.call_id] = call
        if part.arguments:
            call.add_arguments(part.arguments)
        if call.is_dropped:
            return
        if call.is_started:
            if part.arguments:
                self._send_arguments(out, call, part.arguments)
        elif call.name and (call.has_arguments or self._is_complete_name(call.name)):
            self._start_call(out, call)
        elif not call.name and call.chars > MAX_UNNAMED_CHARS:
            raise UpstreamError("The inference server sent a tool call without a name.")

    # --- which call a part belongs to --------------------------------------------------------------------------------

    def _find_call(self, part: CallPart) -> _StreamedCall | None:
        """Return the call that the part continues; None for one that begins a call. A call that was named again after
        its arguments had ended is another call of the same function."""
        call = self._match_call(part)
        if call is None:
            return None
        if part.name:
            return None if self._begins_another(call, part) else call
        if call.is_named_again and part.arguments.strip():
            call.is_named_again = False
            part.name, part.call_id = call.name, ""
            return None
        return call

    def _match_call(self, part: CallPart) -> _StreamedCall | None:
        """Return the call that the part belongs to by its number, its id or its place."""
        if not self._calls:
            return None
        newest = self._calls[-1]
        with_id = self._newest_by_id.get(part.call_id)
        numbered = None if part.index is None else self._newest_by_index.get(part.index)
        if numbered is not None:
            return with_id if with_id is not None and with_id.index == part.index else numbered
        if part.index is not None and part.name:
            # the number may count the pieces of one call, each of which has the name
            is_same = part.name == newest.name and part.call_id in ("", newest.upstream_id)
            return newest if is_same and _continues(newest, part) else None
        if with_id is not None:
            return with_id
        if part.index is None and (part.name or not part.call_id):
            return newest
        # without a name, the number or the id may be that of the piece
        return newest if part.arguments and newest.name and not newest.is_complete else None

    def _begins_another(self, call: _StreamedCall, part: CallPart) -> bool:
        """Return true if a part with a name begins a call of its own, although it would otherwise belong to `call`."""
        has_other_id = bool(part.call_id and call.upstream_id and part.call_id != call.upstream_id)
        if not call.name:
            return has_other_id
        if not call.has_arguments:
            if has_other_id or call.naming_chunk == self._chunk_count:
                return True
            return part.name != call.name and not self._is_name_piece(call, part.name)
        if part.name != call.name:
            return True
        if not call.is_complete:
            return has_other_id and not _continues(call, part)
        # the same name once more: it is repeated where everything is
        is_repeated = call.is_repeating or bool(part.call_id and part.call_id == call.upstream_id)
        is_new = bool(part.arguments.strip()) and not _repeats(call, part)
        return has_other_id or is_new or not is_repeated

    def _is_name_piece(self, call: _StreamedCall, piece: str) -> bool:
        """Return true if the text may continue the call's name, and is no name itself."""
        if call.is_started:
            return False
        return piece not in self._tool_names or self._begins_name(call.name + piece)

    def _begins_name(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._tool_names)

    def _add_name(self, call: _StreamedCall, name: str) -> None:
        """Add a name, or a piece of one. A name that is there already is repeated."""
        if name == call.name and not self._begins_name(call.name + name):
            return
        call.name += name
        call.naming_chunk = self._chunk_count
        self.size_bytes += len(name)
        if len(call.name) > MAX_NAME_CHARS:
            raise UpstreamError("The inference server sent a tool name that is longer than allowed.")

    def _open_call(self, part: CallPart) -> _StreamedCall:
        if len(self._calls) >= MAX_CALLS:
            raise UpstreamError(f"The inference server sent more than {MAX_CALLS} tool calls.")
        call = _StreamedCall(part, is_dropped=self._allows_one_call and bool(self._calls))
        self.size_bytes += 1 + len(part.call_id)
        self._calls.append(call)
        if part.index is not None:
            self._newest_by_index[part.index] = call
        if part.call_id:
            self._newest_by_id[part.call_id] = call
        return call

    # --- what is sent on ---------------------------------------------------------------------------------------------

    def _is_complete_name(self, name: str) -> bool:
        return name in self._tool_names and not any(
            other != name and other.startswith(name) for other in self._tool_names
        )

    def _start_call(self, out: list[ToolCallDelta], call: _StreamedCall) -> None:
        """Send the start of a call, and the arguments that came before."""
        upstream_id = call.upstream_id
        is_usable = 0 < len(upstream_id) <= MAX_ID_CHARS and upstream_id.isascii() and upstream_id.isprintable()
        is_new = is_usable and upstream_id not in self._used_ids
        call.id = upstream_id if is_new else f"call_{secrets.token_hex(16)}"
        self._used_ids.add(call.id)
        call.is_started = True
        if call.name in self._custom_names:
            call.custom_input = CustomInputReader()
        name = call.surrogate_joiner.feed(call.name) + call.surrogate_joiner.flush()
        out.append(ToolCallStart(call.id, name, call.custom_input is not None))
        if call.pieces:
            self._send_arguments(out, call, "".join(call.pieces))

    def _send_arguments(self, out: list[ToolCallDelta], call: _StreamedCall, arguments: str) -> None:
        text = call.surrogate_joiner.feed(arguments)
        if call.custom_input is not None:
            text = call.custom_input.feed(text)
        elif not call.sends_arguments:
            begins = not call.has_delayed_text and text.lstrip().startswith("{") and not means_nothing(text)
            call.delayed.append(text)
            call.has_delayed_text = call.has_delayed_text or bool(text.strip())
            if not begins and call.chars < MAX_DELAYED_CHARS:
                return
            text = "".join(call.delayed)
            call.delayed.clear()
            call.sends_arguments = True
        if text:
            out.append(ToolArgumentsDelta(call.id, text))

    def _finish_arguments(self, out: list[ToolCallDelta], call: _StreamedCall, *, is_cut: bool) -> None:
        text = call.surrogate_joiner.flush()
        if call.custom_input is not None:
            text = call.custom_input.feed(text) + call.custom_input.finish()
        elif not call.sends_arguments:
            text = "".join(call.delayed) + text
            text = text if is_cut else read_object(text) or text
        if text:
            out.append(ToolArgumentsDelta(call.id, text))


def _repeats(call: _StreamedCall, part: CallPart) -> bool:
    """Return true if a call with whole arguments is given them once more, or an empty object after them."""
    if call.is_named_again or not part.arguments.strip() or not call.is_complete:
        return False
    said = "".join(call.pieces)
    return (not means_nothing(said) and means_nothing(part.arguments)) or part.arguments.strip() == said.strip()


def _find_growth(call: _StreamedCall, arguments: str) -> str:
    """Return what the arguments of a named piece add to those of a half call, which some servers send again in each
    piece."""
    if len(arguments) <= call.chars or not call.is_half:
        return arguments
    said = "".join(call.pieces)
    return arguments[len(said) :] if said.lstrip().startswith("{") and arguments.startswith(said) else arguments


def _continues(call: _StreamedCall, part: CallPart) -> bool:
    """Return true if the part's arguments can be the next ones of the call, and are no beginning of their own."""
    start = part.arguments.lstrip()
    return call.is_half and bool(start) and not start.startswith("{")
