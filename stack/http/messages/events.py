"""From the events of a response's stream to those of a message's stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from openai.types.responses.response_output_item import McpCall

from apis.errors import Overloaded, StackError
from apis.events import INITIAL_EVENTS
from stack.http.messages.answer import (
    PART_BREAK,
    begin_message,
    build_citation,
    build_stop,
    build_usage,
    join_reasoning,
)
from stack.http.messages.conversion import MessageForm
from stack.http.messages.dialect import error_to_message_body
from stack.http.messages.json_text import to_json
from stack.http.messages.server_tools import ServerBlocks, build_code_use, build_mcp_use
from stack.http.streams import SHUTTING_DOWN_MESSAGE, EventStream

Json = dict[str, Any]


def _frame(event_type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event_type.encode(), to_json({"type": event_type, **fields}))


PING_FRAME: Final = _frame("ping")


class MessageStream(EventStream):
    """The stream of a message: it has pings while there is nothing to send, and no frame after its last event."""

    keep_alive_frame = PING_FRAME
    done_frame = b""
    shutdown_frame = _frame("error", error=error_to_message_body(Overloaded(SHUTTING_DOWN_MESSAGE))["error"])


_DELTAS: Final[Mapping[str, tuple[str, str]]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
    "server_tool_use": ("input_json_delta", "partial_json"),
    "mcp_tool_use": ("input_json_delta", "partial_json"),
}
"""The type of the deltas by which a block grows, and the field that has the text, by the type of the block."""
_FRAME_END: Final = b"}}\n\n"


class _OpenBlock:
    """A block that has begun. `part` is the part of its item that grew last, and `has_delta` is true once it grew."""

    __slots__ = ("_head", "has_delta", "index", "part")

    def __init__(self, index: int, block_type: str) -> None:
        self.index = index
        self.part = ("", 0)
        self.has_delta = False
        delta, field = _DELTAS.get(block_type, ("", ""))
        data = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        data %= (index, delta.encode(), field.encode())
        self._head = b"event: content_block_delta\ndata: %b" % data

    def grow(self, text: str) -> bytes:
        """Return the frame by which the block grows."""
        self.has_delta = True
        return self._head + to_json(text) + _FRAME_END


class MessageEvents:
    """Makes the frames of one message's stream. Blocks are numbered as they begin; an item of a response is one block,
    and that of a hosted call two."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._server_blocks = ServerBlocks(form.tool_names)
        self._has_begun = False
        self._block_count = 0
        self._open_blocks: dict[int, _OpenBlock] = {}
        """By the output index of their items."""
        self._mcp_calls: dict[int, McpCall] = {}
        """The calls that have begun, by their output index."""
        self._shown_calls: set[int] = set()
        """The output indexes of the calls that this server runs and whose results are still to come."""
        self._handlers: Mapping[str, Callable[[Any], bytes]] = {
            **dict.fromkeys(INITIAL_EVENTS, self._begin),
            "response.output_item.added": self._add_item,
            "response.output_text.delta": self._add_text,
            "response.refusal.delta": self._add_text,
            "response.output_text.annotation.added": self._add_citation,
            "response.reasoning_text.delta": self._add_thinking,
            "response.reasoning_summary_text.delta": self._add_thinking,
            "response.function_call_arguments.delta": self._add_arguments,
            "response.code_interpreter_call_code.done": self._show_program,
            "response.mcp_call_arguments.done": self._show_mcp_call,
            "response.output_item.done": self._end_item,
            "response.completed": self._end,
            "response.incomplete": self._end,
            "response.failed": self._close_all,
        }

    def encode(self, events: Sequence[Any]) -> bytes:
        """Return the frames of a batch, which may be none."""
        handlers = self._handlers
        return b"".join([handle(event) for event in events if (handle := handlers.get(event.type)) is not None])

    def encode_error(self, error: StackError) -> bytes:
        """Return the last frames of a stream that failed: open blocks end, and so does the message."""
        frame = _frame("error", error=error_to_message_body(error)["error"])
        return self._close_all() + frame + (_frame("message_stop") if self._has_begun else b"")

    def _begin(self, event: Any) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return _frame("message_start", message=begin_message(event.response, self._form))

    def _open_block(self, output_index: int, block: Json) -> bytes:
        opened = self._open_blocks[output_index] = _OpenBlock(self._block_count, block["type"])
        self._block_count += 1
        return _frame("content_block_start", index=opened.index, content_block=block)

    def _close_block(self, output_index: int) -> bytes:
        return _frame("content_block_stop", index=self._open_blocks.pop(output_index).index)

    def _close_all(self, _event: Any = None) -> bytes:
        """Return the end of the open blocks. After a failed response the error follows, which `encode_error` writes."""
        return b"".join([self._close_block(index) for index in [*self._open_blocks]])

    def _add_delta(self, output_index: int, delta: Json) -> bytes:
        block = self._open_blocks[output_index]
        block.has_delta = True
        return _frame("content_block_delta", index=block.index, delta=delta)

    def _add_item(self, event: Any) -> bytes:
        # a call is shown at once; text and thinking wait for the first of it, because an empty block is refused later
        if isinstance(event.item, McpCall):
            self._mcp_calls[event.output_index] = event.item
        if not isinstance(event.item, ResponseFunctionToolCall):
            return b""
        name = self._form.tool_names.restore(event.item.name)
        block: Json = {"type": "tool_use", "id": event.item.call_id, "name": name, "input": {}}
        return self._open_block(event.output_index, block)

    def _add_text(self, event: Any) -> bytes:
        text, block = event.delta, self._open_blocks.get(event.output_index)
        if block is not None:
            return block.grow(text) if text else b""
        return self._open_text(event.output_index) + self._open_blocks[event.output_index].grow(text) if text else b""

    def _open_text(self, output_index: int) -> bytes:
        return self._open_block(output_index, {"type": "text", "text": ""})

    def _add_citation(self, event: Any) -> bytes:
        annotation: Any = event.annotation
        if not isinstance(annotation, dict):
            annotation = annotation.model_dump()
        annotation = cast("Json", annotation)
        if annotation.get("type") != "url_citation":
            return b""
        opening = b"" if event.output_index in self._open_blocks else self._open_text(event.output_index)
        delta = {"type": "citations_delta", "citation": build_citation(annotation)}
        return opening + self._add_delta(event.output_index, delta)

    def _add_thinking(self, event: Any) -> bytes:
        if not self._form.shows_thinking or self._form.omits_thinking or not event.delta:
            return b""
        part = (event.type, getattr(event, "summary_index", None) or getattr(event, "content_index", None) or 0)
        block, text, opening = self._open_blocks.get(event.output_index), event.delta, b""
        if block is None:
            opening = self._open_block(event.output_index, _empty_thinking())
            block = self._open_blocks[event.output_index]
        elif block.part != part:
            if block.part[0] != part[0]:  # the summary of a text that was shown
                return b""
            text = f"{PART_BREAK}{text}"
        block.part = part
        return opening + block.grow(text)

    def _add_arguments(self, event: Any) -> bytes:
        block = self._open_blocks.get(event.output_index)
        return block.grow(event.delta) if event.delta and block is not None else b""

    def _show_program(self, event: Any) -> bytes:
        """Return the block of a program, which runs from now on."""
        self._shown_calls.add(event.output_index)
        return self._send_whole_block(event.output_index, build_code_use(event.item_id, event.code))

    def _show_mcp_call(self, event: Any) -> bytes:
        """Return the block of a call, which is made now."""
        call = self._mcp_calls.pop(event.output_index, None)
        if call is None:
            return b""
        self._shown_calls.add(event.output_index)
        return self._send_whole_block(event.output_index, build_mcp_use(call, event.arguments))

    def _end_item(self, event: Any) -> bytes:
        index, item = event.output_index, event.item
        match item:
            case ResponseReasoningItem():
                frames = b"".join(self._end_reasoning(index, item))
            case ResponseFunctionToolCall():
                block = self._open_blocks.get(index)
                frames = block.grow(item.arguments) if block is not None and not block.has_delta else b""
            case ResponseOutputMessage():
                frames = b""
            case _:
                blocks = self._server_blocks.build(item)[1 if index in self._shown_calls else 0 :]
                frames = b"".join([self._send_whole_block(index, block) for block in blocks])
        return frames + self._close_block(index) if index in self._open_blocks else frames

    def _end_reasoning(self, index: int, item: ResponseReasoningItem) -> Iterator[bytes]:
        if not self._form.shows_thinking:
            return
        if index not in self._open_blocks:
            yield self._open_block(index, _empty_thinking())
            if not self._form.omits_thinking and (text := join_reasoning(item)):
                yield self._open_blocks[index].grow(text)
        yield self._add_delta(index, {"type": "signature_delta", "signature": item.encrypted_content or ""})

    def _send_whole_block(self, index: int, block: Json) -> bytes:
        if not block["type"].endswith("tool_use"):
            return self._open_block(index, block) + self._close_block(index)
        opening = self._open_block(index, {**block, "input": {}})
        return opening + self._open_blocks[index].grow(to_json(block["input"]).decode()) + self._close_block(index)

    def _end(self, event: Any) -> bytes:
        usage, stop = build_usage(event.response, self._form), build_stop(event.response, self._form)
        return self._close_all() + _frame("message_delta", delta=stop, usage=usage) + _frame("message_stop")


def _empty_thinking() -> Json:
    return {"type": "thinking", "thinking": "", "signature": ""}
